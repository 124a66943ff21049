# SPDX-License-Identifier: Apache-2.0
"""One job on this node: what the head ordered, made so and kept so.

Everything here is a level: :meth:`NodeJob.order` takes the desired state, :meth:`NodeJob.tend`
moves the node one step towards it, and both may be repeated at any time.
"""

import dataclasses
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from horowatt.agent import attached
from horowatt.agent.book import JobBook, JobMemory, KnownLease, Start, with_slots
from horowatt.agent.folders import found_leases, lease_report, make_job_folder
from horowatt.agent.holders import LeaseState
from horowatt.agent.launchers import FINAL, Launcher, refusal, status_of
from horowatt.agent.notes import Notes, say
from horowatt.agent.processes import ProcessId, lock_holders, send_signal
from horowatt.agent.streams import Budget, Source, read_chunks
from horowatt.agent.trash import Trash
from horowatt.elastic.counters import Counters, is_held
from horowatt.elastic.folder import JobFolder
from horowatt.elastic.hostfile import publish, published_files
from horowatt.errors import HorowattError, NeedsOperator
from horowatt.records import (
    JobOrder,
    JobReport,
    LauncherKind,
    LauncherState,
    LauncherStatus,
    LeaseReport,
    SlotsFile,
)

GRACE_S = 20.0
"""Seconds between asking processes to end and killing them."""
SUSPEND_GRACE_S = 120.0
"""Seconds that a job which is suspended may take to write its commit, before it is asked to end."""
SUSPEND_SIGNAL = signal.SIGUSR1
_KEPT_WITHDRAWN = 64
"""Withdrawn leases of a job that are still looked at and reported, the latest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all jobs of a node share.

    Attributes:
        environment: Variables of the agent that launchers need.
        monotonic_s: Clock for waiting, seconds.
    """

    node: str
    run_dir: Path
    book: JobBook
    notes: Notes
    environment: Mapping[str, str] = field(default_factory=dict)
    monotonic_s: Callable[[], float] = time.monotonic


