# SPDX-License-Identifier: Apache-2.0
"""One job, resized and killed at random for a long time, and everything checked that must hold.

The job (``scripts/soak_train.py``) writes a ledger. From it follows the *final history*: each world trains
from the step at which it began, and what an earlier world did from that step on is undone. In that history
each sample of each epoch must have been trained exactly once. What was undone is what the crashes cost;
it must all lie after the last commit, and is counted.
"""

import getpass
import json
import os
import random
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resize_jobs import SCRIPTS, OurJob, Stuck, marked, running, wait_until

from horowatt.elastic.counters import is_held
from horowatt.records import LauncherState

MAX_WIDTH = 4
SAMPLES = 601
"""Of an epoch: a prime number, which no width divides."""
COMMIT_EVERY_S = 1.0
"""How often the job's state goes to disk."""
KILLS_UNTIL = 0.6
"""Launchers are killed in this first part only, so that one lives long enough to see its memory grow."""
SWAP_SHARE = 0.15
"""Share of resizes that keep the width and give one slot for another."""
GROWTH_SHARE, GROWTH_BYTES = 0.05, 8e6
"""What memory may grow by from the first to the last third of a life, beside noise."""
SUPERSEDED_SHARE = 0.1
"""Share of resizes before which something else is published, and taken back within ``SUPERSEDED_S``."""
SUPERSEDED_S = 3.0
FEW_SAMPLES = 9
CLOCK_SLACK_S = 0.05
"""Between two readings of the clock that belong together."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process uses, once."""

    resident_bytes: float
    descriptors: int
    threads: int


@dataclass(slots=True)
class Report:
    """What the soak did and found.

    Attributes:
        problems: Everything that must not be; empty for a soak that passed.
        undone_steps: Steps that crashes undid, and that were made again.
    """

    seed: int
    resizes: int = 0
    superseded: int = 0
    worker_kills: int = 0
    launcher_kills: int = 0
    took_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    worlds: int = 0
    steps: int = 0
    epochs: int = 0
    undone_steps: int = 0
    undone_samples: int = 0
    longest_undone_s: float = 0.0
    growth_bytes: dict[str, float] = field(default_factory=dict)
    recoveries_s: list[float] = field(default_factory=list)
    """From the kill of a worker to the first step without it."""
    stuck: str = ""

    def figures(self) -> list[tuple[str, float, str]]:
        """Return what is reported beside the problems: name, value, unit."""
        return [
            ("steps in the final history", self.steps, ""),
            ("steps undone by crashes", self.undone_steps, ""),
            *(
                [
                    ("recovery from a killed worker, median", statistics.median(self.recoveries_s), "s"),
                    ("recovery from a killed worker, longest", max(self.recoveries_s), "s"),
                ]
                if self.recoveries_s
                else []
            ),
            *(
                (f"growth of {who}, first to last third", grown / 1e6, "MB")
                for who, grown in self.growth_bytes.items()
            ),
            ("time", self.took_s, "s"),
        ]


