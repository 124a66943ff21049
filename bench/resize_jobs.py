# SPDX-License-Identifier: Apache-2.0
"""One job that can be resized, under the Horowatt launcher or under plain ``horovodrun``, and what it did."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from horowatt.elastic.counters import is_held, read_counters
from horowatt.elastic.folder import JobFolder
from horowatt.elastic.hostfile import publish
from horowatt.files import write_atomic
from horowatt.records import (
    BatchRule,
    LauncherKind,
    LauncherState,
    LauncherStatus,
    LaunchSpec,
    Lease,
    SlotsFile,
)
from horowatt.wire import decode

SCRIPTS = Path(__file__).parent / "scripts"
POLL_S = 0.1
PATIENCE_S = 120.0
NODE = "n"
MARK = "BENCH_RESIZE_MARK"
"""Variable by which every process of a job is recognised, however it was started."""
ENDED = frozenset({LauncherState.FINISHED, LauncherState.FAILED, LauncherState.LOST, LauncherState.STOPPED})


class Stuck(Exception):
    """Something that must happen did not; the message holds the job's logs."""


@dataclass(frozen=True, slots=True)
class Step:
    """The end of one step of one worker, on CLOCK_MONOTONIC."""

    end_s: float
    width: int
    step: int
    pid: int


class StepLog:
    """The steps of all workers of a job, read as they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self.steps: list[Step] = []

    def refresh(self) -> list[Step]:
        """Return the steps that are new since the last call."""
        new = []
        for path in self._folder.glob("steps-*"):
            pid = int(path.name.rpartition("-")[2])
            with path.open("rb") as log:
                log.seek(self._offsets.get(path, 0))
                text = log.read()
            whole = text.rpartition(b"\n")[0]
            if not whole:
                continue
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + 1
            for line in whole.splitlines():
                end_s, width, step = line.split()
                new.append(Step(float(end_s), int(width), int(step), pid))
        self.steps += new
        return new


@dataclass(frozen=True, slots=True)
class Resize:
    """What one change of width cost.

    Attributes:
        decided_s: When the new width was published, CLOCK_MONOTONIC.
        pause_s: From the end of the last step in the old world to that of the first one in the new
            world, less one median step of the new world.
        first_step_s: From the decision to the end of the first step in the new world.
        standby_s: From the start of the first new standby until the last one was ready; None when no
            standby was started.
        phases_s: Times of the events of this generation since the decision, by name.
        rates: Steps per second and worker times width: before, while standbys warmed up, after.
    """

    before: int
    after: int
    decided_s: float
    pause_s: float
    step_s: float
    first_step_s: float
    standby_s: float | None
    phases_s: Mapping[str, float]
    rates: tuple[float | None, float | None, float | None]


class ElasticJob(Protocol):
    """A running job of ``scripts/steps.py``."""

    log: StepLog
    width: int

    def set_width(self, width: int) -> float:
        """Publish a width; return the time of the decision, CLOCK_MONOTONIC."""

    def check(self) -> None:
        """Raise ``Stuck`` when the job is over."""

    def events_since(self, monotonic_s: float) -> list[dict[str, Any]]:
        """Return the events of a job of Horowatt since a time, with ``at_s`` on CLOCK_MONOTONIC."""

    def story(self) -> str:
        """Return the job's logs."""

    @property
    def launcher_pid(self) -> int:
        """Process that holds Horovod's driver."""


def wait_until(what: str, true: Callable[[], bool], job: ElasticJob, patience_s: float = PATIENCE_S) -> None:
    """Wait for something that a job does.

    Raises:
        Stuck: when it does not do it, or ended.
    """
    deadline_s = time.monotonic() + patience_s
    while not true():
        job.check()
        if time.monotonic() > deadline_s:
            raise Stuck(f"{what} did not happen within {patience_s:.0f} s\n{job.story()}")
        time.sleep(POLL_S)


