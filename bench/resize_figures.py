# SPDX-License-Identifier: Apache-2.0
"""Pauses, bandwidth, many ranks and idle cost: each figure with how it is measured, and stock beside it."""

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from resize_jobs import (
    SCRIPTS,
    ElasticJob,
    OurJob,
    Resize,
    StockJob,
    cpu_s,
    resize,
    running,
    wait_for_steps,
)

SETUP_S = 3.0
"""Set-up of its own that the script does after ``hvd.init``."""
PAUSE_TARGETS_S = {(1, 2): 0.25, (2, 3): 0.4, (1, 4): 0.6}
SCALE_IN_TARGET_S = 0.3
STOCK_SHARE = 1 / 20
OVERHEAD_TARGET_S = 1.0
STATE_MB = 300.0
STATE_FIXED_S = 0.2
RERENDEZVOUS_TARGET_S = 2.0
IDLE_TARGET = 0.005
ROUND = (2, 3, 1, 4, 1)
"""Widths of one round, which starts and ends at 1."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the bench.

    Attributes:
        measured: None when it could not be measured, which falls short of any target.
        target: Greatest value that is good enough; None for what is only reported.
        note: What it stands beside.
    """

    name: str
    measured: float | None
    target: float | None
    unit: str
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True when it reaches its target, or has none."""
        return self.target is None or (self.measured is not None and self.measured <= self.target)

    def line(self) -> str:
        """Return ``figure  measured  target``."""
        measured = "not measured" if self.measured is None else f"{self.measured:.4g} {self.unit}"
        target = "reported" if self.target is None else f"<= {self.target:.4g} {self.unit}"
        verdict = "" if self.ok else "  MISSED"
        return (
            f"{self.name:<44}  {measured:>14}  {target:>14}{verdict}{'  ' + self.note if self.note else ''}"
        )


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything is run."""

    rounds: int
    stock_rounds: int
    settle_s: float
    state_rounds: int
    idle_s: float
    ranks: int
    fewer_ranks: int
    soak: tuple[int, int, int]
    """Resizes, worker kills, launcher kills."""


FULL = Size(4, 2, 2.0, 3, 30.0, 12, 10, (200, 20, 5))
QUICK = Size(1, 1, 1.0, 1, 10.0, 6, 5, (8, 2, 1))


def say(text: str) -> None:
    """Show progress."""
    sys.stderr.write(f"  {text}\n")
    sys.stderr.flush()


def _command(*options: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / "steps.py"), ".", *options]


def _begin(job: OurJob | StockJob, width: int) -> None:
    job.set_width(width)
    began_s = time.monotonic()
    job.start()
    wait_for_steps(job, width, began_s, 1.0)


def _rounds(job: ElasticJob, widths: Iterable[int], settle_s: float, name: str) -> list[Resize]:
    resizes = []
    for width in widths:
        done = resize(job, width, settle_s)
        say(f"{name}: {done.before} -> {done.after}: pause {done.pause_s:.3f} s, {done.phases_s}")
        resizes.append(done)
    return resizes


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


# ------------------------------------------------------------------------------------------ pauses


def pauses(folder: Path, size: Size) -> Iterator[Figure]:
    """Pauses of both launchers, the time from the decision, and the rate while a standby warms up."""
    command = _command("--setup-s", str(SETUP_S))
    with running(OurJob(folder / "ours", command)) as job:
        _begin(job, 1)
        ours = _rounds(job, ROUND * size.rounds, size.settle_s, "horowatt")
    with running(StockJob(folder / "stock", command)) as stock_job:
        _begin(stock_job, 1)
        stock = _rounds(stock_job, ROUND * size.stock_rounds, size.settle_s, "horovodrun")
    for (before, after), target_s in PAUSE_TARGETS_S.items():
        name = f"pause {before}->{after}"
        measured_s, stock_s = _pause(ours, before, after), _pause(stock, before, after)
        details = _details(ours, stock, lambda done, b=before, a=after: (done.before, done.after) == (b, a))
        yield Figure(name, measured_s, target_s, "s", f"horovodrun {_text(stock_s)} s", details)
        share = measured_s / stock_s if measured_s is not None and stock_s else None
        yield Figure(f"{name}, share of horovodrun's", share, STOCK_SHARE, "")
    shrinks = [done.pause_s for done in ours if done.after < done.before]
    stock_s = _median([done.pause_s for done in stock if done.after < done.before])
    details = _details(ours, stock, lambda done: done.after < done.before)
    yield Figure(
        "pause of a scale-in",
        _median(shrinks),
        SCALE_IN_TARGET_S,
        "s",
        f"horovodrun {_text(stock_s)} s",
        details,
    )
    grown = [done for done in ours if done.after > done.before]
    warm = [(done.first_step_s, done.standby_s) for done in grown if done.standby_s is not None]
    yield Figure(
        "decision to first step less standby start",
        _median([first_s - standby_s for first_s, standby_s in warm]),
        OVERHEAD_TARGET_S,
        "s",
        f"decision to first step: {_text(_median([done.first_step_s for done in grown]))} s, "
        f"standby start {_text(_median([standby_s for _, standby_s in warm]))} s, horovodrun "
        f"{_text(_median([done.first_step_s for done in stock if done.after > done.before]))} s in all",
    )
    shares = [done.rates[1] / done.rates[0] for done in grown if done.rates[0] and done.rates[1]]
    yield Figure("rate while standbys warm up, share", _median(shares), None, "", "horovodrun: 0, it stops")


