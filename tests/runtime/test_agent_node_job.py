# SPDX-License-Identifier: Apache-2.0
"""One job on a node: folder, slots, launcher, locks; with real processes in place of a launcher.

A launcher here is a shell script that stands where a virtual environment has its Python, so that
its life can be directed; the agent's side of it is the real one.
"""

import dataclasses
import json
import math
import os
import pwd
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_specimens import NODE, order, spec

from horowatt import wire
from horowatt.agent import node_job
from horowatt.agent.book import JobBook
from horowatt.agent.jobs import JobKeeper
from horowatt.agent.node_job import NodeJob, Surroundings
from horowatt.agent.notes import Notes
from horowatt.agent.processes import identify, lock_holders, send_signal
from horowatt.agent.state import StateFile
from horowatt.agent.streams import Budget
from horowatt.elastic.counters import CountersWriter
from horowatt.elastic.folder import JobFolder
from horowatt.elastic.hostfile import published_files
from horowatt.records import (
    JobOrder,
    JobReport,
    LauncherKind,
    LauncherState,
    LauncherStatus,
    LaunchSpec,
    SlotsFile,
)

HOLD_LOCK = """
import fcntl, os, signal, sys, time
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(descriptor, fcntl.LOCK_EX)
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("held", flush=True)
time.sleep(60)
"""


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait for what processes do; the limit only ends a test that has failed."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.02)


class Clock:
    """A clock for waiting that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Node:
    """A node with one agent's job keeping, which can be restarted."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.clock = Clock()
        self.started: list[subprocess.Popen[bytes]] = []
        self.before: list[JobKeeper] = []
        self.start_agent()

    def start_agent(self) -> None:
        self.state = StateFile(self.run_dir / "agent.sqlite")
        self.notes = Notes()
        self.keeper = JobKeeper(
            Surroundings(
                node=NODE,
                run_dir=self.run_dir,
                book=JobBook(self.state, NODE),
                notes=self.notes,
                environment={"HOROWATT_SIM_STATE": "/sim"},
                monotonic_s=self.clock,
            )
        )

    def restart_agent(self) -> None:
        self.state.close()
        self.before.append(self.keeper)
        self.start_agent()

    def apply(self, *orders: JobOrder) -> None:
        self.keeper.apply(orders, time.time())

    def tend(self) -> None:
        self.keeper.tend(time.time())

    def report(self, job_id: str = "job-1") -> JobReport:
        reports = {report.job_id: report for report in self.keeper.reports(time.time())}
        return reports[job_id]

    def launcher(self, job_id: str = "job-1") -> LauncherStatus:
        status = self.report(job_id).launcher
        assert status is not None
        return status

    def folder(self, job_id: str = "job-1") -> JobFolder:
        return JobFolder.of(self.run_dir, job_id)

    def hold(self, lease_id: str, *how: str) -> subprocess.Popen[bytes]:
        """Start a process that holds a lease's lock as a worker does."""
        lock = self.folder().lease(lease_id).lock
        process = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, str(lock), *how], stdout=subprocess.PIPE)
        self.started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        return process

    def end(self) -> None:
        self.state.close()
        for keeper in [*self.before, self.keeper]:
            keeper.close(60)
            # This process is the parent of what they started, even if a test has let them be forgotten.
            for job in keeper._jobs.values():
                child = job._launcher._child
                if child is not None:
                    child.kill()
                    child.wait()
        for process in self.started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.end()


