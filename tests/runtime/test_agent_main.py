# SPDX-License-Identifier: Apache-2.0
"""The agent as a process: simulated GPUs behind a real NVML library, a real head on a Unix socket."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import node_specimens
import pytest
from node_specimens import CONFIG, GPUS, NODE, SIMULATOR, order, spec

from horowatt import wire
from horowatt.devices.simulated import SimulatorControl, create_state
from horowatt.elastic.folder import JobFolder
from horowatt.records import (
    AgentOrders,
    AgentReport,
    EnergyInterval,
    EnergyMethod,
    JobOrder,
    LauncherKind,
    LauncherState,
)

library = node_specimens.library
START_AGENT = """
import json, sys
from pathlib import Path
from horowatt.agent.main import AgentConfig, run
from horowatt.errors import HorowattError
given = json.loads(sys.argv[1])
paths = {name: Path(given.pop(name)) for name in ("service_socket", "run_dir", "simulate")}
try:
    sys.exit(run(AgentConfig(**paths, **given)))
except HorowattError as error:
    sys.stderr.write(f"{error}\\n")
    sys.exit(125)
"""
HOLD_LOCK = """
import fcntl, os, sys, time
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(120)
"""

WORKER = """
import fcntl, os, subprocess, sys, time
lock, gpu, gib = sys.argv[1:]
descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(descriptor, fcntl.LOCK_EX)
from horowatt.devices.simulated import SimulatedGpu
def occupy():
    mine = SimulatedGpu(gpu)
    mine.attach()
    mine.use_memory(int(float(gib) * (1 << 30)))
occupy()
child = os.fork()
if child == 0:
    os.close(descriptor)
    os.setsid()
    occupy()
    print(os.getpid(), flush=True)
    time.sleep(120)
