# SPDX-License-Identifier: Apache-2.0
"""What nodes, launchers and the head say to each other.

Frozen records without I/O. ``horowatt.wire`` turns them into JSON and back, with validation.
Times are Unix seconds of the clock of the node that wrote them; energies are joules, powers watts.

Data flows in one direction. The head answers every report of an agent with *orders*: the whole
desired state of that node. The agent makes it so and reports what is. Both messages are levels,
not edges, so either may be lost or repeated without harm.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

WIRE_VERSION = 1
"""Version of the agent protocol; the head refuses agents that speak a newer one."""


class LauncherKind(StrEnum):
    """Who starts the workers of a job."""

    HOROWATT = "horowatt"
    """Horowatt's own launcher, started by the agent."""
    ATTACHED = "attached"
    """The user's own ``horovodrun``, reading the job's discovery script."""


class BatchRule(StrEnum):
    """What stays the same when the width changes."""

    PER_WORKER = "per-worker"
    TOTAL = "total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right of one job to one slot for a while.

    Attributes:
        lease_id: Unique for ever; valid as a host name; never parsed.
        node: Name of the node in the inventory.
        address: Host name or IP address by which other hosts of the job reach the node.
        gpu_uuid: NVML UUID of the GPU, or ``CPU-<node>-<n>`` for a CPU slot.
        gpu_type: Type as the inventory and the program know it.
        slot_index: Position among the job's slots on this node, from 0; decides the local rank of
            attached jobs.
        simulated: True when the GPU is one of ours.
    """

    lease_id: str
    job_id: str
    node: str
    address: str
    gpu_uuid: str
    gpu_type: str
    slot_index: int
    simulated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsFile:
    """``slots.json``: which slots a job holds. The truth from which the hostfile is derived.

    Attributes:
        generation: Counts the publications of this job, from 1; 0 means none yet.
        uid: Unix user the job runs as.
    """

    job_id: str
    generation: int
    uid: int
    leases: tuple[Lease, ...]
    published_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """All a node needs to run a job.

    Attributes:
        command: Argument vector; never passed through a shell.
        environment: Variables the submitter asked for, on top of a small clean base.
        virtual_env: Root of the virtual environment whose ``python`` runs the job, or None.
        batch_size: Declared batch, per worker or in total according to ``batch_rule``; None when
            not declared.
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
    min_width: int
    max_width: int
    batch_rule: BatchRule
    batch_size: int | None


