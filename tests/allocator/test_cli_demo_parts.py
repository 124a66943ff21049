# SPDX-License-Identifier: Apache-2.0
"""The parts of the demo that need no cluster: its verdict, its lines, its processes."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from horowatt.errors import NeedsOperator
from horowatt_allocator.cli.demonstration import plan
from horowatt_allocator.cli.demonstration.processes import descendants, read_table
from horowatt_allocator.cli.demonstration.screen import decision_lines, status_line
from horowatt_allocator.cli.demonstration.verdict import (
    JobResult,
    grown_and_shrunk,
    parse_accuracy,
    problems,
    result_lines,
)
from horowatt_allocator.reports.balance import Balance

GOOD = JobResult(
    tenant="vision", job_id="j", phase="finished", reason="done", exit_code=0, accuracy=0.96,
    alone_accuracy=0.97, widths=(1, 3, 2), pauses_s=(4.0, None), energy_j=1000.0, samples=5000,
    samples_per_j=5.0, simulated=True,
)  # fmt: skip
ADDS_UP = Balance(
    counters_j=1.0, booked_j=1.0, booked_error_ratio=0.0, parts_j=1.0, total_j=1.0, parts_error_ratio=0.0,
    adds_up=True, sentence="adds up",
)  # fmt: skip


@pytest.mark.parametrize(
    ("widths", "both"),
    [
        ((1, 3, 2), True), ((4, 2, 4), True), ((1, 2, 4), False), ((4, 2), False), ((), False), ((2,), False),
        ((1, 0, 4, 0, 2), False), ((2, 0, 2, 3, 1), True),
    ],
)  # fmt: skip
def test_grown_and_shrunk(widths: tuple[int, ...], both: bool) -> None:
    """Only changes between two widths of a running job count, in both directions."""
    assert grown_and_shrunk(widths) is both


def test_a_good_run_has_no_problems() -> None:
    """What the demo is to show is enough for it to pass."""
    assert problems([GOOD, replace(GOOD, widths=(1,))], ADDS_UP) == []


@pytest.mark.parametrize(
    ("result", "mentions"),
    [
        (replace(GOOD, phase="failed", exit_code=3, reason="crashed"), "crashed"),
        (replace(GOOD, phase="cancelled", exit_code=None), "cancelled"),
        (replace(GOOD, accuracy=None), "printed no accuracy"),
        (replace(GOOD, alone_accuracy=None), "solo run"),
        (replace(GOOD, accuracy=0.9), "below"),
        (replace(GOOD, widths=(1, 2)), "no job was both grown and shrunk"),
    ],
)
def test_each_failure_is_named(result: JobResult, mentions: str) -> None:
    """A failed job, lost accuracy and a missing resize each fail the demo by name."""
    [problem] = problems([result], ADDS_UP)
    assert mentions in problem


def test_accuracy_within_the_tolerance_passes() -> None:
    """Up to the tolerance below the solo run is a different order of samples, not a loss."""
    near = replace(GOOD, accuracy=0.97 - plan.ACCURACY_TOLERANCE + 1e-6)
    assert problems([near], ADDS_UP) == []


@pytest.mark.parametrize("adds_up", [False, None])
def test_energy_that_is_not_shown_to_add_up_fails(adds_up: bool | None) -> None:
    """Energy that does not add up, or could not be checked, fails the demo."""
    assert problems([GOOD], replace(ADDS_UP, adds_up=adds_up, sentence="is off")) == ["the energy is off"]
    assert problems([GOOD], None) == ["there is no energy report"]


def test_accuracy_is_the_last_one_printed() -> None:
    """The log's last accuracy counts, and a log without one gives none."""
    assert parse_accuracy("accuracy=0.5\nrank 0 | accuracy=0.9611\n") == 0.9611
    assert parse_accuracy("no figure") is None


def test_results_mark_simulated_figures() -> None:
    """The table of results says at each figure that it is simulated; unmeasured pauses say so."""
    lines = result_lines([GOOD], simulated=True)
    assert "1.00 kJ sim" in lines[1]
    assert "5 /J sim" in lines[1]
    assert "4.0 s, not measured" in lines[1]
    assert "simulated devices" in lines[2]
    assert "sim" not in " ".join(result_lines([replace(GOOD, simulated=False)], simulated=False))


