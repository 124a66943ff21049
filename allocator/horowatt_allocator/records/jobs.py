# SPDX-License-Identifier: Apache-2.0
"""Jobs: what a tenant asked for and what became of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from horowatt.records import BatchRule, LauncherKind


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A training command and the freedom the allocator has with it. Never changes.

    Attributes:
        job_id: Unique for ever, e.g. ``"j7f3a-0012"``; never parsed.
        uid, gid, username: The submitter, as the kernel named it.
        command: Argument vector; never passed through a shell.
        legal_widths: Widths the job may train at, ascending, never empty.
        batch_size: Declared batch (per worker or total by ``batch_rule``); None when not declared.
        total_samples: Total work, when known at submission.
        total_epochs: Total work in epochs; becomes samples when the data set's length is measured.
        deadline_s: Unix time by which the work should be done, or None.
        wall_time_limit_s: Longest time from first start to end, or None.
        gpu_types: GPU types the job accepts; empty means all.
        weight: Priority weight of the job's value in the program, > 0.
        flexibility: Share of its reference rate that the owner lets go for energy or under a cap,
            0 to 1.
    """

    job_id: str
    name: str
    tenant: str
    uid: int
    gid: int
    username: str
    launcher: LauncherKind
    command: tuple[str, ...]
    environment: Mapping[str, str]
    working_dir: str
    virtual_env: str | None
    legal_widths: tuple[int, ...]
    batch_rule: BatchRule
    batch_size: int | None
    total_samples: int | None
    total_epochs: float | None
    deadline_s: float | None
    wall_time_limit_s: float | None
    gpu_types: tuple[str, ...]
    weight: float
    flexibility: float
    submitted_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A job as its submitter asks for it, before admission turns it into a ``JobSpec``.

    Attributes:
        widths: Legal widths as text, see :func:`horowatt_allocator.decisions.admission.parse_widths`.
        deadline_s: Unix time.
    """

    name: str
    tenant: str
    command: tuple[str, ...]
    working_dir: str
    widths: str = "1"
    launcher: LauncherKind = LauncherKind.HOROWATT
    environment: Mapping[str, str] = field(default_factory=dict)
    virtual_env: str | None = None
    batch_rule: BatchRule = BatchRule.PER_WORKER
    batch_size: int | None = None
    total_samples: int | None = None
    total_epochs: float | None = None
    deadline_s: float | None = None
    wall_time_limit_s: float | None = None
    gpu_types: tuple[str, ...] = ()
    weight: float = 1.0
    flexibility: float = 0.0


class JobPhase(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    """Waits for slots: never started, or suspended, or to be started again after a loss."""
    RUNNING = "running"
    """Holds slots; its workers start or train."""
    STOPPING = "stopping"
    """Ends: waits until its node says that every slot is free."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({JobPhase.FINISHED, JobPhase.FAILED, JobPhase.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why something is as it is: a stable code and a sentence with the figures of the case."""

    code: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One candidate of a job: width on a GPU type at a power limit, or waiting (width 0).

    Attributes:
        gpu_type: None for the waiting column.
        limit_w: Power limit of each GPU; None leaves it at its default.
        rate_per_s: Expected samples per second, all workers together.
        low_rate_per_s, high_rate_per_s: Interval of the rate, about 90 %.
        marginal_w: Expected power above what the held GPUs draw idle.
        held_idle_w: Idle power of the GPUs it holds.
        nominal: True when the job was never measured: its rates are then relative to one GPU, on a
            nominal scale of 1 sample per second, and must not be shown as samples per second.
    """

    gpu_type: str | None
    width: int
    limit_w: float | None
    rate_per_s: float
    low_rate_per_s: float
    high_rate_per_s: float
    marginal_w: float
    held_idle_w: float
    nominal: bool = False

    @property
    def held_w(self) -> float:
        """Power drawn by the GPUs this column holds."""
        return self.marginal_w + self.held_idle_w


WAITING = Column(
    gpu_type=None,
    width=0,
    limit_w=None,
    rate_per_s=0.0,
    low_rate_per_s=0.0,
    high_rate_per_s=0.0,
    marginal_w=0.0,
    held_idle_w=0.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One world-size phase of a job.

    Attributes:
        number: Generation of the slots file.
        published_s: When the slots were published.
        first_step_end_s: End of the first step at this width; None before it.
        pause_s: Seconds without training before it because of the resize; None if not measured.
        ended_s: When the next generation was published or the job ended.
        samples: Samples trained in it; None when they cannot be counted.
        samples_before: Samples of the job when it was published; None when not countable.
        stopped_s: End of the last step before the resize, of the last worker to stop, by the head's
            clock; None when no worker went on from the generation before.
        resumed_s: End of the first step after the resize, of the first worker to resume, likewise.
    """

    number: int
    width: int
    gpu_type: str
    limit_w: float | None
    published_s: float
    first_step_end_s: float | None = None
    pause_s: float | None = None
    ended_s: float | None = None
    samples: int | None = None
    samples_before: int | None = None
    stopped_s: float | None = None
    resumed_s: float | None = None