def launcher_env(tmp_path: Path, script: str) -> str:
    """Return a virtual environment whose Python is a shell script."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f"#!/bin/bash\n{script}\n")
    python.chmod(0o755)
    return str(python.parent.parent)


def says(state: str, attempt: int = 1) -> str:
    """Return shell text that writes a ``launcher.json``."""
    status = {
        "job_id": "job-1",
        "attempt": attempt,
        "state": state,
        "pid": 1,
        "generation_applied": 1,
        "exit_code": None,
        "code": "",
        "message": "",
        "updated_at_s": 1.0,
    }
    return f"echo '{json.dumps(status)}' > launcher.json"


ATTACHED = LauncherKind.ATTACHED


def test_a_job_is_published_in_a_private_folder(node: Node) -> None:
    """The slots file and the hostfile appear in a folder that only the job's user may enter."""
    node.apply(order(spec(), launcher_here=False))
    folder = node.folder()
    assert stat.S_IMODE(folder.root.stat().st_mode) == 0o700
    assert folder.hostfile.read_text() == "l-1:1\n"
    assert wire.decode(folder.job_json.read_bytes(), LaunchSpec) == spec()
    assert stat.S_IMODE((node.run_dir / "jobs").stat().st_mode) == 0o711
    assert node.report().generation_published == 1


def test_only_newer_generations_are_published(node: Node) -> None:
    """A late or repeated order never puts an old slots file in the place of a new one."""
    node.apply(order(spec(), 2, ("l-1", "l-2"), launcher_here=False))
    node.apply(order(spec(), 1, ("l-1",), launcher_here=False))
    assert node.folder().hostfile.read_text() == "l-1:1\nl-2:1\n"
    assert node.report().generation_published == 2


