# SPDX-License-Identifier: Apache-2.0
"""What the ends of workers say about their job."""

import pytest

from horowatt.elastic.verdict import WorkerEnd, judge, last_traceback
from horowatt.records import LauncherState

TRACEBACK = """epoch 1
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    1 / 0
ZeroDivisionError: division by zero
[0]<stderr> some later noise"""


def _end(
    lease_id: str = "a",
    exit_code: int = 0,
    steps: int = 10,
    *,
    measurable: bool = True,
    joined: bool = True,
    in_last_world: bool = True,
    ended_by_launcher: bool = False,
    ended_s: float = 1.0,
    tail: str = "",
) -> WorkerEnd:
    return WorkerEnd(
        lease_id=lease_id,
        exit_code=exit_code,
        steps=steps,
        measurable=measurable,
        joined=joined,
        in_last_world=in_last_world,
        ended_by_launcher=ended_by_launcher,
        ended_s=ended_s,
        tail=tail,
    )


def test_all_done_after_training_is_finished() -> None:
    """Exit code 0 of all workers after at least one step means that the job finished."""
    verdict = judge([_end("a"), _end("b")])
    assert (verdict.state, verdict.exit_code, verdict.code) == (LauncherState.FINISHED, 0, "")


def test_training_of_workers_that_left_counts() -> None:
    """A worker that joined for the end only need not have made a step itself."""
    assert judge([_end("a", in_last_world=False), _end("b", steps=0)]).state is LauncherState.FINISHED


def test_exit_0_without_training_is_a_failure() -> None:
    """A script that ends without a step did not do what the job is for."""
    verdict = judge([_end(steps=0)])
    assert (verdict.state, verdict.code) == (LauncherState.FAILED, "HW-JOB-004")


def test_exit_0_of_what_cannot_be_measured_is_finished() -> None:
    """Zero steps of a program whose steps cannot be counted say nothing."""
    assert judge([_end(steps=0, measurable=False)]).state is LauncherState.FINISHED


def test_a_script_that_raised_failed_and_its_traceback_is_told() -> None:
    """The first worker that raised is blamed, with its exception, whatever the others did then."""
    verdict = judge(
        [_end("b", -6, ended_s=3.0), _end("c", 1, ended_s=2.0, tail="other"), _end("a", 1, tail=TRACEBACK)]
    )
    assert (verdict.state, verdict.code, verdict.exit_code) == (LauncherState.FAILED, "HW-JOB-005", 1)
    assert verdict.blamed is not None
    assert verdict.blamed.lease_id == "a"
    assert verdict.message.endswith("ZeroDivisionError: division by zero")


def test_workers_killed_by_signals_make_the_job_lost() -> None:
    """Nobody raised: the job may run again, and the message names the signal."""
    verdict = judge([_end("a", -9), _end("b", -6, ended_s=2.0)])
    assert (verdict.state, verdict.code) == (LauncherState.LOST, "HW-JOB-006")
    assert "signal 9" in verdict.message


def test_a_newcomer_that_fails_does_not_fail_a_job_that_trains() -> None:
    """The script has proved itself; its failure on one new slot is a reason to start again."""
    verdict = judge([_end("new", 1, 0, joined=False, tail=TRACEBACK), _end("old", -6, 500, ended_s=2.0)])
    assert (verdict.state, verdict.code) == (LauncherState.LOST, "HW-JOB-006")
    assert "ZeroDivisionError" in verdict.message


def test_those_that_left_or_were_ended_have_no_say() -> None:
    """A removed worker's exit code and the launcher's own signals are not the job's fault."""
    ends = [_end("left", 1, in_last_world=False), _end("ended", -15, ended_by_launcher=True), _end("a")]
    assert judge(ends).state is LauncherState.FINISHED


def test_giving_up_is_a_loss_with_its_reason() -> None:
    """What the launcher gave up may run again."""
    verdict = judge([_end(ended_by_launcher=True)], "nobody answers")
    assert (verdict.state, verdict.message) == (LauncherState.LOST, "nobody answers")


def test_nobody_at_all_is_a_loss() -> None:
    """Without a single worker there is still a verdict."""
    assert judge([]).state is LauncherState.LOST


@pytest.mark.parametrize(
    ("code", "exit_code", "state"),
    [
        ("HW-JOB-001", 127, LauncherState.FAILED),
        ("HW-JOB-002", 126, LauncherState.FAILED),
        ("HW-JOB-007", 125, LauncherState.FAILED),
        ("HW-JOB-009", 125, LauncherState.LOST),
        ("HW-JOB-014", 125, LauncherState.LOST),
    ],
)
def test_horowatts_own_refusals_keep_their_code(code: str, exit_code: int, state: LauncherState) -> None:
    """A worker that was not let start says why; only what may pass by itself is tried again."""
    verdict = judge(
        [_end(exit_code=exit_code, steps=0, joined=False, tail=f"error[{code}]: the reason\n  try: x")]
    )
    assert verdict.state is state
    assert verdict.code == (code if state is LauncherState.FAILED else "HW-JOB-006")
    assert "the reason" in verdict.message


def test_a_script_may_use_those_exit_codes_itself() -> None:
    """Exit code 127 without Horowatt's own words is the script's."""
    assert judge([_end(exit_code=127, tail="x")]).code == "HW-JOB-005"


def test_the_last_traceback_is_found_among_other_output() -> None:
    """Neither what came before nor what came after belongs to it."""
    lines = last_traceback(f"{TRACEBACK}\n{TRACEBACK}\nnoise")
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert len(lines) == 4


def test_output_without_a_traceback_gives_its_last_lines() -> None:
    """There is always something to show, and it is short."""
    assert last_traceback("") == []
    assert last_traceback("\n".join(str(number) for number in range(100)))[-1] == "99"
    assert len(last_traceback("\n".join(str(number) for number in range(100)))) == 8