class ResizePhase(StrEnum):
    """What is noted of a resize (or a start), in the order in which it normally happens."""

    GRANTED = "granted"
    """The launcher saw the slots."""
    STANDBY_STARTED = "standby-started"
    STANDBY_READY = "standby-ready"
    STANDBY_FAILED = "standby-failed"
    COMMITTED = "committed"
    """The state was written because of the publication."""
    PUBLISHED = "published"
    """The launcher gave the slots to Horovod: from here on there is no way back but a commit."""
    STOPPED = "stopped"
    """End of the last step before it."""
    INTERRUPTED = "interrupted"
    """A worker saw the change in its ``commit()``."""
    RESTARTED = "world-restarted"
    """The launcher gave up the join and restarted the world from the durable commit."""
    ASSIGNED = "assigned"
    """All workers that stay have come back, and Horovod gave out the ranks."""
    WORLD = "world"
    """Rendezvous done: ``hvd.init`` returned."""
    SYNCED = "synced"
    """``state.sync()`` returned."""
    RESUMED = "resumed"
    """End of the first step after it."""
    LEFT = "left"
    """A worker whose lease was taken back has gone, orderly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMark:
    """When something of a resize was noted, first and last, among the workers of one node.

    Attributes:
        node: By whose clock; empty means the head's.
        count: How often it was noted.
        last_lease_id: Who noted it last; empty when it was not a worker.
    """

    phase: ResizePhase
    node: str
    first_s: float
    last_s: float
    count: int = 1
    last_lease_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """How one generation came about, as launcher and workers noted it in the job's events.

    Attributes:
        number: Of the generation.
        decided_s: When the head published the slots, by its own clock.
        width_before: Width of the generation before; 0 when this is a start.
        marks: By the clocks of their nodes while it is the latest one, by the head's afterwards.
        clocks_s: What had to be added to the times of nodes whose clock was clearly off, once ``marks``
            are by the head's clock, seconds.
        cold: True when new workers start only at publication, False when standbys were started;
            None when neither is known.
        code: Stable code of what went wrong, else empty.
        why: What went wrong, else empty.
    """

    number: int
    decided_s: float
    width: int
    width_before: int
    marks: tuple[PhaseMark, ...] = ()
    clocks_s: Mapping[str, float] = field(default_factory=dict)
    cold: bool | None = None
    code: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeClock:
    """How far a node's clock is from the head's, from its latest few dozen reports.

    A report's way only ever makes the difference between sending and receiving larger, so the smallest
    one is nearest to the truth.

    Attributes:
        earlier_s, recent_s: Smallest difference head minus node, of two stretches of reports.
        num_recent: Reports in the recent stretch.
        num_late: Reports in a row that were clearly later than both: the clock was set back.
        late_s: Smallest difference of those.
        sent_at_s: When the latest report was sent, by the node's clock.
    """

    earlier_s: float
    recent_s: float
    num_recent: int
    num_late: int = 0
    late_s: float = 0.0
    sent_at_s: float = 0.0

    @property
    def offset_s(self) -> float:
        """What to add to the node's times to have the head's, seconds."""
        return min(self.earlier_s, self.recent_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseState:
    """One lease as the head knows it. A slot is free when no lease on it is unreleased.

    Attributes:
        generation: Generation that first published it.
        withdrawn_s: When a published generation first lacked it or the job was told to stop; None
            while the job holds it.
        released_s: When the node said that no process of the worker lives; None before.
        samples, steps: Latest counters of its worker; ``samples`` None when not countable.
        died_s: When the head first heard that the worker had ended without being told to.
    """

    lease_id: str
    job_id: str
    node: str
    gpu_uuid: str
    gpu_type: str
    slot_index: int
    simulated: bool
    generation: int
    granted_s: float
    withdrawn_s: float | None = None
    released_s: float | None = None
    held: bool = False
    started: bool = False
    rank: int | None = None
    world_size: int | None = None
    steps: int = 0
    samples: int | None = None
    first_step_end_s: float | None = None
    last_step_end_s: float | None = None
    exit_code: int | None = None
    died_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFailure:
    """Workers of one job that failed on one GPU before they joined.

    Attributes:
        count: In a row; forgotten once one joins.
        until_s: The job is not given the GPU before this, Unix seconds.
    """

    count: int
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspension:
    """A job that was stopped to go on later.

    Attributes:
        since_s: When it was told to stop, Unix seconds.
        why: For what, as the end of a sentence.
    """

    since_s: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCursor:
    """How far one node's ``events`` stream of a job was read.

    Attributes:
        next_offset: Bytes read so far.
        tail: Start of a line whose end has not arrived yet.
    """

    next_offset: int = 0
    tail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateWindow:
    """Readings at the start and at the end of a stretch of undisturbed training at one column.

    Samples are counted at ends of steps, so ``start_s`` and ``end_s`` are means of the workers'
    latest step ends: workers that advance alike then give the exact rate although their nodes
    report at different instants. Energies sum the counters of the job's GPUs, read at
    ``*_energy_at_s`` on average; None when one of them has no counter.
    """

    generation: int
    limit_w: float | None
    start_s: float
    start_samples: int
    start_energy_j: float | None
    end_s: float
    end_samples: int
    end_energy_j: float | None
    start_energy_at_s: float = 0.0
    end_energy_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job and all that the controller knows of it.

    Attributes:
        column: What the latest plan gave the job (the target; slots may lag behind it).
        generation: Latest published generation, 0 before the first.
        lease_ids: Leases of the published generation, ordered by slot.
        attempt: Number of starts, 0 before the first.
        samples: Samples of all workers of all attempts; None when not countable.
        window: Stretch of training being measured; None while starting or resizing.
        rate_per_s, power_w: Latest measured rate and power; None before the first window.
        reason: Why the job waits or has the width it has.
        exit_code: Of the script, when it ended.
        changed_s: When its width was last changed while it ran; 0 before the first resize.
        past_samples: Samples of workers whose leases are gone; None when not countable.
        step_s: Latest measured duration of one optimizer step, or None.
        ending: While STOPPING, the phase that follows once every slot is free; QUEUED means that
            it is to be started again.
        launcher_alive: False once the home node said that the launcher ended.
        generation_applied: Latest generation that the launcher said its workers train at.
        events: How far the ``events`` stream was read, by node.
        resizes: How its latest generations came about, oldest first; a few dozen are kept.
        clocks: Clocks of its nodes against the head's, by node.
        cold: Why its new workers start cold (without standbys), as the launcher says; else empty.
        num_commits: Durable commits that the head heard of.
        last_commit_s: When the head last heard of a durable commit (a ``committed`` event), by its own
            clock; None if the script never made one.
        suspension: Since it was told to stop, until it starts again; else None.
        attempt_s: When the present attempt was published; None before the first.
        waited_s: How long it had waited when it was published.
        losses_s: When it was lost, within the policy's ``restart_window_s``.
        not_before_s: It is not started before this, Unix seconds; 0 when nothing speaks against it.
        commit_nodes: Where its durable commits lie: the launcher's last node, then the others.
        leaving: The column it is moving away from, while it moves to another GPU type.
        growth_failures: Growths in a row whose new workers did not join.
        grow_not_before_s: It is not grown before this, Unix seconds.
        failed_gpus: Where its workers failed before they joined, by GPU UUID.
    """

    spec: JobSpec
    phase: JobPhase
    column: Column = WAITING
    generation: int = 0
    lease_ids: tuple[str, ...] = ()
    home_node: str | None = None
    attempt: int = 0
    restarts: int = 0
    started_s: float | None = None
    ended_s: float | None = None
    samples: int | None = None
    epoch_samples: int | None = None
    window: RateWindow | None = None
    rate_per_s: float | None = None
    power_w: float | None = None
    generations: tuple[Generation, ...] = ()
    reason: Reason = Reason(code="new", sentence="just submitted")
    exit_code: int | None = None
    changed_s: float = 0.0
    past_samples: int | None = 0
    step_s: float | None = None
    ending: JobPhase | None = None
    launcher_alive: bool = False
    generation_applied: int = 0
    events: Mapping[str, StreamCursor] = field(default_factory=dict)
    resizes: tuple[Resize, ...] = ()
    clocks: Mapping[str, NodeClock] = field(default_factory=dict)
    cold: str = ""
    num_commits: int = 0
    last_commit_s: float | None = None
    suspension: Suspension | None = None
    attempt_s: float | None = None
    waited_s: float = 0.0
    losses_s: tuple[float, ...] = ()
    not_before_s: float = 0.0
    commit_nodes: tuple[str, ...] = ()
    leaving: Column | None = None
    growth_failures: int = 0
    grow_not_before_s: float = 0.0
    failed_gpus: Mapping[str, GpuFailure] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Number of slots of the published generation."""
        return len(self.lease_ids)

    @property
    def total_samples(self) -> int | None:
        """Total work in samples, or None when it is not known (yet)."""
        if self.spec.total_samples is not None:
            return self.spec.total_samples
        if self.spec.total_epochs is not None and self.epoch_samples is not None:
            return round(self.spec.total_epochs * self.epoch_samples)
        return None

    @property
    def remaining_samples(self) -> int | None:
        """Work left in samples, at least 0, or None when it is not known."""
        total = self.total_samples
        if total is None or (self.samples is None and self.attempt > 0):
            return None
        return max(0, total - (self.samples or 0))


class PauseKind(StrEnum):
    """Resizes whose pauses are alike."""

    GROW_WARM = "grow-warm"
    """New workers had been waiting as standbys."""
    GROW_COLD = "grow-cold"
    """New workers had to start first."""
    SHRINK = "shrink"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measured point of a job: what a column really gave.

    Attributes:
        power_w: Power of all its GPUs together, idle included; None when not measured.
        seconds_s: Length of the windows behind it.
    """

    gpu_type: str
    width: int
    limit_w: float | None
    rate_per_s: float
    power_w: float | None
    seconds_s: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEstimate:
    """What was measured of a job, newest last, one entry per (type, width, limit).

    Attributes:
        pauses_s: Pauses of all resizes together.
        kind_pauses_s: The same by kind of resize.
    """

    observations: tuple[Observation, ...] = ()
    pauses_s: tuple[float, ...] = field(default=())
    kind_pauses_s: Mapping[PauseKind, tuple[float, ...]] = field(default_factory=dict)