class Soak:
    """A soak of a given size; the same seed gives the same order of the same actions."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        resizes: int,
        worker_kills: int,
        launcher_kills: int,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._random = random.Random(seed)  # noqa: S311 - not for secrets
        self._progress = progress
        self._report = Report(seed)
        commits = folder / "commits"
        folder.mkdir(parents=True, exist_ok=True)
        commits.mkdir(mode=0o700)
        self._job = OurJob(
            folder,
            ["python", str(SCRIPTS / "soak_train.py"), ".", "--samples", str(SAMPLES)],
            max_width=MAX_WIDTH,
            environment={
                "HOROWATT_COMMIT_DIR": str(commits),
                "HOROWATT_COMMIT_EVERY_S": str(COMMIT_EVERY_S),
            },
        )
        self._actions = self._draw(resizes, worker_kills, launcher_kills)
        self._anchor: str | None = None
        self._kills: list[tuple[float, str]] = []
        self._launcher_kills_s: list[float] = []
        self._usage: dict[str, list[Sample]] = defaultdict(list)

    def _draw(self, resizes: int, worker_kills: int, launcher_kills: int) -> list[str]:
        actions = ["resize"] * resizes + ["kill"] * worker_kills
        self._random.shuffle(actions)
        until = max(int(len(actions) * KILLS_UNTIL), 1)
        for position in sorted(self._random.sample(range(1, until + 1), launcher_kills), reverse=True):
            actions.insert(position, "kill launcher")
        return actions

    def run(self) -> Report:
        """Do everything, check everything, and leave no process behind."""
        before = _shared_files()
        began_s = time.monotonic()
        report, job = self._report, self._job
        with running(job):
            try:
                job.set_width(self._random.randint(1, MAX_WIDTH))
                job.start()
                self._applied()
                for number, action in enumerate(self._actions, start=1):
                    self._act(number, action)
                self._finish()
            except Stuck as stuck:
                report.stuck = str(stuck)
                report.problems.append(f"got stuck: {report.stuck}")
            if not report.stuck:
                report.problems += _left_behind(job, before)
        self._check_usage()
        if not report.stuck:
            events = job.events()
            check_ledger(job.work, report, self._kills, self._launcher_kills_s, events)
            resumed_s = sorted(event["at_s"] for event in events if event["kind"] == "resumed")
            report.recoveries_s = [
                next(at_s for at_s in resumed_s if at_s > killed_s) - killed_s for killed_s, _ in self._kills
            ]
        report.took_s = time.monotonic() - began_s
        return report

    # ------------------------------------------------------------------------------- actions

    def _act(self, number: int, action: str) -> None:
        began_s = time.monotonic()
        if action == "kill" and self._job.width == 1:
            # Somebody must be left to go on.
            self._resize(2)
            self._report.resizes -= 1
        if action == "resize":
            self._resize(None)
        elif action == "kill":
            self._kill_worker()
        else:
            self._kill_launcher()
        if "kill launcher" not in self._actions[number:] and self._anchor is None:
            self._anchor = self._job.leases[0]
        time.sleep(self._random.uniform(0.05, 0.4))
        self._sample()
        self._progress(
            f"soak {number}/{len(self._actions)}: {action}, {self._job.width} workers, "
            f"{time.monotonic() - began_s:.1f} s"
        )

    def _resize(self, width: int | None) -> None:
        job, choose = self._job, self._random
        if job.width < MAX_WIDTH and choose.random() < SUPERSEDED_SHARE:
            # Not yet published to Horovod, or just so: the next generation replaces it in either case.
            before = list(job.leases)
            job.publish([*before, job.grant()])
            time.sleep(choose.uniform(0.0, SUPERSEDED_S))
            job.publish(before)
            self._report.superseded += 1
        kept = list(job.leases)
        if width is None and len(kept) > 1 and choose.random() < SWAP_SHARE:
            width = len(kept)
            kept.remove(choose.choice([lease for lease in kept if lease != self._anchor]))
        elif width is None:
            width = choose.choice([other for other in range(1, MAX_WIDTH + 1) if other != len(kept)])
        while len(kept) > width:
            kept.remove(choose.choice([lease for lease in kept if lease != self._anchor]))
        job.publish([*kept, *(job.grant() for _ in range(width - len(kept)))])
        self._applied()
        self._report.resizes += 1

    def _kill_worker(self) -> None:
        job, choose = self._job, self._random
        victim = choose.choice([lease for lease in job.leases if lease != self._anchor])
        pid = job.pid_of(victim)
        self._kills.append((time.time(), victim))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_until(f"release of {victim}", lambda: victim not in job.held(), job)
        survivors = [lease for lease in job.leases if lease != victim]
        if choose.random() < 0.5:
            # The head may hear of it late: the survivors go on by themselves.
            killed_s = self._kills[-1][0]
            wait_until(
                f"recovery of {survivors} from the kill of {victim}",
                lambda: any(
                    event["kind"] == "resumed" and event["at_s"] > killed_s for event in job.events()
                ),
                job,
            )
        replaced = choose.random() < 0.5
        job.publish([*survivors, job.grant()] if replaced else survivors)
        self._applied()
        self._report.worker_kills += 1

    def _kill_launcher(self) -> None:
        job = self._job
        assert job.launcher is not None
        self._launcher_kills_s.append(time.time())
        job.launcher.kill()
        job.launcher.wait()
        deadline_s = time.monotonic() + 30
        while (job.held() or is_held(job.folder.launcher_lock)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        if left := job.held():
            self._report.problems.append(f"leases {left} are held after the launcher was killed")
        job.start()
        self._applied()
        self._report.launcher_kills += 1

    def _applied(self) -> None:
        job = self._job

        def trains() -> bool:
            status = job.status()
            return status is not None and status.state is LauncherState.RUNNING and job.applied()

        wait_until(f"generation {job.generation} with {job.leases}", trains, job)

    def _finish(self) -> None:
        job = self._job
        assert job.launcher is not None
        (job.work / "stop").touch()
        deadline_s = time.monotonic() + 60
        while job.launcher.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.1)
        status = job.status()
        if status is None or status.state is not LauncherState.FINISHED:
            raise Stuck(f"the job did not finish: {status}\n{job.story()}")

    # --------------------------------------------------------------------------------- usage

    def _sample(self) -> None:
        job = self._job
        with suppress(OSError):
            self._usage[f"launcher of attempt {job.attempt}"].append(usage(job.launcher_pid))
        if self._anchor is not None:
            with suppress(OSError):
                self._usage[f"worker {self._anchor}"].append(usage(job.pid_of(self._anchor)))

    def _check_usage(self) -> None:
        for who, samples in self._usage.items():
            if len(samples) < FEW_SAMPLES:
                continue
            third = len(samples) // 3
            first, last = samples[:third], samples[-third:]
            for what, allowed in (
                ("resident_bytes", GROWTH_BYTES + GROWTH_SHARE * samples[0].resident_bytes),
                ("descriptors", 4.0),
                ("threads", 4.0),
            ):
                grown = _median(last, what) - _median(first, what)
                if grown > allowed:
                    self._report.problems.append(
                        f"{what} of {who} grew by {grown:.0f} within {len(samples)} samples"
                    )
                if what == "resident_bytes":
                    self._report.growth_bytes[who.split()[0]] = grown


def usage(pid: int) -> Sample:
    """Return what a process uses now.

    Raises:
        OSError: when it has ended.
    """
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    return Sample(
        resident_bytes=float(fields["VmRSS"].split()[0]) * 1024,
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),  # noqa: PTH208 - a count, not paths
        threads=int(fields["Threads"]),
    )


def _median(samples: Sequence[Sample], what: str) -> float:
    return statistics.median(getattr(sample, what) for sample in samples)


# ---------------------------------------------------------------------------- what must be gone


_TORCH_CACHE = f"torchinductor_{getpass.getuser()}"


def _shared_files() -> set[str]:
    """Return what is in the folders that all programs share, as far as it may be ours."""
    names = {f"/dev/shm/{entry.name}" for entry in Path("/dev/shm").iterdir()}  # noqa: S108
    return names | {
        str(entry)
        for entry in Path("/tmp").iterdir()  # noqa: S108
        if any(word in entry.name.lower() for word in ("horo", "gloo", "torch", "pymp", "psm"))
    }


def _left_behind(job: OurJob, before: set[str]) -> list[str]:
    """Return what a job that is over left: processes, and with them sockets and ports; locks; files."""
    problems = []
    deadline_s = time.monotonic() + 5
    while (pids := marked(job.mark)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    for pid in pids:
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            problems.append(f"process {pid} is left: {command}")
    problems += [f"lease {lease} is held" for lease in sorted(job.held())]
    # PyTorch makes a cache folder of the user's when it is imported.
    left = sorted(str(path) for path in job.temporary.rglob("*") if path.name != _TORCH_CACHE)
    left += sorted(_shared_files() - before)
    left += [str(path) for path in job.folder.root.rglob("*") if _is_leftover(path)]
    return [*problems, *(f"file {path} is left" for path in left)]


def _is_leftover(path: Path) -> bool:
    return path.is_socket() or path.is_fifo() or path.suffix in {".tmp", ".part"} or ".tmp" in path.name


# ------------------------------------------------------------------------------------ the ledger


@dataclass(slots=True)
class World:
    """One world: from its first line to the beginning of the next."""

    name: str
    began_s: float
    first_step: int
    size: int
    digests: set[str] = field(default_factory=set)
    members: set[str] = field(default_factory=set)
    lines: list[Mapping[str, Any]] = field(default_factory=list)
    commits: dict[str, list[Mapping[str, Any]]] = field(default_factory=lambda: defaultdict(list))


def check_ledger(
    folder: Path,
    report: Report,
    kills: Sequence[tuple[float, str]],
    launcher_kills_s: Sequence[float],
    events: Sequence[Mapping[str, Any]],
) -> None:
    """Add to ``report`` what the ledger of a job says, and what must not be in it.

    Args:
        kills: When which lease's worker was killed, seconds since the epoch.
        launcher_kills_s: When launchers were killed, seconds since the epoch.
        events: Of the job; those of kind ``committed`` bound what a killed launcher may cost.
    """
    worlds, ends = _read(folder)
    report.worlds = len(worlds)
    epochs: dict[int, Counter[int]] = defaultdict(Counter)
    for number, world in enumerate(worlds):
        report.problems += _differing_replicas(world)
        # A crash soon after a resize may undo more than one world.
        end = min((later.first_step for later in worlds[number + 1 :]), default=None)
        _tell_history(world, end, epochs, report)
        if number + 1 < len(worlds):
            _check_crash(worlds[: number + 1], worlds[number + 1], kills, launcher_kills_s, events, report)
    report.epochs = len(epochs)
    report.problems += _inexact_epochs(epochs)
    if not ends:
        report.problems.append("no worker came to the end of the script")
    elif len({line["digest"] for line in ends}) != 1 or len(ends) != ends[0]["size"]:
        report.problems.append(f"the final parameters differ, or a worker is missing: {ends}")


def _differing_replicas(world: World) -> Iterator[str]:
    if len(world.digests) != 1:
        yield f"world {world.name} of {world.size} began with different replicas: {world.digests}"
    by_step: dict[int, set[str]] = defaultdict(set)
    for commits in world.commits.values():
        for line in commits:
            by_step[line["step"]].add(line["digest"])
    for step, digests in by_step.items():
        if len(digests) != 1:
            yield f"replicas differ at the commit of step {step} in world {world.name}"


def _inexact_epochs(epochs: Mapping[int, Counter[int]]) -> Iterator[str]:
    everything = set(range(SAMPLES))
    for epoch, counts in sorted(epochs.items()):
        twice = sorted(index for index, count in counts.items() if count > 1)
        never = sorted(everything - set(counts))
        if twice or never or set(counts) - everything:
            yield (
                f"epoch {epoch}: {len(twice)} samples trained more than once {twice[:6]}, "
                f"{len(never)} never {never[:6]}"
            )


def _read(folder: Path) -> tuple[list[World], list[Mapping[str, Any]]]:
    worlds: dict[str, World] = {}
    ends = []
    for path in sorted(folder.glob("ledger-*")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "end":
                ends.append(line)
                continue
            name = line["world"]
            if line["kind"] == "world":
                new = World(name, line["at_s"], line["step"], line["size"])
                world = worlds.setdefault(name, new)
                world.began_s = min(world.began_s, line["at_s"])
                world.digests.add(f"{line['digest']} at {line['step']}")
                world.members.add(path.name)
            elif line["kind"] == "step":
                worlds[name].lines.append(line)
            else:
                worlds[name].commits[path.name].append(line)
    return sorted(worlds.values(), key=lambda world: world.began_s), ends


def _tell_history(world: World, end: int | None, epochs: dict[int, Counter[int]], report: Report) -> None:
    """Count what of ``world`` is in the final history, which goes on elsewhere from step ``end``."""
    workers: Counter[int] = Counter()
    undone = set()
    for line in world.lines:
        if end is not None and line["step"] >= end:
            undone.add(line["step"])
            report.undone_samples += len(line["indices"])
            continue
        workers[line["step"]] += 1
        epochs[line["epoch"]].update(line["indices"])
    report.steps += len(workers)
    report.undone_steps += len(undone)
    wrong = {step: count for step, count in workers.items() if count != world.size}
    if wrong:
        report.problems.append(f"world {world.name} of {world.size} made steps with other counts: {wrong}")


def _check_crash(
    worlds: Sequence[World],
    following: World,
    kills: Iterable[tuple[float, str]],
    launcher_kills_s: Iterable[float],
    events: Iterable[Mapping[str, Any]],
    report: Report,
) -> None:
    """Nothing that was committed may be undone; without a crash, nothing at all."""
    world = worlds[-1]
    begun = max((line["step"] for line in world.lines), default=world.first_step - 1)
    driver_s = [at_s for at_s in launcher_kills_s if world.began_s <= at_s <= following.began_s]
    crashed = driver_s or any(world.began_s <= at_s <= following.began_s for at_s, _ in kills)
    if not crashed:
        if following.first_step <= begun:
            report.problems.append(
                f"a resize without a crash undid steps {following.first_step} to {begun} of {world.name}"
            )
        return
    if following.first_step <= begun:
        first_s = min(line["at_s"] for line in world.lines if line["step"] >= following.first_step)
        last_s = max(line["at_s"] for line in world.lines)
        report.longest_undone_s = max(report.longest_undone_s, last_s - first_s)
    if driver_s:
        durable_s = [
            event["at_s"] - event["write_s"] - event["blocked_s"] - CLOCK_SLACK_S
            for event in events
            if event["kind"] == "committed" and event["at_s"] <= driver_s[0]
        ]
        if not durable_s:
            report.problems.append("the launcher was killed before anything was committed to disk")
        until_s = max(durable_s, default=0.0)
        kept = [
            line["step"]
            for earlier in worlds[-2:]
            for lines in earlier.commits.values()
            for line in lines
            if line["at_s"] <= until_s and (earlier is world or line["step"] <= world.first_step)
        ]
    else:
        # A worker that was killed may have come one commit less far than the others.
        kept = [min((c[-1]["step"] for c in world.commits.values()), default=0)]
        if len(world.commits) < len(world.members):
            kept = []
    if kept and following.first_step < max(kept):
        report.problems.append(
            f"step {max(kept)} of world {world.name} was committed and undone to {following.first_step}"
        )
