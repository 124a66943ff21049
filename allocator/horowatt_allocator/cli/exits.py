# SPDX-License-Identifier: Apache-2.0
"""Exit codes.

==== ===========================================================================================
code meaning
==== ===========================================================================================
0    done
1    ``doctor``: a check failed; ``demo``: what it was to show did not hold
125  the tool, the service or the machine failed, or a job ended without an exit code of its own
126  what was asked for cannot be used: usage, options, files, values
127  no such job, node or tenant, or not allowed
130  interrupted by Ctrl-C (as every program ended by signal 2; ``ps --watch`` returns 0)
141  nobody reads the output any more (as every program ended by signal 13)
==== ===========================================================================================

``submit --wait`` returns the exit code of the job itself, 128 + n when signal n ended it. A job may
use any code, so scripts that must tell it from the tool's own errors read the ``--json`` output.
"""

from horowatt.errors import HorowattError, InvalidInput, NotAllowed, NotFound

OK = 0
CHECK_FAILED = 1
TOOL_ERROR = 125
INVALID_INPUT = 126
REFUSED = 127
INTERRUPTED = 130
BROKEN_PIPE = 141
_SIGNAL_BASE = 128


def code_of(error: HorowattError) -> int:
    """Return the exit code that tells a script which kind of error this is."""
    if isinstance(error, InvalidInput):
        return INVALID_INPUT
    if isinstance(error, NotFound | NotAllowed):
        return REFUSED
    return TOOL_ERROR


def code_of_job(phase: str, exit_code: int | None) -> int:
    """Return what ``submit --wait`` ends with for a job that ended.

    Args:
        phase: Phase in which the job ended.
        exit_code: Of its script, negative when a signal ended it; None when there is none.
    """
    if phase == "finished":
        return exit_code or OK
    if phase == "failed" and exit_code:
        return exit_code if exit_code > 0 else _SIGNAL_BASE - exit_code
    # Cancelled, lost, or failed although the script returned 0: success would be a lie.
    return TOOL_ERROR