def wait_for_steps(job: ElasticJob, width: int, since_s: float, lasting_s: float) -> None:
    """Wait until the workers have trained at ``width`` for ``lasting_s`` after their first step there."""
    ends_s: list[float] = []

    def trained() -> bool:
        new = job.log.refresh()
        ends_s.extend(step.end_s for step in new if step.width == width and step.end_s > since_s)
        return bool(ends_s) and max(ends_s) - min(ends_s) >= lasting_s

    wait_until(f"training at width {width}", trained, job)


def resize(job: ElasticJob, width: int, settle_s: float = 2.0) -> Resize:
    """Change the width of a job, wait until it has trained at the new one for a while, and measure."""
    before = job.width
    decided_s = job.set_width(width)
    wait_for_steps(job, width, decided_s, settle_s)
    time.sleep(2 * POLL_S)
    job.log.refresh()
    old = [step for step in job.log.steps if step.width == before and step.end_s > decided_s - 30.0]
    new = [step for step in job.log.steps if step.width == width and step.end_s > decided_s]
    first_s = min(step.end_s for step in new)
    last_s = max(step.end_s for step in old if step.end_s < first_s)
    step_s = _median_step_s(new)
    ready, standby_s, phases_s = _phases(job.events_since(decided_s - 0.05), decided_s)
    return Resize(
        before=before,
        after=width,
        decided_s=decided_s,
        pause_s=first_s - last_s - step_s,
        step_s=step_s,
        first_step_s=first_s - decided_s,
        standby_s=standby_s,
        phases_s={
            **phases_s,
            "last-step": round(last_s - decided_s, 4),
            "first-step": round(first_s - decided_s, 4),
        },
        rates=(
            _rate(old, decided_s - 3.0, decided_s),
            _rate(old, *ready) if ready else None,
            _rate(new, first_s + 0.2, first_s + settle_s),
        ),
    )


def _median_step_s(steps: Sequence[Step]) -> float:
    """Return the median time between two steps of the same worker."""
    by_pid: dict[int, list[float]] = {}
    for step in steps:
        by_pid.setdefault(step.pid, []).append(step.end_s)
    gaps = [
        later - sooner
        for ends in by_pid.values()
        for sooner, later in zip(sorted(ends), sorted(ends)[1:], strict=False)
    ]
    return statistics.median(gaps) if gaps else 0.0


def _rate(steps: Sequence[Step], begin_s: float, end_s: float) -> float | None:
    """Return worker steps per second in a window, or None for one that is too short to tell."""
    if end_s - begin_s < 0.2:
        return None
    return sum(begin_s <= step.end_s < end_s for step in steps) / (end_s - begin_s)


def _phases(
    events: Sequence[Mapping[str, Any]], decided_s: float
) -> tuple[tuple[float, float] | None, float | None, dict[str, float]]:
    """Return when standbys warmed up, for how long, and the first and last event of each kind."""
    phases: dict[str, float] = {}
    for event in events:
        at_s = round(event["at_s"] - decided_s, 4)
        phases.setdefault(event["kind"], at_s)
        if at_s != phases[event["kind"]]:
            phases[f"{event['kind']}-last"] = at_s
    started = [event["at_s"] for event in events if event["kind"] == "standby-started" and not event["cold"]]
    ready = [event["at_s"] for event in events if event["kind"] == "standby-ready"]
    if not started or not ready:
        return None, None, phases
    return (min(started), max(ready)), max(ready) - min(started), phases