class NodeJob:
    """A job that the head has named to this node."""

    def __init__(self, memory: JobMemory, around: Surroundings) -> None:
        self._around = around
        self.memory = memory
        self._folder = JobFolder.of(around.run_dir, memory.spec.job_id)
        self._launcher = Launcher(self._folder, around.node, around.environment)
        self._leases: dict[str, KnownLease] = around.book.leases(memory.spec.job_id)
        self._published: SlotsFile | None = memory.slots if self._folder.slots_json.exists() else None
        self._unpublished = True
        self._held: dict[str, bool] = {}
        self._alive_at_s = around.monotonic_s()
        self._seen_started = False
        self._offsets: Mapping[str, int] | None = None
        self._suspending_since_s: float | None = None
        self._ending_since_s: float | None = None
        self._asked: set[tuple[ProcessId, signal.Signals]] = set()
        self._written: dict[Path, tuple[int, ...]] = {}
        self._last_reports: dict[str, LeaseReport] = {}
        self._last_status: LauncherStatus | None = None
        self.forgetting = False

    def order(self, order: JobOrder) -> None:
        """Take the desired state.

        Raises:
            NeedsOperator: when it cannot be stored; then nothing has changed.
        """
        memory = self.memory
        newer = order.slots.generation > memory.slots.generation
        wanted = dataclasses.replace(
            memory,
            slots=order.slots if newer else memory.slots,
            run=order.run and not order.forget,
            launcher_here=order.launcher_here,
            attempt=max(order.attempt, memory.attempt),
            suspend=order.suspend and not order.run and not order.forget,
        )
        self._offsets = dict(order.streams)
        self.forgetting = order.forget
        if wanted == memory:
            return
        self._around.book.remember(wanted)
        self.memory = wanted
        if newer:
            self._leases = with_slots(self._leases, wanted.slots, self._around.node)
            self._unpublished = True

    def tend(self, now_s: float) -> None:
        """Do what the desired state still lacks."""
        self._launcher.reap()
        memory = self.memory
        if refusal(memory, self._around.node) is not None:
            return
        slots = self._due_slots(now_s)
        damaged = self._damaged(slots)
        if damaged:
            self._around.notes.set(
                "HW-AGENT-023", f"{damaged} of job {memory.spec.job_id} was changed; it is written again"
            )
        if (
            (self._unpublished or damaged or slots != self._published)
            and slots.generation > 0
            and (memory.run or self._folder.root.exists())
        ):
            self._publish(slots)
        if not memory.run:
            self.end(now_s)
            return
        if self._must_start(now_s):
            self._start(now_s)

    def look(self) -> None:
        """See which leases are held."""
        self._held = {
            lease_id: is_held(self._folder.lease(lease_id).lock) for lease_id in self._watched_leases()
        }
        if any(self._held.values()):
            self._alive_at_s = self._around.monotonic_s()

    def lease_states(self) -> list[LeaseState]:
        """Return the leases of this node as of the last :meth:`look`."""
        published = self._published_ids()
        return [
            LeaseState(
                lease=known.lease,
                generation=known.generation,
                published=lease_id in published,
                held=self._held.get(lease_id, False),
            )
            for lease_id, known in self._leases.items()
        ]

    def lock_paths(self) -> tuple[Path, ...]:
        """Return the files that this job's processes hold: the launcher's and those of its leases."""
        leases = [self._folder.lease(lease_id).lock for lease_id in self._watched_leases()]
        return (self._folder.launcher_lock, *leases)

    def over(self, now_s: float) -> bool:
        """Tell whether no process of the job is left on this node."""
        return not (any(self._held.values()) or self._launcher.alive(self.memory.start, now_s))

    def delete(self, trash: Trash) -> None:
        """Remove the job's folder and every memory of it.

        Raises:
            OSError: when the folder could not be taken away.
            NeedsOperator: when it could not be removed from the book.
        """
        trash.discard(self._folder.root)
        self._around.book.forget(self.memory.spec.job_id)

    def report(self, now_s: float, budget: Budget) -> JobReport:
        """Return the job as this node sees it, with what the budget allows of its files."""
        uid = self.memory.spec.uid
        reports: list[LeaseReport] = []
        counters: list[Counters] = []
        unknown = [name for name in found_leases(self._folder, uid) if name not in self._leases]
        for lease_id in [*self._watched_leases(), *unknown]:
            folder = self._folder.lease(lease_id)
            held = self._held[lease_id] if lease_id in self._held else is_held(folder.lock)
            report, found = lease_report(folder, lease_id, uid, held=held, now_s=now_s)
            if lease_id in unknown and not report.started:
                # The folder of a lease on another node, whose worker this node cannot see.
                continue
            reports.append(report)
            self._last_reports[lease_id] = report
            counters += [found] if found is not None else []
        self._last_status = self._status(now_s, reports, counters)
        return JobReport(
            job_id=self.memory.spec.job_id,
            generation_published=self._published.generation if self._published else 0,
            num_published=len(self._published.leases) if self._published else 0,
            launcher=self._last_status,
            leases=tuple(reports),
            streams=read_chunks(self._sources(now_s), budget, self._around.notes.error),
        )

    def bare_report(self) -> JobReport:
        """Return what needs none of the job's files but the locks of its leases: who holds what."""
        reports = []
        for lease_id in self._watched_leases():
            held = self._held.get(lease_id, False)
            last = self._last_reports.get(lease_id) or _nothing_known(lease_id)
            reports.append(dataclasses.replace(last, held=held, started=last.started or held))
        return JobReport(
            job_id=self.memory.spec.job_id,
            generation_published=self._published.generation if self._published else 0,
            num_published=len(self._published.leases) if self._published else 0,
            launcher=self.memory.verdict or self._last_status,
            leases=tuple(reports),
        )

    def _damaged(self, slots: SlotsFile) -> str:
        """Return the name of a published file that is not as it was written, or an empty string."""
        if slots != self._published or not self._written:
            return ""
        return next((path.name for path, mark in self._written.items() if _mark(path) != mark), "")

    def _due_slots(self, now_s: float) -> SlotsFile:
        """Return the slots file that is due: a job that is over holds nothing, whoever gets the GPUs next."""
        slots = self.memory.slots
        if self.memory.run:
            return slots
        self.look()
        return dataclasses.replace(slots, leases=()) if self.over(now_s) else slots

    def _publish(self, slots: SlotsFile) -> None:
        spec = self.memory.spec
        try:
            make_job_folder(self._folder, spec.uid, spec.gid)
            environment = self._around.environment
            publish(self._folder, spec, slots, spec.uid, spec.gid, environment)
        except (HorowattError, OSError) as error:
            if isinstance(error, HorowattError):
                self._around.notes.error(error)
            else:
                self._around.notes.set("HW-AGENT-016", f"job {spec.job_id} cannot be published: {error}")
            if not self.memory.run and not slots.leases:
                # What its own user put in the way of a job that is over keeps nobody from its slots.
                self._published = slots
            return
        self._published = slots
        self._unpublished = False
        self._written = {path: mark for path in published_files(self._folder) if (mark := _mark(path))}
        # A worker takes its lock and then reads the slots file; so only locks that are looked at after
        # the publication tell whether a lease that it took back is free.
        self.look()

    def _must_start(self, now_s: float) -> bool:
        memory = self.memory
        if not memory.launcher_here or memory.spec.launcher is not LauncherKind.HOROWATT:
            return False
        if self._published is None or (memory.start is not None and memory.start.attempt >= memory.attempt):
            return False
        said = self._launcher.said(memory.spec.uid, memory.attempt)
        alive = self._launcher.alive(memory.start, now_s)
        if said is not None and (alive or said.state in FINAL):
            # It was started by an agent that could not remember it.
            self._remember(start=Start(attempt=memory.attempt, at_s=now_s))
            return False
        if alive:
            return False
        if any(self._held.values()):
            # Workers that a dead launcher left behind would keep the new ones out of their slots.
            self.end(now_s)
            return False
        self._forget_ending()
        return True

    def _start(self, now_s: float) -> None:
        start = Start(attempt=self.memory.attempt, at_s=now_s)
        before = self.memory
        if not self._remember(start=start, verdict=None):
            # Not started: an attempt that is not on disk could be started twice.
            self.memory = before
            return
        outcome = self._launcher.start(self.memory)
        if isinstance(outcome, LauncherStatus):
            self._remember(verdict=outcome)
            return
        self._remember(start=dataclasses.replace(start, process=outcome))
        say(f"job {self.memory.spec.job_id}: launcher {outcome.pid}, attempt {start.attempt}")

    def _remember(self, **changes: Start | LauncherStatus | None) -> bool:
        """Change the memory; on a full disk only in this process, and say so by False."""
        self.memory = dataclasses.replace(self.memory, **changes)  # type: ignore[arg-type]
        try:
            self._around.book.remember(self.memory)
        except NeedsOperator as error:
            self._around.notes.error(error)
            return False
        return True

    def end(self, now_s: float) -> None:
        """Ask the job's processes to end, the launcher first; kill what is left after a grace.

        A job that is suspended is first asked to write its commit and to end by itself. A launcher that
        has not said anything yet has nothing to commit, and would take the signal for its death.
        """
        spec, start = self.memory.spec, self.memory.start
        if self.over(now_s):
            self._forget_ending()
            return
        clock_s = self._around.monotonic_s()
        launchers = self._launcher.processes(start, spec.uid)
        if self.memory.suspend and launchers and self._ending_since_s is None:
            if self._suspending_since_s is None and self._launcher.said(spec.uid, self.memory.attempt):
                self._suspending_since_s = clock_s
            since_s = self._suspending_since_s
            if since_s is not None and clock_s - since_s < SUSPEND_GRACE_S:
                self._ask(launchers, SUSPEND_SIGNAL)
                return
        if self._ending_since_s is None:
            self._ending_since_s = clock_s
        if clock_s - self._ending_since_s >= GRACE_S:
            for process in {*launchers, *self._lease_holders()}:
                send_signal(process, spec.uid, signal.SIGKILL)
            return
        self._ask(launchers or self._lease_holders(), signal.SIGTERM)

    def _ask(self, processes: tuple[ProcessId, ...], number: signal.Signals) -> None:
        """Send a signal once to each process."""
        for process in processes:
            if (process, number) not in self._asked:
                self._asked.add((process, number))
                send_signal(process, self.memory.spec.uid, number)

    def _forget_ending(self) -> None:
        self._suspending_since_s = self._ending_since_s = None
        self._asked.clear()

    def _lease_holders(self) -> tuple[ProcessId, ...]:
        locks = [self._folder.lease(lease_id).lock for lease_id in self._leases]
        return lock_holders(locks, self.memory.spec.uid)

    def _status(
        self, now_s: float, leases: list[LeaseReport], counters: list[Counters]
    ) -> LauncherStatus | None:
        memory = self.memory
        refused = refusal(memory, self._around.node)
        if refused is not None:
            return refused if memory.launcher_here else None
        if memory.spec.launcher is LauncherKind.ATTACHED:
            return self._attached_status(leases, measurable=all(found.measurable for found in counters))
        return self._launcher_status(now_s) if memory.launcher_here else None

    def _launcher_status(self, now_s: float) -> LauncherStatus | None:
        memory, start = self.memory, self.memory.start
        if memory.verdict is not None and memory.verdict.attempt == memory.attempt:
            return memory.verdict
        # First the life, then the word: a launcher that ends in between has said its last.
        alive = self._launcher.alive(start, now_s)
        said = self._launcher.said(memory.spec.uid, memory.attempt)
        if said is not None and (alive or said.state in FINAL):
            return said
        if start is not None and start.attempt >= memory.attempt:
            if alive:
                return status_of(memory, LauncherState.STARTING)
            self._remember(verdict=self._stopped() if not memory.run else self._launcher.judge(memory))
            return self.memory.verdict
        return self._stopped() if not memory.run and self.over(now_s) else None

    def _stopped(self) -> LauncherStatus:
        return status_of(
            self.memory, LauncherState.STOPPED, attached.STOPPED_CODE, "the job was stopped on request"
        )

    def _attached_status(self, leases: list[LeaseReport], *, measurable: bool) -> LauncherStatus | None:
        published = self._published_ids()
        here = [lease for lease in leases if lease.lease_id in published] or leases
        if not self._seen_started and any(lease.started for lease in here):
            # Its first worker may have come since the last look; the quiet before it was nobody's absence.
            self._seen_started = True
            self._alive_at_s = self._around.monotonic_s()
        quiet_s = self._around.monotonic_s() - self._alive_at_s
        derived = attached.derive(here, run=self.memory.run, quiet_s=quiet_s, measurable=measurable)
        if derived is None:
            return None
        return status_of(
            self.memory,
            derived.state,
            derived.code,
            derived.message,
            exit_code=derived.exit_code,
            generation_applied=self._published.generation if self._published else 0,
        )

    def _published_ids(self) -> set[str]:
        return {lease.lease_id for lease in self._published.leases} if self._published else set()

    def _watched_leases(self) -> list[str]:
        """Return the published leases, those that were held, and the latest of the withdrawn ones."""
        published = self._published_ids() | {lease.lease_id for lease in self.memory.slots.leases}
        withdrawn = [lease_id for lease_id in self._leases if lease_id not in published]
        withdrawn.sort(key=lambda lease_id: self._leases[lease_id].generation)
        latest = set(withdrawn[-_KEPT_WITHDRAWN:])
        return [
            lease_id
            for lease_id in self._leases
            if lease_id in published or lease_id in latest or self._held.get(lease_id, False)
        ]

    def _sources(self, now_s: float) -> list[Source]:
        """Return the files to send from; none before the head has said what it holds."""
        offsets, uid = self._offsets, self.memory.spec.uid
        if offsets is None or self.forgetting:
            return []
        launcher_over = not self._launcher.alive(self.memory.start, now_s)
        files = [("events", self._folder.events, launcher_over and not any(self._held.values()))]
        if self.memory.launcher_here:
            files.append(("launcher", self._folder.launcher_log, launcher_over))
        files += [
            (
                f"lease/{lease_id}",
                self._folder.lease(lease_id).output_log,
                not self._held.get(lease_id, False),
            )
            for lease_id in self._leases
        ]
        return [
            Source(
                stream=stream,
                path=path,
                uid=uid,
                offset=offsets.get(stream, 0),
                complete=complete,
                whole_lines=stream == "events",
            )
            for stream, path, complete in files
        ]


def _mark(path: Path) -> tuple[int, ...]:
    """Return what changes of a file when anybody writes to it or replaces it; empty when it is absent."""
    try:
        status = path.lstat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _nothing_known(lease_id: str) -> LeaseReport:
    return LeaseReport(
        lease_id=lease_id,
        held=False,
        started=False,
        rank=None,
        world_size=None,
        steps=0,
        samples=None,
        epoch_samples=None,
        first_step_end_s=None,
        last_step_end_s=None,
        exit_code=None,
        sampled_at_s=0.0,
    )