time.sleep(120)
"""
"""A worker whose child closes the lease's lock, leaves its session, and stays on the GPU."""


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Wait for what processes do; the limit only ends a test that has failed."""
    end = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.02)
    return value


class Head:
    """The agent's peer: takes reports, keeps a ledger, answers orders."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self.lock = threading.Lock()
        self.reports: list[AgentReport] = []
        self.ledger: dict[int, EnergyInterval] = {}
        self.agent_ids: set[str] = set()
        self.jobs: tuple[JobOrder, ...] = ()
        self.limits_w: dict[str, float] = {}
        self.answering = threading.Event()
        self.answering.set()
        self._server: socketserver.ThreadingUnixStreamServer | None = None

    def start(self) -> None:
        head = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == f"/v1/agents/{NODE}/report"
                body = self.rfile.read(int(self.headers["content-length"]))
                head.answering.wait(60)
                answer = wire.encode(head.take(wire.decode(body, AgentReport)))
                with contextlib.suppress(BrokenPipeError):
                    self.send_response(200)
                    self.send_header("content-length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)

            def log_message(self, *arguments: object) -> None:
                """Say nothing."""

        self.socket_path.unlink(missing_ok=True)
        self._server = socketserver.ThreadingUnixStreamServer(str(self.socket_path), Handler)
        self._server.daemon_threads = True
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
            self.socket_path.unlink(missing_ok=True)

    def take(self, report: AgentReport) -> AgentOrders:
        with self.lock:
            self.reports.append(report)
            self.agent_ids.add(report.agent_id)
            for interval in report.intervals:
                known = self.ledger.setdefault(interval.seq, interval)
                assert known == interval, "a seq was given out twice"
            acked = next(seq for seq in itertools.count() if seq + 1 not in self.ledger)
            return AgentOrders(acked_seq=acked, jobs=self.jobs, limits_w=self.limits_w, report_after_s=0.2)

    @property
    def last(self) -> AgentReport:
        with self.lock:
            return self.reports[-1]

    def after(self, condition: Callable[[AgentReport], Any], what: str) -> AgentReport:
        """Return the first report from now on that fits."""
        with self.lock:
            seen = len(self.reports)

        def found() -> AgentReport | None:
            with self.lock:
                fitting = [report for report in self.reports[seen:] if condition(report)]
            return fitting[0] if fitting else None

        report = wait_for(found, what)
        assert isinstance(report, AgentReport)
        return report

    def intervals(self, gpu: str) -> list[EnergyInterval]:
        """Return the ledger of one GPU, which must have no hole."""
        with self.lock:
            assert sorted(self.ledger) == list(range(1, len(self.ledger) + 1))
            chain = [one for _, one in sorted(self.ledger.items()) if one.gpu_uuid == gpu]
        for before, after in itertools.pairwise(chain):
            assert after.start_s == before.end_s
            assert before.counter_end_j == after.counter_start_j
        return chain


class Site:
    """One node with its head."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.head = Head(folder / "head.sock")
        self.agent: subprocess.Popen[bytes] | None = None
        self.log = folder / "agent.log"
        self.others: list[subprocess.Popen[bytes]] = []
        self.simulator = folder / "sim.toml"
        self.simulator.write_text(SIMULATOR)
        # Built once for all tests; where the agent looks for it before it builds.
        shutil.copytree(library.parent, self.run_dir / "simulator" / library.parent.name)
        self.run_dir.chmod(0o755)
        self.library = self.run_dir / "simulator" / library.parent.name / library.name
        self.state = self.run_dir / "simulator" / "state"

    def start_agent(self, **more: object) -> subprocess.Popen[bytes]:
        settings = {
            "node": NODE,
            "service_socket": str(self.head.socket_path),
            "run_dir": str(self.run_dir),
            "gpu_type": None,
            "simulate": str(self.simulator),
            "report_every_s": 0.1,
            "close_every_s": 0.5,
            **more,
        }
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", START_AGENT, json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def begin(self, **more: object) -> None:
        """Start the agent and wait for its first report."""
        self.agent = self.start_agent(**more)
        self.head.after(lambda report: report.gpus, "the first report")

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.agent is not None
        self.agent.send_signal(number)
        code = self.agent.wait(60)
        self.agent = None
        return code

    def nvml(self, code: str) -> str:
        """Run a line of Python that has the node's NVML as ``gpus`` and return what it prints."""
        script = "from horowatt.devices.nvml import open_nvml\n"
        script += f"gpus = {{gpu.uuid: gpu for gpu in open_nvml().gpus()}}\n{code}"
        environment = {
            **os.environ,
            "HOROWATT_NVML_LIBRARY": str(self.library),
            "HOROWATT_SIM_STATE": str(self.state),
        }
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def limit_w(self, gpu: str) -> float:
        return float(self.nvml(f"print(gpus[{gpu!r}].requested_limit_w().value)"))

    def hold(self, job_id: str, lease_id: str) -> subprocess.Popen[bytes]:
        lock = JobFolder.of(self.run_dir, job_id).lease(lease_id).lock
        process = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, str(lock)], stdout=subprocess.PIPE)
        self.others.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        return process

    def occupy(self, job_id: str, lease_id: str, gpu: str, gib: float) -> tuple[subprocess.Popen[bytes], int]:
        """Start a worker with a child; return it and the child's process id."""
        lock = JobFolder.of(self.run_dir, job_id).lease(lease_id).lock
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(lock), gpu, str(gib)],
            env={
                **os.environ,
                "HOROWATT_NVML_LIBRARY": str(self.library),
                "HOROWATT_SIM_STATE": str(self.state),
            },
            stdout=subprocess.PIPE,
        )
        self.others.append(process)
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    def close(self) -> None:
        self.head.answering.set()
        for process in [*self.others, *([self.agent] if self.agent else [])]:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self.head.stop()


@pytest.fixture
def site(library: Path) -> Iterator[Site]:
    # A short path, because those of Unix sockets must be.
    with tempfile.TemporaryDirectory(prefix="hw-agent-") as name:
        site = Site(Path(name), library)
        try:
            site.head.start()
            yield site
        except BaseException:
            print(site.log.read_text() if site.log.exists() else "the agent said nothing")
            raise
        finally:
            site.close()