class OurJob:
    """A job under the Horowatt launcher: a folder, slots published into it, the launcher process."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *,
        max_width: int = 4,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.folder = JobFolder(folder / "job")
        self.folder.root.mkdir(mode=0o700)
        self.mark = uuid.uuid4().hex
        self.log = StepLog(self.work)
        self.width = 0
        self.leases: list[str] = []
        self.generation = 0
        self.attempt = 0
        self.launcher: subprocess.Popen[bytes] | None = None
        self._granted = 0
        self._to_monotonic_s = time.monotonic() - time.time()
        self._spec = LaunchSpec(
            job_id="bench",
            name="bench",
            tenant="bench",
            uid=os.getuid(),
            gid=os.getgid(),
            username="bench",
            launcher=LauncherKind.HOROWATT,
            command=tuple(command),
            environment={
                **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
                "OMP_NUM_THREADS": "1",
                MARK: self.mark,
                **(environment or {}),
            },
            working_dir=str(self.work),
            virtual_env=None,
            min_width=1,
            max_width=max_width,
            batch_rule=BatchRule.PER_WORKER,
            batch_size=None,
        )

    def grant(self) -> str:
        """Return the id of a new lease: each grant of a slot has its own."""
        self._granted += 1
        return f"l{self._granted}"

    def publish(self, lease_ids: Sequence[str]) -> float:
        """Publish a generation with these leases; return when, CLOCK_MONOTONIC."""
        self.generation += 1
        leases = tuple(
            Lease(
                lease_id=lease_id,
                job_id="bench",
                node=NODE,
                address="127.0.0.1",
                gpu_uuid=f"CPU-{lease_id}",
                gpu_type="cpu",
                slot_index=index,
                simulated=False,
            )
            for index, lease_id in enumerate(lease_ids)
        )
        slots = SlotsFile(
            job_id="bench",
            generation=self.generation,
            uid=os.getuid(),
            leases=leases,
            published_at_s=time.time(),
        )
        decided_s = time.monotonic()
        publish(self.folder, self._spec, slots, os.getuid(), os.getgid())
        self.leases = list(lease_ids)
        self.width = len(leases)
        return decided_s

    def set_width(self, width: int) -> float:
        """Publish a width: new leases at the end, or fewer of the old ones."""
        more = [self.grant() for _ in range(width - len(self.leases))]
        return self.publish([*self.leases, *more][:width])

    def start(self) -> None:
        """Start the launcher, the next attempt after the last one."""
        self.attempt += 1
        self.launcher = subprocess.Popen(
            [
                *(sys.executable, "-m", "horowatt.elastic.launcher", self.folder.root),
                *("--attempt", str(self.attempt), "--node", NODE),
            ],
            env={**os.environ, MARK: self.mark, "TMPDIR": str(self.temporary), **self._commit_settings()},
            stdin=subprocess.DEVNULL,
        )

    def _commit_settings(self) -> dict[str, str]:
        settings = self._spec.environment
        return {name: value for name, value in settings.items() if name.startswith("HOROWATT_")}

    @property
    def launcher_pid(self) -> int:
        """The launcher's process."""
        assert self.launcher is not None
        return self.launcher.pid

    def status(self) -> LauncherStatus | None:
        """Return what the launcher said last, if that was in this attempt."""
        try:
            status = decode(self.folder.launcher_json.read_bytes(), LauncherStatus)
        except FileNotFoundError:
            return None
        return status if status.attempt == self.attempt else None

    def applied(self) -> bool:
        """Return True when the workers train at the latest generation."""
        status = self.status()
        return status is not None and status.generation_applied == self.generation

    def check(self) -> None:
        """Raise ``Stuck`` when the job is over."""
        status = self.status()
        assert self.launcher is not None
        if (status is not None and status.state in ENDED) or self.launcher.poll() is not None:
            raise Stuck(f"the job is over: {status}\n{self.story()}")

    def held(self) -> set[str]:
        """Return the leases that a process holds."""
        leases = self.folder.leases
        return {entry.name for entry in leases.iterdir() if is_held(entry / "lock")}

    def pid_of(self, lease_id: str) -> int:
        """Return the process of a worker that trains."""
        counters = read_counters(self.folder.lease(lease_id).counters, os.getuid())
        if counters is None:
            raise ProcessLookupError(lease_id)
        return counters.pid

    def events(self) -> list[dict[str, Any]]:
        """Return all events so far."""
        if not self.folder.events.exists():
            return []
        return [json.loads(line) for line in self.folder.events.read_text().splitlines()]

    def events_since(self, monotonic_s: float) -> list[dict[str, Any]]:
        """Return the events since a time, with ``at_s`` on CLOCK_MONOTONIC."""
        moved = [{**event, "at_s": event["at_s"] + self._to_monotonic_s} for event in self.events()]
        return [event for event in moved if event["at_s"] >= monotonic_s]

    def story(self) -> str:
        """Return the ends of the job's logs."""
        logs = [self.folder.launcher_json, self.folder.launcher_log, self.folder.events]
        latest = sorted(self.folder.leases.glob("*/output.log"), key=lambda path: path.stat().st_mtime)
        return "\n".join(f"--- {log}\n{_tail(log)}" for log in [*logs, *latest[-6:]] if log.exists())

    def end(self) -> None:
        """End the launcher and whatever of the job is left."""
        if self.launcher is not None and self.launcher.poll() is None:
            self.launcher.terminate()
            try:
                self.launcher.wait(30)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
                self.launcher.wait()
        end_marked(self.mark)


