# SPDX-License-Identifier: Apache-2.0
"""The cluster: nodes, GPUs, tenants, policy, plans, and the state that a step maps to the next."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from horowatt.records import AgentReport
from horowatt_allocator.records.jobs import Column, Job, JobEstimate, JobSpec, LeaseState, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """A node as the inventory describes it.

    Attributes:
        address: Host name or IP by which other nodes reach it.
        gpu_type: Type of its GPUs as the program knows it; None takes NVML's product name.
        num_gpus: GPUs the operator expects; None takes what the agent finds.
        base_w: Power of the host without its GPUs, idle; None when not known.
        simulated: True when the agent is to serve simulated GPUs.
    """

    name: str
    address: str
    gpu_type: str | None
    num_gpus: int | None
    base_w: float | None
    simulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Description of a cluster. Node names are unique; order is that of the file."""

    name: str
    nodes: tuple[NodeSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as last reported. Limits are None where NVML has none.

    Attributes:
        busy: Why its node says that it must not be granted now; empty when it may.
        busy_since_s: Since when, by the head's clock; None when it may be granted.
    """

    uuid: str
    nvml_index: int
    gpu_type: str
    simulated: bool
    energy_j: float | None
    power_w: float | None
    idle_w: float | None
    limit_w: float | None
    default_limit_w: float | None
    min_limit_w: float | None
    max_limit_w: float | None
    can_set_limit: bool
    lost: bool
    sampled_at_s: float
    busy: str = ""
    busy_since_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node with its GPUs, in NVML order.

    Attributes:
        last_seen_s: When the head last heard of it, by the head's clock; None before the first report.
        sent_at_s: When its agent sent the latest report, by the node's clock.
        silent: True once it has not reported for the policy's ``agent_timeout_s``.
        job_ids: Jobs that have a folder there, as its latest report says.
        drained_job_ids: Those of them that had nothing more to send of their streams.
    """

    spec: NodeSpec
    gpus: tuple[Gpu, ...] = ()
    last_seen_s: float | None = None
    agent_id: str | None = None
    acked_seq: int = 0
    isolated: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)
    sent_at_s: float | None = None
    silent: bool = False
    job_ids: tuple[str, ...] = ()
    drained_job_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who jobs and joules belong to.

    Attributes:
        users: Unix user names that may submit for it; ``"*"`` means everybody.
        weight: Weight of its jobs in the program.
        gpu_quota: Most slots it may hold, or None.
    """

    name: str
    users: tuple[str, ...]
    weight: float = 1.0
    gpu_quota: int | None = None


class Objective(StrEnum):
    """What the operator wants most; formulas in ``decisions/program.py``."""

    THROUGHPUT = "throughput"
    PROPORTIONAL_FAIR = "proportional-fair"
    BALANCED = "balanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The operator's choices.

    Attributes:
        alpha: Share of energy in ``balanced``, 0 to 1.
        horizon_s: H of the program.
        cap_w: Power cap of all GPUs, idle included; None for no cap.
        limit_steps: Power limits offered to a job, as shares of the GPU's highest limit.
        dwell_s: Least time between two resizes of one job, unless it starts, ends or must; also between
            its start and its suspension, and before a suspended job starts again.
        settle_s: Training after a resize that is not measured yet.
        window_s: Length of a measuring window.
        agent_timeout_s: Silence after which a node counts as gone.
        decide_every_s: A decision is made at least this often.
        max_restarts: How often a job that was lost (not failed) is started again within
            ``restart_window_s``.
        restart_window_s: Losses longer ago than this are forgiven.
        restart_backoff_s: Wait before the first restart; doubles with each loss in the window.
        resize_deadline_s: Time in which new workers must join, and a suspended job must have stopped.
        prior_efficiency: Prior of rate(2w) / (2·rate(w)).
        prior_pause_s: Pause assumed before one was measured.
        max_wait_s: A job that could run and has waited longer must run at the next decision.
        solve_limit_s: Time given to the solver for one program.
    """

    objective: Objective = Objective.BALANCED
    alpha: float = 0.3
    horizon_s: float = 300.0
    cap_w: float | None = None
    limit_steps: tuple[float, ...] = (1.0, 0.8, 0.6)
    dwell_s: float = 30.0
    settle_s: float = 3.0
    window_s: float = 10.0
    agent_timeout_s: float = 30.0
    decide_every_s: float = 30.0
    max_restarts: int = 3
    restart_window_s: float = 3600.0
    restart_backoff_s: float = 5.0
    resize_deadline_s: float = 600.0
    prior_efficiency: float = 0.9
    prior_pause_s: float = 5.0
    max_wait_s: float = 600.0
    solve_limit_s: float = 5.0


class PlanStatus(StrEnum):
    """What is known of a plan; never taken from the solver's word alone."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    PREVIOUS_KEPT = "previous-kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One column for every job that has not ended.

    Attributes:
        value: Objective value of the plan, recomputed from its columns.
        bound: Proven upper bound of the objective, or None.
        violations: Elastic rows that could not be held, by name, in the row's unit.
        binding: Names of coupling rows without slack.
        power_w: Expected power of all GPUs, idle included.
    """

    columns: Mapping[str, Column]
    status: PlanStatus
    value: float
    bound: float | None
    violations: Mapping[str, float]
    binding: tuple[str, ...]
    power_w: float
    solve_s: float
    solver: str

    @property
    def gap(self) -> float | None:
        """Relative gap between bound and value, at least 0; None without a bound."""
        if self.bound is None:
            return None
        return max(0.0, self.bound - self.value) / max(abs(self.bound), 1e-12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One job's change in a decision, with why."""

    job_id: str
    name: str
    width_before: int
    width_after: int
    limit_before_w: float | None
    limit_after_w: float | None
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One round of the controller."""

    number: int
    at_s: float
    trigger: str
    plan_status: PlanStatus
    value: float
    bound: float | None
    power_w: float
    cap_w: float | None
    binding: tuple[str, ...]
    violations: Mapping[str, float]
    solve_s: float
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All that a step needs and gives back. Mappings are replaced, never changed in place.

    Attributes:
        jobs: By job id, ended ones included until retention removes them.
        leases: By lease id; released ones are dropped once the job's figures hold them.
        plan: Latest plan; None before the first.
        needs_decision: Why a decision is due, or an empty string.
        next_lease: Counter behind lease ids; never goes back.
        lease_prefix: Start of every lease id, chosen once per database so that ids of two
            databases never meet; letters, digits and hyphens.
    """

    nodes: Mapping[str, Node]
    tenants: Mapping[str, Tenant]
    policy: Policy
    jobs: Mapping[str, Job] = field(default_factory=dict)
    leases: Mapping[str, LeaseState] = field(default_factory=dict)
    estimates: Mapping[str, JobEstimate] = field(default_factory=dict)
    plan: Plan | None = None
    needs_decision: str = ""
    last_decision_s: float | None = None
    num_decisions: int = 0
    next_lease: int = 1
    lease_prefix: str = "l"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    """A valid job was accepted."""

    spec: JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """A job is to end. Repeating it changes nothing."""

    job_id: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReported:
    """A node said how it is."""

    report: AgentReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed."""


Event = JobSubmitted | CancelRequested | AgentReported | Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """Action: keep this decision for ``explain`` and the decision log."""

    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Action: keep one line of a job's story (phase changes, resizes, losses)."""

    at_s: float
    job_id: str
    reason: Reason


Action = Decided | Told