@pytest.fixture
def control(site: Site, monkeypatch: pytest.MonkeyPatch) -> SimulatorControl:
    """The simulation that the site's agent will find."""
    create_state(CONFIG, site.state, NODE, library=site.library, allow_nonroot=os.geteuid() != 0)
    monkeypatch.setenv("HOROWATT_SIM_STATE", str(site.state))
    return SimulatorControl(site.library)


def job(job_id: str, generation: int, leases: dict[str, str]) -> JobOrder:
    """Return the order of an attached job: the agent starts no process for it."""
    return order(spec(job_id, launcher=LauncherKind.ATTACHED, max_width=2), generation, leases)


def owners(chain: list[EnergyInterval]) -> list[str | None]:
    """Return the jobs that held the GPU, one after the other."""
    return [job_id for job_id, _ in itertools.groupby(one.job_id for one in chain)]


def published(job_id: str, generation: int) -> Callable[[AgentReport], bool]:
    return lambda report: any(
        one.job_id == job_id and one.generation_published == generation for one in report.jobs
    )


def test_every_joule_has_one_owner(site: Site, control: SimulatorControl) -> None:
    """While a GPU changes hands, its intervals sum to its counter's difference, each with its holder."""
    site.begin()
    site.head.jobs = (job("a", 1, {"a-1": GPUS[0]}), job("b", 1, {}))
    site.head.after(published("a", 1), "the first owner")
    worker = site.hold("a", "a-1")
    site.head.jobs = (job("a", 2, {}), job("b", 1, {}))
    site.head.after(published("a", 2), "the withdrawal")
    still = site.head.after(lambda report: report.jobs, "a report of the withdrawn lease")
    assert [lease.held for one in still.jobs if one.job_id == "a" for lease in one.leases] == [True]
    worker.kill()
    worker.wait()
    site.head.after(
        lambda report: not any(lease.held for one in report.jobs for lease in one.leases), "the release"
    )
    site.head.jobs = (job("a", 2, {}), job("b", 2, {"b-1": GPUS[0]}))
    site.head.after(published("b", 2), "the second owner")
    assert site.end() == 0
    chain = site.head.intervals(GPUS[0])
    assert owners(chain) in ([None, "a", None, "b"], [None, "a", "b"])
    assert {one.generation for one in chain if one.job_id == "a"} == {1}
    for gpu in GPUS:
        chain = site.head.intervals(gpu)
        assert {one.method for one in chain} == {EnergyMethod.COUNTER}
        first, last = chain[0].counter_start_j, chain[-1].counter_end_j
        assert first is not None
        assert last is not None
        assert math.fsum(one.energy_j or 0.0 for one in chain) == pytest.approx(last - first, abs=1e-6)
        assert 0 < last - first <= control.true_energy_j(gpu)
        assert all(one.simulated and one.gpu_type == "test-gpu" for one in chain)


def test_a_killed_agent_bridges_its_absence(site: Site) -> None:
    """After kill -9 the next run bills the gap to the holder that did not change, and repeats nothing."""
    site.head.jobs = (job("a", 1, {"a-1": GPUS[0]}),)
    site.begin()
    site.head.after(lambda report: any(one.job_id == "a" for one in report.intervals), "an interval of a")
    site.kill()
    site.head.jobs = ()
    site.begin()
    site.head.after(lambda report: report.intervals, "an interval")
    assert site.end() == 0
    assert len(site.head.agent_ids) == 1
    for gpu, owner in zip(GPUS, ("a", None), strict=True):
        chain = site.head.intervals(gpu)
        bridged = [one for one in chain if one.method is EnergyMethod.BRIDGED]
        assert [(one.job_id, one.attributable) for one in bridged] == [(owner, True)]
        assert owners(chain)[-1] == owner
        first, last = chain[0].counter_start_j, chain[-1].counter_end_j
        assert first is not None
        assert last is not None
        assert math.fsum(one.energy_j or 0.0 for one in chain) == pytest.approx(last - first, abs=1e-6)


