# SPDX-License-Identifier: Apache-2.0
"""The state of a job whose workers a user's own ``horovodrun`` starts. Pure: no I/O, no clock.

Nobody tells the agent when such a job begins or ends, so its workers' locks and exit files must.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from horowatt.elastic.leaving import EXIT_TERMINATED
from horowatt.records import LauncherState, LeaseReport

STOPPED_CODE = "HW-AGENT-015"
"""The job ended because the head ordered it, and no launcher was there to say so."""
QUIET_S = 5.0
"""Seconds without any worker after which the job is over; Horovod replaces workers faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedState:
    """What the workers say together, in the fields of ``LauncherStatus``."""

    state: LauncherState
    exit_code: int | None = None
    code: str = ""
    message: str = ""


def derive(
    leases: Sequence[LeaseReport], *, run: bool, quiet_s: float, measurable: bool
) -> AttachedState | None:
    """Return the state of an attached job, or None before its first worker.

    Args:
        leases: Those of the published slots file, or all when it has none on this node.
        run: False when the head wants the job to end.
        quiet_s: Seconds since a worker was last seen alive.
        measurable: False when steps of the command cannot be counted.
    """
    if any(lease.held for lease in leases):
        return AttachedState(state=LauncherState.RUNNING)
    if not run:
        return AttachedState(
            state=LauncherState.STOPPED, code=STOPPED_CODE, message="the job was stopped on request"
        )
    if not any(lease.started for lease in leases):
        return None
    if quiet_s < QUIET_S:
        return AttachedState(state=LauncherState.RUNNING)
    codes = [lease.exit_code for lease in leases if lease.exit_code is not None]
    if 0 in codes:
        if measurable and not any(lease.steps for lease in leases):
            return AttachedState(
                state=LauncherState.FAILED,
                exit_code=0,
                code="HW-JOB-004",
                message="the script ended with exit code 0 without a single training step",
            )
        return AttachedState(state=LauncherState.FINISHED, exit_code=0)
    failed = [code for code in codes if code > 0 and code != EXIT_TERMINATED]
    if failed:
        return AttachedState(
            state=LauncherState.FAILED,
            exit_code=failed[0],
            code="HW-JOB-005",
            message=f"every worker ended with an error, the first with exit code {failed[0]}",
        )
    return AttachedState(
        state=LauncherState.LOST,
        exit_code=codes[0] if codes else None,
        code="HW-JOB-006",
        message="all workers are gone, and none ended by itself",
    )