def test_decisions_are_one_line_per_change() -> None:
    """A decision names what triggered it, what changes for whom, and why."""
    change = {"job_id": "j", "name": "x\x1b[2J", "width_before": 4, "width_after": 2, "limit_before_w": None,
              "limit_after_w": 240.0, "reason": {"code": "SHRINK", "sentence": "makes room"}}  # fmt: skip
    decision = {"number": 3, "trigger": "job submitted", "power_w": 900.0, "changes": [change]}
    assert decision_lines(decision, {}) == [
        "decision 3 (job submitted): x\\x1b[2J 4 -> 2 GPUs, limit default -> 240 W: makes room"
    ]
    assert "everything stays" in decision_lines({**decision, "changes": []}, {})[0]


def test_status_line() -> None:
    """The status line is short and marks simulated figures."""
    running = {"name": "vision", "phase": "running", "width": 2, "target_width": 3, "rate_per_s": 800.0,
               "power_w": 240.0, "simulated": True}  # fmt: skip
    line = status_line([running, {"name": "speech", "phase": "queued"}])
    assert line == "vision width 2>3 800/s 240 W sim | speech queued"
    assert status_line([]) == "no jobs yet"


def test_epochs_can_be_chosen_and_real_gpus_bound_the_width() -> None:
    """The lengths are options, and no job asks for more GPUs than there are."""
    jobs = plan.jobs_for(real_gpus=None, vision_epochs=7, speech_epochs=None, search_epochs=None)
    assert next(job.epochs for job in jobs) == 7
    assert {job.tenant for job in jobs} == {"vision", "speech", "search"}
    assert [job.tenant for job in jobs if job.deadline_s is not None] == ["search"]
    real = plan.jobs_for(real_gpus=2, vision_epochs=None, speech_epochs=None, search_epochs=None)
    assert max(job.max_width for job in real) == 2


def test_demo_without_its_files_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed without the source tree the demo says where to run it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "__file__", str(tmp_path / "site-packages" / "plan.py"))
    with pytest.raises(NeedsOperator) as caught:
        plan.find_checkout()
    assert caught.value.code == "HW-DEMO-001"
    (tmp_path / "hostfiles").mkdir()
    (tmp_path / "examples").mkdir()
    (tmp_path / "hostfiles" / "demo.toml").touch()
    (tmp_path / "examples" / "digits_mlp.py").touch()
    assert plan.find_checkout() == tmp_path


def test_table_finds_descendants_by_any_name() -> None:
    """A process whose name holds blanks and parentheses is found below its parent."""
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) S 1 ((', 0, 0, 0)"
    code = f"{rename}; import time; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.pid in descendants(os.getpid(), read_table())
        process.kill()


ORPHANS = textwrap.dedent(
    """
    import os, subprocess, sys, time
    from pathlib import Path
    from horowatt_allocator.cli.demonstration.processes import Household, become_subreaper
    become_subreaper()
    household = Household()
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN)"
    stubborn = deaf + "; print('up', flush=True); time.sleep(300)"
    parent = (
        "import subprocess, sys\\n"
        f"child = subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True,"
        " stdout=subprocess.PIPE)\\n"
        "child.stdout.readline()\\n"
        "print(child.pid, flush=True)\\n"
    )
    log = Path(sys.argv[1])
    household.start("parent", [sys.executable, "-c", parent], log=log, niceness=3)
    while not log.read_text().strip():
        time.sleep(0.02)
    household.processes["parent"].wait()
    left = household.remaining()
    import horowatt_allocator.cli.demonstration.processes as module
    module.TERM_GRACE_S = 0.3
    print(left == [int(log.read_text())], household.end_all(), household.remaining(), flush=True)
    """
)


def test_orphans_that_ignore_sigterm_are_found_and_ended(tmp_path: Path) -> None:
    """A grandchild in a session of its own, orphaned and deaf to SIGTERM, is not left behind."""
    log = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", ORPHANS, str(log)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "True [] []", done.stderr
    pid = int(log.read_text())
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


INTERRUPTS = textwrap.dedent(
    """
    import os, signal
    from horowatt_allocator.cli.demonstration.interrupts import interrupts_unwind, interrupts_wait
    said = []
    try:
        with interrupts_unwind():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
            finally:
                with interrupts_wait(said.append):
                    os.kill(os.getpid(), signal.SIGINT)
                    os.kill(os.getpid(), signal.SIGTERM)
                    said.append("cleaned")
    except KeyboardInterrupt:
        said.append("unwound")
    print(len(said), said[-2:])
    """
)


def test_interrupts_unwind_once_and_then_wait_for_the_end() -> None:
    """The first signal unwinds; more of them cannot cut the cleaning up short."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "4 ['cleaned', 'unwound']", done.stderr
    assert signal.SIGTERM not in {done.returncode, -done.returncode}