def test_a_change_of_hands_in_the_absence_is_nobodys(site: Site) -> None:
    """When the holder left while the agent was dead, that gap is counted and attributed to nobody."""
    site.head.jobs = (job("a", 1, {"a-1": GPUS[0]}),)
    site.begin()
    site.head.after(published("a", 1), "the publication")
    worker = site.hold("a", "a-1")
    site.head.jobs = (job("a", 2, {}),)
    site.head.after(published("a", 2), "the withdrawal")
    site.head.after(lambda report: any(one.job_id == "a" for one in report.intervals), "an interval of a")
    site.kill()
    worker.kill()
    worker.wait()
    site.begin()
    site.end()
    chain = site.head.intervals(GPUS[0])
    unknown = [one for one in chain if not one.attributable]
    assert [(one.method, one.job_id) for one in unknown] == [(EnergyMethod.BRIDGED, None)]
    assert unknown[0].energy_j is not None
    assert unknown[0].energy_j > 0


def test_an_absent_head_leaves_no_hole(site: Site) -> None:
    """While the head is away metering goes on; when it is back it gets everything, once, in order."""
    site.head.jobs = (job("a", 1, {"a-1": GPUS[0]}),)
    site.begin()
    site.head.after(published("a", 1), "the publication")
    site.head.stop()
    wait_for(lambda: "does not answer" in site.log.read_text(), "the agent to see it")
    away_s = time.time()
    wait_for(lambda: time.time() > away_s + 2, "some intervals")
    site.head.start()
    site.head.after(lambda report: report.gpus, "the return")
    # The report is with the head before the agent has its answer.
    wait_for(lambda: "answers again" in site.log.read_text(), "the agent to see it back")
    site.end()
    chain = site.head.intervals(GPUS[0])
    assert len([one for one in chain if away_s < one.start_s < away_s + 2]) >= 2
    log = site.log.read_text()
    assert log.count("HW-NET-001") == 1
    assert log.count("answers again") == 1


def test_a_head_that_hangs_does_not_stop_the_metering(site: Site) -> None:
    """A head that takes a report and never answers costs no interval."""
    site.begin()
    site.head.answering.clear()
    hanging_s = time.time()
    wait_for(lambda: time.time() > hanging_s + 2.5, "some intervals")
    site.head.answering.set()
    site.head.after(lambda report: report.gpus, "the return")
    site.end()
    chain = site.head.intervals(GPUS[0])
    assert len([one for one in chain if hanging_s < one.end_s < hanging_s + 2.5]) >= 3


def test_the_last_report_holds_the_last_joule(site: Site) -> None:
    """An agent that is told to end closes what is open and reports it before it is gone."""
    site.begin(close_every_s=1000.0)
    assert site.head.intervals(GPUS[0]) == []
    before_s = time.time()
    assert site.end(signal.SIGINT) == 0
    assert [one.end_s >= before_s for one in site.head.intervals(GPUS[0])] == [True]


def test_a_second_agent_is_refused(site: Site) -> None:
    """Two agents never share a run directory; the second says who has it."""
    site.begin()
    second = site.start_agent()
    assert second.wait(60) == 125
    assert site.agent is not None
    assert f"process {site.agent.pid} holds its lock" in site.log.read_text()
    assert "error[HW-AGENT-001]" in site.log.read_text()