def _pause(resizes: Iterable[Resize], before: int, after: int) -> float | None:
    return _median([done.pause_s for done in resizes if (done.before, done.after) == (before, after)])


def _details(
    ours: Iterable[Resize], stock: Iterable[Resize], mine: Callable[[Resize], bool]
) -> dict[str, Any]:
    return {
        "horowatt": [asdict(done) for done in ours if mine(done)],
        "horovodrun": [asdict(done) for done in stock if mine(done)],
    }


def _text(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


# ------------------------------------------------------------------------------------ large state


def large_state(folder: Path, size: Size) -> Iterator[Figure]:
    """Pause with 300 MB of model and optimizer, against a broadcast of as many bytes in the same world."""
    options = ("--setup-s", "0", "--state-mb", str(STATE_MB), "--bandwidth", "--commit-every", "5")
    with running(OurJob(folder / "state", _command(*options))) as job:
        _begin(job, 1)
        resizes = _rounds(job, (2, 1) * size.state_rounds, max(size.settle_s, 4.0), "horowatt, 300 MB")
        times_s: dict[int, list[float]] = {}
        num_bytes = 0.0
        for path in job.work.glob("broadcasts-*"):
            for line in path.read_text().splitlines():
                rank, _, words, taken_s = line.split()
                num_bytes = float(words)
                times_s.setdefault(int(rank), []).append(float(taken_s))
    # The last to have it all: the slowest rank's median.
    broadcast_s = max((statistics.median(times) for times in times_s.values()), default=None)
    target_s = 2 * (broadcast_s + STATE_FIXED_S) if broadcast_s else 0.0
    measured_s = _pause(resizes, 1, 2)
    bandwidth = f"{num_bytes / broadcast_s / 1e9:.2f} GB/s" if broadcast_s else "not measured"
    yield Figure(
        "pause 1->2 with 300 MB of state",
        measured_s,
        target_s,
        "s",
        f"broadcast at {bandwidth}",
        _details(resizes, (), lambda _: True),
    )
    shrunk_s = _pause(resizes, 2, 1)
    yield Figure("pause 2->1 with 300 MB of state", shrunk_s, target_s, "s")


# -------------------------------------------------------------------------------------- many ranks


def many_ranks(folder: Path, size: Size) -> Iterator[Figure]:
    """Re-rendezvous of 12 -> 10 -> 12 ranks on this machine: first interrupt to last entry of the world."""
    many, fewer = size.ranks, size.fewer_ranks
    command = _command("--setup-s", "0", "--device-s", "0.1")
    with running(OurJob(folder / "ranks", command, max_width=many)) as job:
        _begin(job, many)
        for width in (fewer, many):
            before = job.width
            done = _rounds(job, [width], size.settle_s, "horowatt")[0]
            yield Figure(
                f"re-rendezvous of {before}->{width} ranks",
                _rendezvous_s(job.events_since(done.decided_s), width),
                RERENDEZVOUS_TARGET_S,
                "s",
                f"pause {done.pause_s:.2f} s",
                asdict(done),
            )


def _rendezvous_s(events: Sequence[dict[str, Any]], width: int) -> float | None:
    worlds = [e["at_s"] for e in events if e["kind"] == "world" and e["world_size"] == width]
    interrupted = [e["at_s"] for e in events if e["kind"] == "interrupted"]
    return max(worlds) - min(interrupted) if interrupted and worlds else None


# ------------------------------------------------------------------------------------------- idle


def idle(folder: Path, size: Size) -> Iterator[Figure]:
    """CPU time of the launcher of a job of two that nobody resizes."""
    command = _command("--setup-s", "0", "--device-s", "0.2")
    shares = []
    for job in (OurJob(folder / "idle", command), StockJob(folder / "idle-stock", command)):
        with running(job):
            _begin(job, 2)
            time.sleep(2.0)
            used_s, began_s = cpu_s(job.launcher_pid), time.monotonic()
            time.sleep(size.idle_s)
            shares.append((cpu_s(job.launcher_pid) - used_s) / (time.monotonic() - began_s))
    ours, stock = shares
    yield Figure("launcher idle, CPU-s per s and job", ours, IDLE_TARGET, "", f"horovodrun {stock:.3f}")