class LauncherState(StrEnum):
    """Life of one launcher process."""

    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    """The script ended with exit code 0 after at least one training step."""
    FAILED = "failed"
    """The script itself failed; running it again would fail again."""
    LOST = "lost"
    """The launcher or all workers died without a verdict from the script; may be run again."""
    STOPPED = "stopped"
    """Ended because the head ordered it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherStatus:
    """``launcher.json``: what the launcher last said, or what the agent found in its place.

    Attributes:
        attempt: Which start of the job this is, from 1.
        generation_applied: Generation of the slots file whose width the workers train at.
        code: Stable reason code when the launcher ended, else empty.
        message: The reason in one sentence, else empty.
    """

    job_id: str
    attempt: int
    state: LauncherState
    pid: int
    generation_applied: int
    exit_code: int | None
    code: str
    message: str
    updated_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReport:
    """What became of one lease on a node, from the worker's counters and from the kernel.

    Attributes:
        held: True while some process of the worker lives (it holds the lease's lock file).
        started: True once a worker of this lease was ever seen.
        rank: Horovod rank, None before ``hvd.init``.
        world_size: Horovod size the worker trains in, None before ``hvd.init``.
        steps: Optimizer steps since the worker started; monotone.
        samples: Samples trained on by this worker; None when they could not be counted.
        epoch_samples: Length of the training data set as its DataLoader says; None if unknown.
        first_step_end_s: End of the first step at the present world size; None before it.
        last_step_end_s: End of the latest step; None before the first.
        exit_code: Exit code of the worker (negative signal number if killed), None while it runs.
        sampled_at_s: When the counters were read.
    """

    lease_id: str
    held: bool
    started: bool
    rank: int | None
    world_size: int | None
    steps: int
    samples: int | None
    epoch_samples: int | None
    first_step_end_s: float | None
    last_step_end_s: float | None
    exit_code: int | None
    sampled_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """Bytes of one append-only file of a job, decoded with replacement.

    Attributes:
        stream: ``"events"`` (JSON lines), ``"launcher"`` or ``"lease/<lease id>"``.
        offset: Position of the first byte of ``text`` in the file, bytes.
        next_offset: Position after the last byte, bytes.
    """

    stream: str
    offset: int
    next_offset: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """One job as its node sees it.

    Attributes:
        num_published: Leases that its slots file names on that node; None when the node does not say.
    """

    job_id: str
    generation_published: int
    launcher: LauncherStatus | None
    leases: tuple[LeaseReport, ...]
    streams: tuple[StreamChunk, ...] = ()
    num_published: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """One GPU as NVML shows it now. A value of None is absent, and ``unmeasured`` says why.

    Attributes:
        energy_j: Reading of the energy counter (since driver load), or of the agent's integral.
        power_w: Board power.
        limit_w: Enforced power limit.
        unmeasured: Reason by the name of the absent field.
        lost: True when the device fell off the bus or needs a reset.
        busy: Why this GPU must not be granted now, such as a foreign process on it or a pending
            reset; empty when nothing speaks against it. Processes of the lease's own job do not.
    """

    uuid: str
    nvml_index: int
    gpu_type: str
    simulated: bool
    energy_j: float | None
    power_w: float | None
    limit_w: float | None
    default_limit_w: float | None
    min_limit_w: float | None
    max_limit_w: float | None
    can_set_limit: bool
    lost: bool
    sampled_at_s: float
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    busy: str = ""


class EnergyMethod(StrEnum):
    """How the joules of an interval came about."""

    COUNTER = "counter"
    INTEGRATED = "integrated"
    BRIDGED = "bridged"
    """Counter difference across an absence of the agent during which the holder did not change."""
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyInterval:
    """Energy of one GPU between two instants, under one holder.

    Attributes:
        seq: Position in the agent's own sequence, from 1 without holes; repeats are dropped.
        counter_start_j: Counter at ``start_s``; None when it could not be read.
        counter_end_j: Counter at ``end_s``; None when it could not be read.
        energy_j: Joules of the interval; None when they could not be measured.
        unmeasured: Reason when ``energy_j`` is None, else empty.
        job_id: Holder, or None when the GPU was free.
        attributable: False when the holder during the interval is not known for certain.
    """

    seq: int
    gpu_uuid: str
    gpu_type: str
    simulated: bool
    start_s: float
    end_s: float
    counter_start_j: float | None
    counter_end_j: float | None
    energy_j: float | None
    unmeasured: str
    method: EnergyMethod
    job_id: str | None
    lease_id: str | None
    generation: int
    attributable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """One call of an agent to the head.

    Attributes:
        agent_id: Random identity of the agent's state folder; ``seq`` counts within it.
        isolated: True when GPUs are isolated by device cgroups on this node.
        intervals: Closed intervals not yet acknowledged, in order of ``seq``.
        notes: Things an operator should know, by stable code.
    """

    wire_version: int
    node: str
    agent_id: str
    sent_at_s: float
    isolated: bool
    gpus: tuple[GpuReport, ...]
    jobs: tuple[JobReport, ...]
    intervals: tuple[EnergyInterval, ...]
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """What a node is to do with one job.

    Attributes:
        run: False to stop the job; its slots stay leased until the node reports them free.
        forget: True when the head has all it needs and the node may delete the job's folder.
        launcher_here: True on the one node that runs the launcher.
        attempt: Start number that the launcher is to be; a launcher with a lower one is replaced
            after it ended, never beside it.
        streams: Offsets up to which the head holds each stream, bytes.
        suspend: With ``run`` False: let the job write a durable commit before it ends, because it will be
            started again from that.
    """

    job_id: str
    run: bool
    forget: bool
    launcher_here: bool
    attempt: int
    spec: LaunchSpec
    slots: SlotsFile
    streams: Mapping[str, int]
    suspend: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOrders:
    """The head's answer: the whole desired state of a node.

    Jobs that are not named are left as they are: silence never stops a job.

    Attributes:
        acked_seq: Every interval up to this one is in the ledger.
        limits_w: Power limit by GPU UUID; a GPU that is not named gets its previous limit back.
        report_after_s: When to call again, seconds.
    """

    acked_seq: int
    jobs: tuple[JobOrder, ...]
    limits_w: Mapping[str, float]
    report_after_s: float