class StockJob:
    """The same job under plain ``horovodrun`` with a discovery script."""

    def __init__(self, folder: Path, command: Sequence[str], *, max_width: int = 4) -> None:
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        self._command = command
        self._max_width = max_width
        self._hostfile = folder / "hostfile"
        self._output = folder / "output.log"
        self._discover = folder / "discover.sh"
        self._discover.write_text(f"#!/bin/sh\ncat '{self._hostfile}'\n")
        self._discover.chmod(0o700)
        self.mark = uuid.uuid4().hex
        self.log = StepLog(self.work)
        self.width = 0
        self.launcher: subprocess.Popen[bytes] | None = None

    def set_width(self, width: int) -> float:
        """Publish a number of slots of this machine."""
        decided_s = time.monotonic()
        write_atomic(self._hostfile, f"localhost:{width}\n".encode())
        self.width = width
        return decided_s

    def start(self) -> None:
        """Start ``horovodrun``."""
        horovodrun = Path(sys.executable).with_name("horovodrun")
        command = [
            *(str(horovodrun), "-np", str(self.width), "--min-np", "1", "--max-np", str(self._max_width)),
            *("--network-interface", "lo", "--host-discovery-script", str(self._discover)),
            *self._command,
        ]
        with self._output.open("ab") as output:
            self.launcher = subprocess.Popen(
                command,
                cwd=self.work,
                env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def launcher_pid(self) -> int:
        """The process of ``horovodrun``."""
        assert self.launcher is not None
        return self.launcher.pid

    def check(self) -> None:
        """Raise ``Stuck`` when the job is over."""
        if self.launcher is not None and self.launcher.poll() is not None:
            raise Stuck(f"horovodrun ended with exit code {self.launcher.returncode}\n{self.story()}")

    def events_since(self, _monotonic_s: float) -> list[dict[str, Any]]:
        """Return nothing: stock Horovod notes no events."""
        return []

    def story(self) -> str:
        """Return the end of what horovodrun printed."""
        return _tail(self._output)

    def end(self) -> None:
        """End horovodrun and its workers, which are in sessions of their own."""
        end_marked(self.mark)
        if self.launcher is not None:
            self.launcher.wait()


AnyJob = TypeVar("AnyJob", OurJob, StockJob)


@contextmanager
def running(job: AnyJob) -> Iterator[AnyJob]:
    """Leave no process of a job behind."""
    try:
        yield job
    finally:
        job.end()


def marked(mark: str) -> list[int]:
    """Return all processes of this user that inherited a job's mark."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def end_marked(mark: str) -> None:
    """Kill all processes of a job."""
    deadline_s = time.monotonic() + 10
    while (pids := marked(mark)) and time.monotonic() < deadline_s:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process and its children that ended have used, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _tail(path: Path, num_bytes: int = 6000) -> str:
    if not path.exists():
        return ""
    return path.read_bytes()[-num_bytes:].decode("utf-8", "replace")