def test_limits_go_back_to_what_they_were(site: Site, control: SimulatorControl) -> None:
    """The limit before Horowatt comes back: when no longer ordered, after kill -9, and at exit."""
    site.nvml(f"gpus[{GPUS[0]!r}].set_limit_w(350)")
    site.head.limits_w = {GPUS[0]: 200.0, GPUS[1]: 5.0}
    site.begin()

    def limits(report: AgentReport) -> list[float | None]:
        return [gpu.limit_w for gpu in report.gpus]

    site.head.after(lambda report: limits(report) == [200.0, 100.0], "the limits, within their range")
    site.head.limits_w = {GPUS[0]: 150.0}
    site.head.after(lambda report: limits(report) == [150.0, 400.0], "one limit to be given back")
    site.head.limits_w = {}
    site.head.after(lambda report: limits(report) == [350.0, 400.0], "both to be given back")
    site.head.limits_w = {GPUS[0]: 200.0}
    site.head.after(lambda report: limits(report) == [200.0, 400.0], "the limit")
    site.kill()
    assert site.limit_w(GPUS[0]) == 200.0
    site.head.stop()
    site.agent = site.start_agent()
    wait_for(lambda: site.limit_w(GPUS[0]) == 350.0, "the journal to be followed")
    site.head.start()
    site.head.after(lambda report: limits(report) == [200.0, 400.0], "the limit again")
    site.head.stop()
    wait_for(lambda: site.log.read_text().count("HW-NET-001") >= 2, "the agent to see it")
    assert site.limit_w(GPUS[0]) == 200.0
    site.head.start()
    site.head.after(lambda report: report.gpus, "the return")
    assert site.end() == 0
    assert site.limit_w(GPUS[0]) == 350.0
    assert json.loads((site.run_dir / "limits.json").read_text())["previous_w"] == {}


def test_a_refused_limit_is_noted_and_spoils_nothing(site: Site, control: SimulatorControl) -> None:
    """Without the right to set limits the agent says so once, and goes on."""
    control.set_error(GPUS[0], "nvmlDeviceSetPowerManagementLimit", 4)
    site.head.limits_w = {GPUS[0]: 200.0, GPUS[1]: 200.0}
    site.begin()
    report = site.head.after(lambda report: report.gpus[1].limit_w == 200.0, "the other GPU's limit")
    assert report.gpus[0].limit_w == 400.0
    assert not report.gpus[0].can_set_limit
    report = site.head.after(lambda report: "HW-NVML-104" in report.notes, "the note")
    site.end()
    assert site.log.read_text().count("HW-NVML-104") == 1


def test_trouble_of_one_gpu_stays_its_own(site: Site, control: SimulatorControl) -> None:
    """A GPU without a counter is integrated and a lost one is missing; both say so, the rest is exact."""
    control.set_error(GPUS[1], "nvmlDeviceGetTotalEnergyConsumption", 3)
    site.begin()
    site.head.after(lambda report: report.gpus[1].energy_j is not None, "the integral")
    control.set_lost(GPUS[0])
    site.head.after(lambda report: report.gpus[0].lost, "the loss")
    site.head.after(lambda report: any(one.method is EnergyMethod.MISSING for one in report.intervals), "it")
    control.set_lost(GPUS[0], 0)
    site.head.after(lambda report: not report.gpus[0].lost, "the return")
    site.end()
    lost, integrated = site.head.intervals(GPUS[0]), site.head.intervals(GPUS[1])
    methods = [method for method, _ in itertools.groupby(one.method for one in lost)]
    assert methods == [EnergyMethod.COUNTER, EnergyMethod.MISSING, EnergyMethod.COUNTER]
    assert all(one.unmeasured for one in lost if one.energy_j is None)
    assert "Not Supported" in integrated[0].unmeasured
    measured = [one for one in integrated if one.method is EnergyMethod.INTEGRATED]
    assert measured
    assert all(one.counter_start_j is None and (one.energy_j or 0) > 0 for one in measured)


