# SPDX-License-Identifier: Apache-2.0
"""What the ends of a job's workers say about the job. Pure: no I/O, no clock."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from horowatt.records import LauncherState

EXIT_REFUSED = 125
"""Exit code of a worker that Horowatt itself did not let start."""
EXIT_NOT_JOINED = 124
"""Exit code in the place of 0 for a standby whose script ended before it reached ``hvd.elastic.run``."""
EXIT_NOT_PYTHON = 126
EXIT_MISSING = 127

MESSAGE_LINES = 8
"""Lines of a traceback that go into the one message people see first."""

_OWN_ERROR = re.compile(r"^error\[(HW-[A-Z]+-\d{3})\]: (.*)$", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
_MAY_RUN_AGAIN = frozenset({"HW-JOB-009", "HW-JOB-014"})
"""Refusals that another start may not meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """How one worker ended.

    Attributes:
        exit_code: As Python's subprocess has it: negative signal number when killed.
        steps: Optimizer steps it made.
        measurable: False when its steps could not be counted.
        joined: True when it entered a Horovod world.
        in_last_world: True when the last world that Horovod assigned has a rank for it.
        ended_by_launcher: True when the launcher signalled it.
        ended_s: When it ended.
        tail: Last part of its output.
    """

    lease_id: str
    exit_code: int
    steps: int
    measurable: bool
    joined: bool
    in_last_world: bool
    ended_by_launcher: bool
    ended_s: float
    tail: str

    def own_error(self) -> tuple[str, str] | None:
        """Return code and message of the last error of Horowatt's own in its output, if there is one."""
        found = _OWN_ERROR.findall(self.tail)
        return (found[-1][0], found[-1][1]) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of the job, in the fields of ``LauncherStatus``, and the worker to blame if any."""

    state: LauncherState
    exit_code: int | None
    code: str = ""
    message: str = ""
    blamed: WorkerEnd | None = None


def judge(ends: Sequence[WorkerEnd], gave_up: str = "", *, trained_before: bool = False) -> Verdict:
    """Return the verdict on a job whose workers have all ended.

    Workers that had left the job, and those that the launcher ended, have no say.

    Args:
        gave_up: Why the launcher ended the job itself, or an empty string.
        trained_before: True when an earlier world of the job left a commit, so that the last one may have
            had nothing left to do.
    """
    heard = sorted(
        (end for end in ends if end.in_last_world and not end.ended_by_launcher), key=lambda end: end.ended_s
    )
    raised = [end for end in heard if end.exit_code > 0]
    if raised:
        return _raised(raised, ends)
    if gave_up:
        return _lost(gave_up, heard)
    if not heard or any(end.exit_code < 0 for end in heard):
        return _lost(_how_lost(heard), heard)
    if trained_before or any(end.steps or not end.measurable for end in ends):
        return Verdict(state=LauncherState.FINISHED, exit_code=0)
    return Verdict(
        state=LauncherState.FAILED,
        exit_code=0,
        code="HW-JOB-004",
        message="the script ended with exit code 0 without a single training step",
        blamed=heard[0],
    )


def _raised(raised: Sequence[WorkerEnd], ends: Sequence[WorkerEnd]) -> Verdict:
    first = raised[0]
    refusals = _OWN_ERROR.findall(first.tail) if first.exit_code >= EXIT_REFUSED else []
    if refusals:
        code, message = refusals[-1]
        if code in _MAY_RUN_AGAIN:
            return _lost(f"worker {first.lease_id} could not start: {message}", raised)
        return Verdict(
            state=LauncherState.FAILED, exit_code=first.exit_code, code=code, message=message, blamed=first
        )
    if all(end.measurable and not end.joined for end in raised) and any(end.steps for end in ends):
        # The script has proved that it can train; what failed is this start of it, perhaps this node.
        return _lost(f"new worker {first.lease_id} failed before it joined: {last_line(first.tail)}", raised)
    traceback = "\n".join(last_traceback(first.tail)[-MESSAGE_LINES:])
    return Verdict(
        state=LauncherState.FAILED,
        exit_code=first.exit_code,
        code="HW-JOB-005",
        message=f"the script failed with exit code {first.exit_code} on worker {first.lease_id}:\n"
        f"{traceback}",
        blamed=first,
    )


def _lost(why: str, candidates: Sequence[WorkerEnd]) -> Verdict:
    blamed = next((end for end in candidates if end.exit_code != 0), None)
    return Verdict(
        state=LauncherState.LOST,
        exit_code=blamed.exit_code if blamed else None,
        code="HW-JOB-006",
        message=why,
        blamed=blamed,
    )


def _how_lost(heard: Sequence[WorkerEnd]) -> str:
    killed = [end for end in heard if end.exit_code < 0]
    if not killed:
        return "the workers ended without saying how"
    first = killed[0]
    return f"worker {first.lease_id} was killed by signal {-first.exit_code}, and the job did not recover"


def last_line(text: str) -> str:
    """Return the line that says what went wrong, as far as ``text`` tells."""
    lines = [line.strip() for line in last_traceback(text) if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def last_traceback(text: str) -> list[str]:
    """Return the lines of the last Python traceback in ``text``, or its last lines if there is none."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not starts:
        return lines[-MESSAGE_LINES:]
    start = starts[-1]
    for number in range(start + 1, len(lines)):
        if lines[number] and not lines[number][0].isspace():
            return lines[start : number + 1]
    return lines[start:]