def test_the_launcher_starts_once_as_its_user_in_a_clean_environment(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One start per attempt, own session, small environment, output in launcher.log."""
    monkeypatch.setenv("SECRET_OF_THE_AGENT", "1")
    script = f'echo "$@"; env; ps -o sid=,pid= -p $$; {says("running")}; exec sleep 60 > /dev/null'
    wanted = order(spec(virtual_env=launcher_env(tmp_path, script)))
    node.apply(wanted)
    wait_for(lambda: node.launcher().state is LauncherState.RUNNING, "the launcher")
    for _ in range(3):
        node.apply(wanted)
    log = node.folder().launcher_log.read_text().splitlines()
    assert log[0] == f"-m horowatt.elastic.launcher {node.folder().root} --attempt 1 --node {NODE}"
    assert sum("horowatt.elastic.launcher" in line for line in log) == 1
    assert "HOROWATT_SIM_STATE=/sim" in log
    assert not any("SECRET_OF_THE_AGENT" in line for line in log)
    session, pid = log[-1].split()
    assert session == pid
    assert node.folder().launcher_log.stat().st_mode & 0o077 == 0
    node.apply(dataclasses.replace(wanted, run=False))
    wait_for(lambda: node.launcher().state is LauncherState.STOPPED, "the launcher to end")


def test_a_restarted_agent_takes_the_launcher_up(node: Node, tmp_path: Path) -> None:
    """A launcher that outlived its agent is found alive, not started again, and can be stopped."""
    script = f"echo start; {says('running')}; exec sleep 60 > /dev/null"
    node.apply(order(spec(virtual_env=launcher_env(tmp_path, script))))
    wait_for(lambda: node.launcher().state is LauncherState.RUNNING, "the launcher")
    node.restart_agent()
    node.tend()
    assert node.launcher().state is LauncherState.RUNNING
    assert node.report().generation_published == 1
    assert node.folder().launcher_log.read_text() == "start\n"
    node.apply(order(spec(virtual_env=launcher_env(tmp_path, script)), run=False))
    wait_for(lambda: node.launcher().state is LauncherState.STOPPED, "the launcher to end")


def test_a_launcher_that_dies_wordless_is_lost(node: Node, tmp_path: Path) -> None:
    """A killed launcher is reported lost with its last lines, and its attempt is not started again."""
    script = f"{says('running')}; echo about to die; kill -9 $$"
    wanted = order(spec(virtual_env=launcher_env(tmp_path, script)))
    node.apply(wanted)
    wait_for(lambda: node.launcher().state is LauncherState.LOST, "the loss")
    status = node.launcher()
    assert status.code == "HW-JOB-006"
    assert "SIGKILL" in status.message
    assert "about to die" in status.message
    node.apply(wanted)
    node.restart_agent()
    node.apply(wanted)
    assert node.launcher() == status


def test_the_next_attempt_starts_after_the_one_before(node: Node, tmp_path: Path) -> None:
    """A new attempt never runs beside the old one."""
    first = launcher_env(tmp_path, f'echo "$@"; {says("running")}; exec sleep 60 > /dev/null')
    node.apply(order(spec(virtual_env=first)))
    wait_for(lambda: node.launcher().state is LauncherState.RUNNING, "the launcher")
    pid = node.keeper._jobs["job-1"].memory.start
    assert pid is not None
    assert pid.process is not None
    second = order(spec(virtual_env=first), attempt=2)
    for _ in range(3):
        node.apply(second)
    assert "--attempt 2" not in node.folder().launcher_log.read_text()
    assert send_signal(pid.process, os.geteuid(), signal.SIGKILL)
    wait_for(
        lambda: (node.tend(), "--attempt 2" in node.folder().launcher_log.read_text())[1], "the next attempt"
    )
    node.apply(dataclasses.replace(second, run=False))
    wait_for(lambda: node.launcher().state is LauncherState.STOPPED, "the launcher to end")


def test_the_launchers_own_word_counts(node: Node, tmp_path: Path) -> None:
    """A launcher's verdict is reported as it wrote it, also after the agent was restarted."""
    node.apply(order(spec(virtual_env=launcher_env(tmp_path, says("finished")))))
    wait_for(lambda: node.launcher().state is LauncherState.FINISHED, "the verdict")
    node.restart_agent()
    assert node.launcher().state is LauncherState.FINISHED


def test_a_missing_virtual_environment_fails_the_job(node: Node, tmp_path: Path) -> None:
    """The reason names the missing program, and nothing is tried again for this attempt."""
    node.apply(order(spec(virtual_env=str(tmp_path / "no such"))))
    status = node.launcher()
    assert (status.state, status.code) == (LauncherState.FAILED, "HW-AGENT-004")
    assert "no such/bin/python" in status.message
    assert "No such file" in status.message


def test_a_launcher_that_cannot_begin_fails_the_job(node: Node, tmp_path: Path) -> None:
    """A virtual environment without Horowatt would fail each time, so the job is not run again."""
    node.apply(order(spec(virtual_env=launcher_env(tmp_path, "echo No module named horowatt; exit 1"))))
    wait_for(lambda: node.launcher().state is LauncherState.FAILED, "the failure")
    status = node.launcher()
    assert status.code == "HW-AGENT-005"
    assert "No module named horowatt" in status.message


def test_a_deaf_launcher_and_its_workers_are_killed_after_a_grace(node: Node, tmp_path: Path) -> None:
    """Who does not heed the request to end is killed: the launcher, and whoever holds a lease."""
    script = f"trap '' TERM; {says('running')}; while true; do sleep 0.1 > /dev/null; done"
    wanted = order(spec(virtual_env=launcher_env(tmp_path, script)))
    node.apply(wanted)
    wait_for(lambda: node.launcher().state is LauncherState.RUNNING, "the launcher")
    worker = node.hold("l-1", "deaf")
    stop = dataclasses.replace(wanted, run=False)
    node.apply(stop)
    node.tend()
    assert node.launcher().state is LauncherState.RUNNING
    node.clock.now_s += node_job.GRACE_S
    wait_for(lambda: (node.tend(), node.launcher().state is LauncherState.STOPPED)[1], "the end")
    assert worker.wait(60) == -signal.SIGKILL
    assert node.launcher().code == "HW-AGENT-015"
    node.tend()
    assert not node.report().leases[0].held


SUSPENDED = "trap 'echo suspend' USR1; trap 'echo term' TERM; {says}; while :; do sleep 0.05; done"


def test_a_job_that_is_suspended_may_write_its_commit_first(node: Node, tmp_path: Path) -> None:
    """First the signal to suspend, once; only after its own grace those that end the launcher."""
    script = SUSPENDED.format(says=says("running"))
    wanted = order(spec(virtual_env=launcher_env(tmp_path, script)))
    node.apply(wanted)
    wait_for(lambda: node.launcher().state is LauncherState.RUNNING, "the launcher")
    suspend = dataclasses.replace(wanted, run=False, suspend=True)
    log = node.folder().launcher_log
    for _ in range(3):
        node.apply(suspend)
    wait_for(lambda: log.read_text() == "suspend\n", "the signal")
    node.clock.now_s += node_job.SUSPEND_GRACE_S - 1
    node.apply(suspend)
    assert log.read_text() == "suspend\n"
    node.clock.now_s += 1
    node.apply(suspend)
    wait_for(lambda: log.read_text() == "suspend\nterm\n", "the end to be asked for")
    node.clock.now_s += node_job.GRACE_S
    node.apply(suspend)
    wait_for(lambda: node.launcher().state is LauncherState.STOPPED, "the launcher to be killed")
    again = order(spec(virtual_env=launcher_env(tmp_path, says("finished", 2))), attempt=2)
    node.apply(again)
    wait_for(lambda: node.launcher().state is LauncherState.FINISHED, "the next start")


def test_a_suspended_job_that_is_cancelled_ends_at_once(node: Node, tmp_path: Path) -> None:
    """The last order counts; and a launcher that has not begun is not asked for a commit."""
    script = SUSPENDED.format(says="while [ ! -e go ]; do sleep 0.02; done; " + says("running"))
    wanted = order(spec(virtual_env=launcher_env(tmp_path, f"echo up; {script}")))
    node.apply(wanted)
    log = node.folder().launcher_log
    wait_for(lambda: log.read_text() == "up\n", "the launcher")
    suspend = dataclasses.replace(wanted, run=False, suspend=True)
    node.apply(suspend)
    wait_for(lambda: log.read_text() == "up\nterm\n", "the end to be asked for, no commit")
    node.restart_agent()
    (node.folder().root / "go").touch()
    wait_for(lambda: node.launcher().state is LauncherState.RUNNING, "the launcher's word")
    node.apply(suspend)
    wait_for(lambda: log.read_text() == "up\nterm\nsuspend\n", "the signal")
    node.apply(dataclasses.replace(suspend, suspend=False))
    wait_for(lambda: log.read_text() == "up\nterm\nsuspend\nterm\n", "the end to be asked for")


def test_what_its_own_user_damages_is_published_again(node: Node) -> None:
    """Deleted, cut or replaced files of a running job are there again after the next look."""
    node.apply(order(spec(), 1, ("l-1", "l-2"), launcher_here=False))
    folder = node.folder()
    whole = {path: path.read_bytes() for path in published_files(folder)}
    assert len(whole) == 5
    inodes = [path.stat().st_ino for path in whole]
    node.tend()
    assert [path.stat().st_ino for path in whole] == inodes
    folder.hostfile.unlink()
    folder.slots_json.write_text("{}")
    folder.discover_script.write_text("#!/bin/sh\n")
    folder.job_json.rename(folder.root / "elsewhere")
    folder.node_json.unlink()
    folder.node_json.symlink_to(folder.slots_json)
    node.tend()
    assert {path: path.read_bytes() for path in whole} == whole
    assert not folder.node_json.is_symlink()
    assert "was changed; it is written again" in node.notes.all()["HW-AGENT-023"]
    inodes = [path.stat().st_ino for path in whole]
    node.tend()
    assert [path.stat().st_ino for path in whole] == inodes


def test_broken_telemetry_of_one_job_is_its_own(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that cannot be made, or not be read, is told without those files; the others are whole."""
    node.apply(order(spec(), launcher_here=False), order(spec("job-2"), 1, ("l-2",), launcher_here=False))
    node.hold("l-1")
    node.tend()
    original = NodeJob.report

    def broken(job: NodeJob, now_s: float, budget: Budget) -> JobReport:
        report = original(job, now_s, budget)
        if job.memory.spec.job_id == "job-2":
            return report
        (lease,) = report.leases
        return dataclasses.replace(report, leases=(dataclasses.replace(lease, steps=math.nan),))  # type: ignore[arg-type]

    monkeypatch.setattr(NodeJob, "report", broken)
    reports = {report.job_id: report for report in node.keeper.reports(time.time())}
    assert [(lease.held, lease.steps) for lease in reports["job-1"].leases] == [(True, 0)]
    assert reports["job-1"].generation_published == 1
    assert [lease.lease_id for lease in reports["job-2"].leases] == ["l-2"]
    assert "job-1" in node.notes.all()["HW-AGENT-016"]
    monkeypatch.setattr(NodeJob, "report", lambda *_: 1 / 0)
    assert [one.held for one in node.report("job-1").leases] == [True]


def test_commits_are_private_and_their_deletion_keeps_nobody_waiting(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job is forgotten while its files are still being deleted; a restarted agent finishes that."""
    node.apply(order(spec(), launcher_here=False))
    commits = node.folder().commits
    assert stat.S_IMODE(commits.stat().st_mode) == 0o700
    (commits / "large").write_bytes(b"\0" * (1 << 20))
    go = tmp_path / "go"
    tools = tmp_path / "tools"
    tools.mkdir()
    slow = tools / "rm"
    slow.write_text(f'#!/bin/sh\nwhile [ ! -e {go} ]; do /bin/sleep 0.02; done\nexec /bin/rm "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    node.apply(order(spec(), launcher_here=False, forget=True))
    assert node.keeper.job_ids == ()
    assert not node.folder().root.exists()
    trash = node.run_dir / "trash"
    assert stat.S_IMODE(trash.stat().st_mode) == 0o700
    assert len(list(trash.iterdir())) == 1
    node.apply(order(spec(), 2, launcher_here=False))
    assert node.folder().commits.exists()
    assert not any(node.folder().commits.iterdir())
    node.restart_agent()
    go.touch()
    wait_for(lambda: (node.tend(), not list(trash.iterdir()))[1], "the deletion")
    assert node.folder().commits.exists()


def test_workers_left_behind_end_before_the_next_start(node: Node, tmp_path: Path) -> None:
    """Workers of a dead launcher are asked to leave before a new one needs their slots."""
    node.apply(order(spec(virtual_env=launcher_env(tmp_path, "kill -9 $$"))))
    wait_for(lambda: node.launcher().state is LauncherState.LOST, "the loss")
    worker = node.hold("l-1")
    again = launcher_env(tmp_path, f"echo second; {says('finished', 2)}")
    node.apply(order(spec(virtual_env=again), attempt=2))
    assert node.folder().launcher_log.read_text() == ""
    assert worker.wait(60) == -signal.SIGTERM
    node.tend()
    wait_for(lambda: node.launcher().state is LauncherState.FINISHED, "the second attempt")


def test_a_withdrawn_lease_is_reported_until_it_is_free(node: Node) -> None:
    """A lease out of the slots file stays in the reports, held as long as its worker lives."""
    node.apply(order(spec(), 1, ("l-1", "l-2"), launcher_here=False))
    worker = node.hold("l-2")
    node.apply(order(spec(), 2, ("l-1",), launcher_here=False))
    held = {lease.lease_id: lease.held for lease in node.report().leases}
    assert held == {"l-1": False, "l-2": True}
    states = {state.lease.lease_id: state for state in node.keeper.lease_states()}
    assert (states["l-2"].published, states["l-2"].held, states["l-2"].generation) == (False, True, 1)
    worker.kill()
    worker.wait()
    node.restart_agent()
    node.tend()
    assert {lease.lease_id: lease.held for lease in node.report().leases} == {"l-1": False, "l-2": False}


def test_a_forgotten_job_leaves_nothing(node: Node, tmp_path: Path) -> None:
    """Only once no process is left is the folder deleted, without following a tenant's links."""
    node.apply(order(spec(), launcher_here=False))
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("stays")
    (node.folder().root / "link").symlink_to(precious)
    worker = node.hold("l-1", "deaf")
    node.apply(order(spec(), launcher_here=False, forget=True))
    assert node.folder().root.exists()
    worker.kill()
    worker.wait()
    node.tend()
    assert not node.folder().root.exists()
    assert (precious / "file").read_text() == "stays"
    assert node.keeper.job_ids == ()
    node.restart_agent()
    assert node.keeper.job_ids == ()


def test_an_unknown_job_that_is_to_be_forgotten_is_cleared(node: Node) -> None:
    """A folder that an earlier agent left behind goes when the head asks for it."""
    node.folder().root.mkdir(parents=True)
    node.apply(order(spec(), forget=True))
    assert not node.folder().root.exists()


@pytest.mark.parametrize("job_id", ["../evil", "a/b", "..", ".hidden", ""])
def test_a_job_id_never_leads_out_of_the_run_directory(node: Node, job_id: str) -> None:
    """An order with an id that is no plain name is refused, and nothing is made or deleted for it."""
    before = sorted(node.run_dir.parent.rglob("*"))
    node.apply(order(spec(job_id=job_id)), order(spec(job_id=job_id), forget=True))
    assert "HW-JOB-020" in node.notes.all()
    assert node.keeper.job_ids == ()
    assert sorted(node.run_dir.parent.rglob("*")) == before


def test_an_order_that_contradicts_itself_is_refused(node: Node) -> None:
    """An order whose parts name different jobs is noted and spoils no other order."""
    broken = dataclasses.replace(order(spec()), spec=spec(job_id="other"))
    good = spec(job_id="job-2")
    node.apply(broken, order(good, leases=("l-9",), launcher_here=False))
    assert "HW-AGENT-011" in node.notes.all()
    assert node.keeper.job_ids == ("job-2",)


def test_a_tenants_slots_file_is_not_believed(node: Node) -> None:
    """What a job may hold and whom it runs as comes from the agent's own memory, never from the folder."""
    node.apply(order(spec(), launcher_here=False))
    node.folder().slots_json.write_bytes(wire.encode(order(spec(), 7, ("stolen",)).slots))
    node.folder().job_json.write_bytes(wire.encode(spec(uid=12345, username="somebody")))
    node.restart_agent()
    node.tend()
    assert [state.lease.lease_id for state in node.keeper.lease_states()] == ["l-1"]
    assert node.report().generation_published == 1
    assert wire.decode(node.folder().job_json.read_bytes(), LaunchSpec).uid == os.geteuid()


def test_a_link_in_place_of_a_log_is_not_read(node: Node, tmp_path: Path) -> None:
    """A tenant that puts a link to somebody's file in its folder gets nothing from it, and it is noted."""
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    node.apply(order(spec(), launcher_here=False))
    node.folder().events.symlink_to(secret)
    node.folder().lease("l-1").output_log.write_text("fine\n")
    assert [(chunk.stream, chunk.text) for chunk in node.report().streams] == [("lease/l-1", "fine\n")]
    assert "HW-FILE-001" in node.notes.all()


def test_logs_are_sent_from_where_the_head_is(node: Node) -> None:
    """Each report goes on at the offset that the orders name; an agent without orders sends nothing."""
    node.apply(order(spec(), launcher_here=False))
    node.folder().events.write_text('{"kind":"a"}\n{"kind":"b"}\n{"ki')
    (chunk,) = node.report().streams
    assert (chunk.stream, chunk.offset, chunk.next_offset) == ("events", 0, 26)
    node.apply(order(spec(), launcher_here=False, streams={"events": 13}))
    (chunk,) = node.report().streams
    assert (chunk.offset, chunk.text) == (13, '{"kind":"b"}\n')
    node.restart_agent()
    assert node.report().streams == ()


def test_an_attached_job_tells_its_state_by_its_workers(node: Node) -> None:
    """Without a launcher of ours, locks and exit files say whether the job runs, finished or failed."""
    node.apply(order(spec(launcher=ATTACHED), 1, ("l-1", "l-2")))
    assert node.report().launcher is None
    worker = node.hold("l-1")
    node.tend()
    assert node.launcher().state is LauncherState.RUNNING
    worker.kill()
    worker.wait()
    for lease_id, code in (("l-1", 0), ("l-2", 1)):
        node.folder().lease(lease_id).exit_json.write_text(json.dumps({"exit_code": code}))
    node.tend()
    assert node.launcher().state is LauncherState.RUNNING
    node.clock.now_s += 6
    status = node.launcher()
    assert (status.state, status.code) == (LauncherState.FAILED, "HW-JOB-004")


def test_a_worker_that_starts_between_two_looks_is_nobodys_absence(node: Node) -> None:
    """A job that waited for its horovodrun is not over when the first worker comes after the last look."""
    node.apply(order(spec(launcher=ATTACHED)))
    node.tend()
    node.clock.now_s += 60
    worker = node.hold("l-1")
    CountersWriter(node.folder().lease("l-1").counters)
    assert node.launcher().state is LauncherState.RUNNING
    node.tend()
    assert node.launcher().state is LauncherState.RUNNING
    worker.kill()
    worker.wait()


def test_an_attached_job_is_stopped_by_ending_its_workers(node: Node) -> None:
    """A stop reaches the workers, and only then the job counts as stopped."""
    node.apply(order(spec(launcher=ATTACHED)))
    worker = node.hold("l-1")
    node.apply(order(spec(launcher=ATTACHED), run=False))
    assert worker.wait(60) == -signal.SIGTERM
    node.tend()
    assert node.launcher().state is LauncherState.STOPPED


def test_a_job_that_is_over_publishes_no_slots(node: Node) -> None:
    """Its slots stay its own while a process lives; then no file names them and nobody pays for them."""
    node.apply(order(spec(launcher=ATTACHED)))
    slots = node.folder().slots_json
    worker = node.hold("l-1", "deaf")
    node.apply(order(spec(launcher=ATTACHED), run=False))
    assert len(wire.decode(slots.read_bytes(), SlotsFile).leases) == 1
    worker.kill()
    worker.wait()
    node.tend()
    assert wire.decode(slots.read_bytes(), SlotsFile).leases == ()
    assert node.folder().hostfile.read_text() == ""
    assert not any(state.published or state.held for state in node.keeper.lease_states())
    node.restart_agent()
    node.tend()
    assert wire.decode(slots.read_bytes(), SlotsFile).leases == ()
    node.apply(order(spec(launcher=ATTACHED), 2, ("l-2",)))
    assert [lease.lease_id for lease in wire.decode(slots.read_bytes(), SlotsFile).leases] == ["l-2"]


def test_only_processes_that_hold_the_lock_are_named(node: Node, tmp_path: Path) -> None:
    """A process that only has the file open is left alone, and so is everybody behind a link."""
    node.apply(order(spec(), launcher_here=False))
    worker = node.hold("l-1")
    lock = node.folder().lease("l-1").lock
    reader = subprocess.Popen(
        [sys.executable, "-c", f"f = open({str(lock)!r}); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    node.started.append(reader)
    assert reader.stdout is not None
    reader.stdout.readline()
    assert [process.pid for process in lock_holders([lock], os.geteuid())] == [worker.pid]
    link = tmp_path / "link"
    link.symlink_to(lock)
    assert lock_holders([link], os.geteuid()) == ()
    assert lock_holders([lock], os.geteuid() + 1) == ()
    assert reader.stdin is not None
    reader.stdin.close()


def test_a_pid_that_was_used_again_is_not_signalled(node: Node, tmp_path: Path) -> None:
    """A process is named by its start as well, so that nobody else's is ever ended."""
    process = subprocess.Popen(["sleep", "60"])
    node.started.append(process)
    identity = identify(process.pid)
    assert identity is not None
    assert not send_signal(dataclasses.replace(identity, start_ticks=1), os.geteuid(), signal.SIGKILL)
    assert not send_signal(identity, os.geteuid() + 1, signal.SIGKILL)
    assert send_signal(identity, os.geteuid(), signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert identify(process.pid) is None


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, unlike those of pytest; for root only."""
    if os.geteuid() != 0:
        pytest.skip("acting as several users needs root")
    with tempfile.TemporaryDirectory(prefix="hw-agent-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


BACK_TO_NORMAL = (
    "sleep 0.5; exec 3>&1 >/dev/null 2>&1; renice -n 19 -p $$; renice -n 0 -p $$; renice -n -1 -p $$; "
    "exec >&3; ps -o ni= -p $$"
)


def _niceness_that_is_allowed() -> list[str]:
    """Return where a process of a user gets back to from 19: only to 0, where root may allow that."""
    limit = resource.getrlimit(resource.RLIMIT_NICE)
    try:
        resource.setrlimit(resource.RLIMIT_NICE, (limit[0], limit[1] + 1))
    except (OSError, ValueError):
        return ["19"]
    resource.setrlimit(resource.RLIMIT_NICE, limit)
    return ["0"]


@pytest.mark.root
def test_a_job_of_another_user_runs_as_that_user(open_folder: Path) -> None:
    """Root's agent starts the launcher as the submitter, in files that are the submitter's."""
    nobody = pwd.getpwnam("nobody")
    node = Node(open_folder)
    try:
        script = f"id -u; id -g; umask; {BACK_TO_NORMAL}; {says('finished')}"
        job = spec(
            uid=nobody.pw_uid,
            gid=nobody.pw_gid,
            username="nobody",
            virtual_env=launcher_env(open_folder, script),
        )
        node.apply(order(job))
        wait_for(lambda: node.launcher().state is LauncherState.FINISHED, "the launcher")
        folder = node.folder()
        log = folder.launcher_log.read_text().split()
        assert log == [str(nobody.pw_uid), str(nobody.pw_gid), "0077", *_niceness_that_is_allowed()]
        files = (folder.launcher_log, folder.slots_json, folder.lease("l-1").root, folder.commits)
        for path in (folder.root, *files):
            assert path.stat().st_uid == nobody.pw_uid
        node.apply(order(job))
        (stream,) = node.report().streams
        assert stream.text.split() == log
    finally:
        node.end()


@pytest.mark.root
def test_an_agent_that_is_not_root_refuses_other_users(open_folder: Path) -> None:
    """Without root, jobs of others fail with a reason that names both users, and get no folder."""
    open_folder.chmod(0o777)
    nobody = pwd.getpwnam("nobody")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        # The child ends here whatever happens; what it found goes through the pipe.
        try:
            os.setgroups([])
            os.setgid(nobody.pw_gid)
            os.setuid(nobody.pw_uid)
            run_dir = open_folder / "run"
            run_dir.mkdir()
            node = Node(run_dir)
            node.apply(order(spec(uid=0, gid=0, username="root")))
            status = node.launcher()
            made = sorted(path.name for path in (run_dir / "jobs").iterdir())
            os.write(writer, json.dumps([status.state, status.code, status.message, made]).encode())
        except BaseException as error:  # noqa: BLE001 - reported by the parent
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as pipe:
        state, code, message, made = json.loads(pipe.read())
    assert (state, code) == ("failed", "HW-AGENT-003")
    assert "runs as nobody and cannot start jobs of root" in message
    assert made == []
