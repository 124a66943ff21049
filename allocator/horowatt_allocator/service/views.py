# SPDX-License-Identifier: Apache-2.0
"""What callers get to see: JSON documents made from the state. Units stand in the names; null is absent.

A caller sees the jobs of its own Unix user; an operator sees all. What is shown of others is only
that a GPU is busy and what the cluster draws as a whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from horowatt.errors import InvalidInput, NotFound
from horowatt_allocator.decisions.capacity import withheld
from horowatt_allocator.decisions.columns import columns_for
from horowatt_allocator.decisions.estimates import expected_pause_s
from horowatt_allocator.decisions.timeline import CLOCK_OFF_S, offset_s, resize_stories
from horowatt_allocator.records.cluster import Decision, Gpu, Node, State, Told
from horowatt_allocator.records.jobs import ENDED, Column, Generation, Job, JobEstimate, PauseKind
from horowatt_allocator.service.identity import Caller

SCHEMA_VERSION = 1
Document = dict[str, object]

_MAX_NAMED = 5


def may_see(caller: Caller | None, job: Job) -> bool:
    """Tell whether a caller may see and touch a job; None is an anonymous caller."""
    return caller is not None and (caller.operator or caller.uid == job.spec.uid)


def find_job(state: State, ref: str, caller: Caller) -> Job:
    """Return the job that a caller means by an id, the unique start of an id, or a unique name.

    A name means the job of that name that has not ended, or the only one that there ever was.

    Raises:
        NotFound: ``HW-API-010`` no such job, or not the caller's: that is not told apart.
        InvalidInput: ``HW-API-011`` several jobs are meant.
    """
    job = state.jobs.get(ref)
    if job is not None and may_see(caller, job):
        return job
    mine = [job for job in state.jobs.values() if may_see(caller, job)]
    named = [job for job in mine if job.spec.name == ref]
    active = [job for job in named if job.phase not in ENDED]
    for found in (active, named, [job for job in mine if ref and job.spec.job_id.startswith(ref)]):
        if len(found) == 1:
            return found[0]
        if found:
            ids = ", ".join(job.spec.job_id for job in found[-_MAX_NAMED:])
            raise InvalidInput(
                "HW-API-011",
                f"{ref!r} means {len(found)} jobs",
                because=f"among them {ids}",
                hint="name one by its whole id",
                fields={"job": ref},
            )
    raise NotFound(
        "HW-API-010",
        f"there is no job {ref!r}",
        because="or it belongs to another user",
        hint="'horowatt ps --all' lists your jobs",
        fields={"job": ref},
    )


def job_view(state: State, job: Job, energy_j: float | None) -> Document:
    """Return one job.

    Args:
        energy_j: Joules booked on it so far; None when none was measured.
    """
    spec = job.spec
    leases = [state.leases[lease_id] for lease_id in job.lease_ids if lease_id in state.leases]
    nodes = list(dict.fromkeys(lease.node for lease in leases))
    job_dir = _job_dir(state, job)
    return {
        "job_id": spec.job_id,
        "name": spec.name,
        "tenant": spec.tenant,
        "user": spec.username,
        "phase": job.phase.value,
        "width": job.width,
        "target_width": job.column.width,
        "legal_widths": list(spec.legal_widths),
        "gpu_type": leases[0].gpu_type if leases else job.column.gpu_type,
        "limit_w": job.column.limit_w,
        "generation": job.generation,
        "attempt": job.attempt,
        "restarts": job.restarts,
        "home_node": job.home_node,
        "nodes": nodes,
        "rate_per_s": None if job.phase in ENDED else job.rate_per_s,
        "power_w": None if job.phase in ENDED else job.power_w,
        "energy_j": energy_j,
        "samples": job.samples,
        "total_samples": job.total_samples,
        "remaining_samples": job.remaining_samples,
        "deadline_s": spec.deadline_s,
        "submitted_at_s": spec.submitted_at_s,
        "started_s": job.started_s,
        "ended_s": job.ended_s,
        "exit_code": job.exit_code,
        "reason": {"code": job.reason.code, "sentence": job.reason.sentence},
        "simulated": any(lease.simulated for lease in leases) or _home_simulated(state, job),
        "loopback": all(
            node.spec.address == "localhost" or node.spec.address.startswith("127.")
            for node in state.nodes.values()
        ),
        "isolated": all(state.nodes[node].isolated for node in nodes if node in state.nodes)
        if nodes
        else None,
        "launcher": spec.launcher.value,
        "command": list(spec.command),
        "working_dir": spec.working_dir,
        "virtual_env": spec.virtual_env,
        "weight": spec.weight,
        "flexibility": spec.flexibility,
        "pauses_s": [generation.pause_s for generation in job.generations],
        "generations": [_generation(generation) for generation in job.generations],
        "cold": job.cold or None,
        "last_commit_s": job.last_commit_s,
        "num_commits": job.num_commits,
        "suspended_since_s": job.suspension.since_s if job.suspension else None,
        "suspended_why": job.suspension.why if job.suspension else None,
        "not_before_s": job.not_before_s or None,
        "grow_not_before_s": job.grow_not_before_s or None,
        "moving_from": job.leaving.gpu_type if job.leaving else None,
        "job_dir": job_dir,
        "discovery_script": None if job_dir is None else f"{job_dir}/discover.sh",
    }


def job_details(state: State, job: Job, energy_j: float | None) -> Document:
    """Return one job with the timeline of its latest resizes, which lists of jobs leave out."""
    return {
        **job_view(state, job, energy_j),
        "resizes": [asdict(story) for story in resize_stories(job)],
    }


def _generation(generation: Generation) -> Document:
    return {
        "number": generation.number,
        "width": generation.width,
        "gpu_type": generation.gpu_type,
        "limit_w": generation.limit_w,
        "published_s": generation.published_s,
        "first_step_end_s": generation.first_step_end_s,
        "pause_s": generation.pause_s,
        "ended_s": generation.ended_s,
        "samples": generation.samples,
    }


def _home_simulated(state: State, job: Job) -> bool:
    node = state.nodes.get(job.home_node or "")
    if node is not None:
        return any(gpu.simulated for gpu in node.gpus)
    # An ended job has no node any more; it ran on GPUs of a type, and all of a type are alike.
    types = {generation.gpu_type for generation in job.generations}
    return any(gpu.simulated for node in state.nodes.values() for gpu in node.gpus if gpu.gpu_type in types)


def _job_dir(state: State, job: Job) -> str | None:
    node = state.nodes.get(job.home_node or "")
    run_dir = None if node is None else node.notes.get("run_dir")
    return None if run_dir is None else f"{run_dir}/jobs/{job.spec.job_id}"


def job_explanation(
    state: State,
    job: Job,
    energy_j: float | None,
    story: Sequence[Told],
    decisions: Sequence[Decision],
    caller: Caller,
    now_s: float,
) -> Document:
    """Return one job with why it is as it is: its story, its measurements, the decisions about it."""
    estimate = state.estimates.get(job.spec.job_id)
    queued = sorted(
        (other for other in state.jobs.values() if other.phase not in ENDED and other.width == 0),
        key=lambda other: (other.spec.submitted_at_s, other.spec.job_id),
    )
    position = next((n for n, other in enumerate(queued, start=1) if other is job), None)
    return {
        "schema_version": SCHEMA_VERSION,
        "job": job_details(state, job, energy_j),
        "reason": {"code": job.reason.code, "sentence": job.reason.sentence},
        "queue_position": position,
        "queue_length": len(queued),
        "plan": _plan(state, job, caller),
        "columns": [
            {**_column(column), "chosen": _same(column, job.column)}
            for column in columns_for(job, state, now_s)
        ],
        "observations": [] if estimate is None else [asdict(item) for item in estimate.observations],
        "pauses_s": [] if estimate is None else list(estimate.pauses_s),
        "expected_pauses_s": {
            kind.value: expected_pause_s(estimate or JobEstimate(), state.policy, kind) for kind in PauseKind
        },
        "story": [
            {"at_s": told.at_s, "code": told.reason.code, "sentence": told.reason.sentence} for told in story
        ],
        "decisions": [
            {**decision_view(decision, state, caller), "changes": [asdict(change)]}
            for decision in decisions
            for change in decision.changes
            if change.job_id == job.spec.job_id
        ],
    }


def _plan(state: State, job: Job, caller: Caller) -> Document | None:
    if state.plan is None or job.spec.job_id not in state.plan.columns:
        return None
    return {
        "column": _column(state.plan.columns[job.spec.job_id]),
        "status": state.plan.status.value,
        "gap_ratio": state.plan.gap,
        "binding": _visible_rows(state.plan.binding, state, caller),
        "power_w": state.plan.power_w,
        "solver": state.plan.solver,
    }


def _column(column: Column) -> Document:
    # The rates of a job that was never measured are on a nominal scale and no samples per second.
    rates = (None, None, None) if column.nominal else (
        column.rate_per_s,
        column.low_rate_per_s,
        column.high_rate_per_s,
    )  # fmt: skip
    return {
        "gpu_type": column.gpu_type,
        "width": column.width,
        "limit_w": column.limit_w,
        "rate_per_s": rates[0],
        "low_rate_per_s": rates[1],
        "high_rate_per_s": rates[2],
        "held_w": column.held_w,
        "measured": not column.nominal,
    }


def _same(column: Column, other: Column) -> bool:
    return (column.gpu_type, column.width, column.limit_w) == (other.gpu_type, other.width, other.limit_w)


def decision_view(decision: Decision, state: State, caller: Caller) -> Document:
    """Return one decision; of the changes only those of jobs that the caller may see.

    Names of rows can hold names of tenants, so that only an operator gets them all.
    """
    changes = [
        asdict(change)
        for change in decision.changes
        if caller.operator or (change.job_id in state.jobs and may_see(caller, state.jobs[change.job_id]))
    ]
    rows = set(_visible_rows((*decision.binding, *decision.violations), state, caller))
    return {
        "number": decision.number,
        "at_s": decision.at_s,
        "trigger": decision.trigger,
        "plan_status": decision.plan_status.value,
        "value": decision.value,
        "bound": decision.bound,
        "power_w": decision.power_w,
        "cap_w": decision.cap_w,
        "binding": [row for row in decision.binding if row in rows],
        "violations": {row: amount for row, amount in decision.violations.items() if row in rows},
        "solve_s": decision.solve_s,
        "changes": changes,
    }


def _visible_rows(rows: Sequence[str], state: State, caller: Caller) -> list[str]:
    if caller.operator:
        return list(rows)
    own = {job.spec.tenant for job in state.jobs.values() if may_see(caller, job)}
    foreign = {job.spec.job_id for job in state.jobs.values() if not may_see(caller, job)}
    foreign |= set(state.tenants) - own
    return [row for row in rows if not any(name in row for name in foreign)]


def node_view(state: State, node: Node, caller: Caller | None, now_s: float) -> Document:
    """Return one node with its GPUs."""
    notes = {code: text for code, text in node.notes.items() if code != "run_dir"}
    holders = {
        lease.gpu_uuid: lease.job_id
        for lease in state.leases.values()
        if lease.node == node.spec.name and lease.released_s is None
    }
    reasons = withheld(state, now_s)
    return {
        "name": node.spec.name,
        "address": node.spec.address,
        "state": node_state(node),
        "last_seen_s": node.last_seen_s,
        "clock_off_s": _clock_off_s(state, node),
        "silent_for_s": None if node.last_seen_s is None else max(0.0, now_s - node.last_seen_s),
        "isolated": node.isolated,
        "expected_gpus": node.spec.num_gpus,
        "base_w": node.spec.base_w,
        "simulated": node.spec.simulated or any(gpu.simulated for gpu in node.gpus),
        "run_dir": node.notes.get("run_dir") if caller is not None else None,
        "notes": notes if caller is not None and caller.operator else {},
        "gpus": [
            {
                **_gpu_view(state, gpu, holders.get(gpu.uuid), caller),
                "withheld": reasons.get((node.spec.name, gpu.uuid)),
            }
            for gpu in node.gpus
        ],
    }


def _clock_off_s(state: State, node: Node) -> float | None:
    """Return by how much a node's clock is behind the head's (ahead: below 0), seconds.

    None when it has not reported, or when it is not off by more than a second. Its jobs know it best;
    the latest report alone can only say too much.
    """
    if node.last_seen_s is None or node.sent_at_s is None:
        return None
    name = node.spec.name
    known = [
        offset_s(job, name) for job in state.jobs.values() if job.phase not in ENDED and name in job.clocks
    ]
    off_s = min([node.last_seen_s - node.sent_at_s, *known])
    return off_s if abs(off_s) > CLOCK_OFF_S else None


def node_state(node: Node) -> str:
    """Return ``unseen``, ``up`` or ``silent``."""
    if node.last_seen_s is None:
        return "unseen"
    return "silent" if node.silent else "up"


def _gpu_view(state: State, gpu: Gpu, job_id: str | None, caller: Caller | None) -> Document:
    job = state.jobs.get(job_id or "")
    return {
        "uuid": gpu.uuid,
        "nvml_index": gpu.nvml_index,
        "gpu_type": gpu.gpu_type,
        "simulated": gpu.simulated,
        "power_w": gpu.power_w,
        "idle_w": gpu.idle_w,
        "limit_w": gpu.limit_w,
        "default_limit_w": gpu.default_limit_w,
        "min_limit_w": gpu.min_limit_w,
        "max_limit_w": gpu.max_limit_w,
        "can_set_limit": gpu.can_set_limit,
        "energy_j": gpu.energy_j,
        "lost": gpu.lost,
        "sampled_at_s": gpu.sampled_at_s,
        "busy": job_id is not None,
        "job_id": job_id if job is not None and may_see(caller, job) else None,
    }


def cluster_view(state: State, name: str) -> Document:
    """Return the cluster as a whole; nothing in it names a tenant or a job."""
    gpus = [gpu for node in state.nodes.values() for gpu in node.gpus]
    measured = [gpu.power_w for gpu in gpus if gpu.power_w is not None]
    busy = {(lease.node, lease.gpu_uuid) for lease in state.leases.values() if lease.released_s is None}
    phases: dict[str, int] = {}
    for job in state.jobs.values():
        phases[job.phase.value] = phases.get(job.phase.value, 0) + 1
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "num_nodes": len(state.nodes),
        "num_nodes_up": sum(node_state(node) == "up" for node in state.nodes.values()),
        "num_gpus": len(gpus),
        "num_gpus_busy": sum(
            (node.spec.name, gpu.uuid) in busy for node in state.nodes.values() for gpu in node.gpus
        ),
        "num_gpus_measured": len(measured),
        "power_w": sum(measured) if measured else None,
        "planned_power_w": None if state.plan is None else state.plan.power_w,
        "cap_w": state.policy.cap_w,
        "objective": state.policy.objective.value,
        "alpha": state.policy.alpha,
        "jobs": phases,
        "num_decisions": state.num_decisions,
        "last_decision_s": state.last_decision_s,
        "simulated": any(gpu.simulated for gpu in gpus),
    }


def log_ended(state: State, job: Job) -> bool:
    """Tell whether nothing more of a job's log will come.

    That is so once it has ended and every node that has a folder of it says that it sent all, or is
    silent.
    """
    if job.phase not in ENDED:
        return False
    return all(
        job.spec.job_id not in node.job_ids or job.spec.job_id in node.drained_job_ids or node.silent
        for node in state.nodes.values()
    )


def listing(key: str, items: Sequence[Mapping[str, object]]) -> Document:
    """Return a list as a document."""
    return {"schema_version": SCHEMA_VERSION, key: list(items)}