@pytest.mark.root
def test_a_full_disk_costs_no_joule(site: Site) -> None:
    """While the run directory is full the agent lives and says so; with space again nothing is missing."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    kept = site.folder / "kept"
    site.run_dir.rename(kept)
    site.run_dir.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=755", "tmpfs", str(site.run_dir)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not let root mount")
    try:
        shutil.copytree(kept, site.run_dir, dirs_exist_ok=True)
        site.begin()
        site.head.after(lambda report: report.intervals, "an interval")
        ballast = site.run_dir / "ballast"
        with ballast.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
            while True:
                stream.write(b"\0" * 4096)
        site.head.after(lambda report: "HW-DISK-001" in report.notes, "the note")
        full_s = time.time()
        wait_for(lambda: time.time() > full_s + 1, "time to pass")
        ballast.unlink()
        site.head.after(
            lambda report: any(one.end_s > full_s + 1 for one in report.intervals), "intervals of that time"
        )
        assert site.end() == 0
        chain = site.head.intervals(GPUS[0])
        assert all(one.method is EnergyMethod.COUNTER for one in chain)
        assert chain[-1].end_s > full_s + 1
    finally:
        if site.agent is not None:
            site.agent.kill()
            site.agent.wait()
            site.agent = None
        subprocess.run(["umount", str(site.run_dir)], check=True)


def busy(report: AgentReport, gpu: str) -> str:
    return next(one.busy for one in report.gpus if one.uuid == gpu)


def test_a_slot_is_free_only_when_nothing_of_its_owner_is_left(site: Site, control: SimulatorControl) -> None:
    """Owner's processes are not foreign; what it leaves on the GPU is, and no report calls it free before."""
    site.begin()
    site.head.jobs = (job("a", 1, {"a-1": GPUS[0]}),)
    site.head.after(published("a", 1), "the publication")
    worker, child = site.occupy("a", "a-1", GPUS[0], 1.2)
    report = site.head.after(
        lambda report: any(lease.held for one in report.jobs for lease in one.leases), "the worker"
    )
    report = site.head.after(lambda report: report.gpus, "a look at both processes")
    assert [gpu.busy for gpu in report.gpus] == ["", ""]
    site.head.jobs = (job("a", 2, {}),)
    site.head.after(published("a", 2), "the withdrawal")
    with site.head.lock:
        seen = len(site.head.reports)
    worker.kill()
    worker.wait()
    report = site.head.after(
        lambda report: not any(lease.held for one in report.jobs for lease in one.leases),
        "the lock's release",
    )
    assert busy(report, GPUS[0]) == f"process {child} still uses 1.2 GiB"
    site.head.after(lambda report: report.gpus, "another look")
    os.kill(child, signal.SIGKILL)
    free = site.head.after(lambda report: not busy(report, GPUS[0]), "the GPU")
    with site.head.lock:
        for one in site.head.reports[seen : site.head.reports.index(free)]:
            held = any(lease.held for each in one.jobs for lease in each.leases)
            assert held or busy(one, GPUS[0])
    assert f"{GPUS[0]} is not granted now" in site.log.read_text()
    assert all(not busy(one, GPUS[1]) for one in site.head.reports)


def test_a_lock_that_its_own_user_deleted_frees_no_gpu(site: Site, control: SimulatorControl) -> None:
    """A tenant who removes the lock file looks gone, but its processes on the GPU do not."""
    site.begin()
    site.head.jobs = (job("a", 1, {"a-1": GPUS[0]}),)
    site.head.after(published("a", 1), "the publication")
    site.occupy("a", "a-1", GPUS[0], 2.0)
    site.head.after(lambda report: any(lease.held for one in report.jobs for lease in one.leases), "it")
    JobFolder.of(site.run_dir, "a").lease("a-1").lock.unlink()
    site.head.after(lambda report: not any(one.held for job in report.jobs for one in job.leases), "its end")
    site.head.jobs = (job("a", 2, {}),)
    report = site.head.after(published("a", 2), "the withdrawal")
    assert "still uses 2.0 GiB, and 1 more" in busy(report, GPUS[0])


def test_health_and_memory_count_where_processes_are_hidden(site: Site, control: SimulatorControl) -> None:
    """Without a process list memory tells, without both nothing blocks, and what is absent is said."""
    control.set_error(GPUS[0], "nvmlDeviceGetComputeRunningProcesses", 4)
    control.set_ownerless_memory(GPUS[0], 4 << 30)
    control.set_memory_errors(GPUS[1], 2, remap_pending=True)
    site.begin()
    report = site.head.last
    assert busy(report, GPUS[0]) == "4.0 GiB of its memory are in use by no process that the driver names"
    assert busy(report, GPUS[1]).startswith("2 uncorrectable ECC errors pending")
    assert "Insufficient Permissions" in report.gpus[0].unmeasured["processes"]
    assert "memory_used" not in report.gpus[0].unmeasured
    assert report.gpus[1].unmeasured == {}
    assert "HW-AGENT-021" not in report.notes
    control.set_error(GPUS[0], "nvmlDeviceGetMemoryInfo", 999)
    control.set_lost(GPUS[1])
    report = site.head.after(lambda report: report.gpus[1].lost, "the loss")
    assert busy(report, GPUS[1]) == "fell off the bus"
    site.kill()
    site.begin()
    report = site.head.last
    assert busy(report, GPUS[0]) == ""
    assert set(report.gpus[0].unmeasured) == {"processes", "memory_used"}


def test_jobs_outlive_the_agent_unless_told_otherwise(site: Site) -> None:
    """Workers go on when the agent ends; with stop_jobs_on_exit they are ended first."""
    site.head.jobs = (job("a", 1, {"a-1": GPUS[0]}),)
    site.begin()
    site.head.after(published("a", 1), "the publication")
    worker = site.hold("a", "a-1")
    assert site.end() == 0
    assert worker.poll() is None
    site.begin(stop_jobs_on_exit=True)
    assert site.end() == 0
    assert worker.wait(60) == -signal.SIGTERM


def test_a_run_directory_that_others_may_change_is_refused(site: Site) -> None:
    """A directory in which others could put their own jobs is not used."""
    site.run_dir.chmod(0o777)
    assert site.start_agent().wait(60) == 125
    assert "error[HW-AGENT-002]" in site.log.read_text()


def test_an_unknown_job_is_left_alone(site: Site) -> None:
    """A job that orders do not name any more goes on as it was."""
    site.head.jobs = (job("a", 1, {"a-1": GPUS[0]}),)
    site.begin()
    site.head.after(published("a", 1), "the publication")
    site.head.jobs = ()
    site.head.after(published("a", 1), "the job still reported")
    assert JobFolder.of(site.run_dir, "a").hostfile.read_text() == "localhost:1\n"
    site.head.jobs = (dataclasses.replace(job("a", 1, {}), forget=True),)
    site.head.after(lambda report: not report.jobs, "the job to be forgotten")
    assert not JobFolder.of(site.run_dir, "a").root.exists()


@pytest.mark.horovod
@pytest.mark.timeout(180)
def test_a_real_launcher_runs_and_its_verdict_and_logs_arrive(site: Site) -> None:
    """The agent starts Horowatt's launcher, and the head gets its verdict and the worker's output."""
    (site.folder / "hello.py").write_text("print('hello from the worker')\n")
    attached = job("a", 1, {"a-1": GPUS[0]})
    spec = dataclasses.replace(
        attached.spec,
        launcher=LauncherKind.HOROWATT,
        command=("python", "hello.py"),
        working_dir=str(site.folder),
    )
    site.head.jobs = (dataclasses.replace(attached, spec=spec),)
    site.begin()

    def ended(report: AgentReport) -> bool:
        return any(
            one.launcher is not None and one.launcher.state is LauncherState.FAILED for one in report.jobs
        )

    report = wait_for(lambda: site.head.last if ended(site.head.last) else None, "the verdict")
    (status,) = [one.launcher for one in report.jobs]
    assert (status.code, status.exit_code) == ("HW-JOB-004", 0), status
    report = site.head.after(lambda report: report.jobs, "the logs")
    text = {chunk.stream: chunk.text for one in report.jobs for chunk in one.streams}
    assert "hello from the worker" in text["lease/a-1"]
    assert "verdict" in text["launcher"]
    kinds = [json.loads(line)["kind"] for line in text["events"].splitlines()]
    assert kinds[0] == "published"
    assert "worker-exit" in kinds
    assert site.end() == 0
