# SPDX-License-Identifier: Apache-2.0
"""The state of a cluster as a problem for the program."""

from collections.abc import Mapping, Sequence

from horowatt_allocator.decisions.capacity import GpuType
from horowatt_allocator.decisions.columns import (
    NOTHING_MEASURED,
    allowed_types,
    columns_for,
    fair_rate_per_s,
    predictor_for,
)
from horowatt_allocator.decisions.deadlines import needed_rate_per_s
from horowatt_allocator.decisions.estimates import (
    Predictor,
    expected_pause_s,
    idle_w,
    pause_kind,
    same_limit,
)
from horowatt_allocator.decisions.problem import Candidate, JobChoice, Problem
from horowatt_allocator.decisions.resizing import (
    can_move,
    held_type,
    is_union,
    overlap,
    stop_cost_s,
    union_width,
    waits_since_s,
)
from horowatt_allocator.records.cluster import State
from horowatt_allocator.records.jobs import Column, Job, JobPhase

LIMIT_CHANGE_S = 1.0
"""Training that a change of the power limit is charged with: it takes no pause, but measuring begins anew."""


def active_jobs(state: State) -> list[Job]:
    """Return the jobs the program decides on, in the order of their submission."""
    jobs = [job for job in state.jobs.values() if job.phase in {JobPhase.QUEUED, JobPhase.RUNNING}]
    return sorted(jobs, key=lambda job: (job.spec.submitted_at_s, job.spec.job_id))


def pose(state: State, types: Mapping[str, GpuType], jobs: Sequence[Job], now: float) -> Problem:
    """Return the problem of this moment.

    Args:
        state: Everything that is known.
        types: GPUs that may be planned with.
        jobs: :func:`active_jobs` of the state.
        now: Unix time, seconds.
    """
    names = {job.spec.job_id: _usable_types(job, state, types) for job in jobs}
    weights = {job.spec.job_id: _weight(job, state) for job in jobs}
    demand = dict.fromkeys(types, 0.0)
    for job_id, weight in weights.items():
        for name in names[job_id]:
            demand[name] += weight
    choices = []
    for job in jobs:
        job_id = job.spec.job_id
        own_share = {name: weights[job_id] / demand[name] for name in names[job_id]}
        fair_width = sum(share * types[name].num_gpus for name, share in own_share.items())
        choices.append(_choice(job, state, types, now, names[job_id], weights[job_id], fair_width))
    gpus = {name: gpu_type.num_gpus for name, gpu_type in types.items()}
    quotas = {
        name: tenant.gpu_quota
        for name, tenant in state.tenants.items()
        if tenant.gpu_quota is not None and any(choice.tenant == name for choice in choices)
    }
    overlaps = overlap(state)
    for job_id, (count, _) in overlaps.items():
        job = state.jobs[job_id]
        gpu_type = held_type(job, state.leases)
        if gpu_type in gpus:
            gpus[gpu_type] -= count
        if job.spec.tenant in quotas:
            quotas[job.spec.tenant] -= count
    idle = sum(gpu_type.num_gpus * idle_w(gpu_type.gpu) for gpu_type in types.values())
    return Problem(
        jobs=tuple(choices),
        gpus=gpus,
        idle_w=idle + sum(watts for _, watts in overlaps.values()),
        cap_w=state.policy.cap_w,
        quotas=quotas,
        objective=state.policy.objective,
        alpha=state.policy.alpha,
        horizon_s=state.policy.horizon_s,
    )


def _choice(
    job: Job,
    state: State,
    types: Mapping[str, GpuType],
    now: float,
    names: tuple[str, ...],
    weight: float,
    fair_width: float,
) -> JobChoice:
    columns = columns_for(job, state, now, types)
    predictors = {name: predictor_for(job, state, types[name]) for name in names}
    measured = not all(column.nominal or column.width == 0 for column in columns)
    can_run = any(column.width > 0 for column in columns)
    if job.phase is JobPhase.QUEUED:
        impatient = can_run and now - waits_since_s(job) >= state.policy.max_wait_s
    else:
        # Who waited long runs as long before it is suspended, so that jobs take turns and do not thrash.
        impatient = now < (job.attempt_s or 0.0) + min(job.waited_s, state.policy.max_wait_s)
    return JobChoice(
        job_id=job.spec.job_id,
        tenant=job.spec.tenant,
        weight=weight,
        fair_rate_per_s=fair_rate_per_s(job, state, types, names, fair_width),
        candidates=tuple(_candidate(job, state, predictors, column, now) for column in columns),
        present=job.column,
        needed_rate_per_s=needed_rate_per_s(job, now) if measured else None,
        must_run=impatient or (can_run and job.spec.deadline_s is not None),
    )


def _candidate(
    job: Job, state: State, predictors: Mapping[str, Predictor], column: Column, now: float
) -> Candidate:
    def planned(of: Column) -> float:
        predictor = predictors.get(of.gpu_type or "")
        return of.rate_per_s if predictor is None else predictor.planned_rate_per_s(of)

    if job.phase is not JobPhase.RUNNING:
        return Candidate(column=column, planned_rate_per_s=planned(column))
    estimate = state.estimates.get(job.spec.job_id, NOTHING_MEASURED)
    if column.width == 0:
        stop_s = stop_cost_s(job, estimate, state.policy, now)
        return Candidate(column=column, planned_rate_per_s=planned(job.column), pause_s=stop_s)
    if column.gpu_type != held_type(job, state.leases) and not is_union(job, state.leases):
        rate = planned(column)
        if all(o.gpu_type != column.gpu_type for o in estimate.observations):
            # A type is not worth a move for what is only assumed of it.
            rate = min(rate, column.low_rate_per_s)
        if union_width(job, column.width) is None:
            pause_s = stop_cost_s(job, estimate, state.policy, now)
        else:
            pause_s = 2 * expected_pause_s(estimate, state.policy)
        return Candidate(column=column, planned_rate_per_s=rate, pause_s=pause_s)
    if column.width == job.width or is_union(job, state.leases):
        pause_s = 0.0 if same_limit(column.limit_w, job.column.limit_w) else LIMIT_CHANGE_S
    else:
        pause_s = expected_pause_s(estimate, state.policy, pause_kind(job, column.width))
    return Candidate(column=column, planned_rate_per_s=planned(column), pause_s=pause_s)


def _usable_types(job: Job, state: State, types: Mapping[str, GpuType]) -> tuple[str, ...]:
    """Return the types a job competes for: one that cannot move only for the type that it is on."""
    present = held_type(job, state.leases) or job.column.gpu_type
    if job.phase is JobPhase.RUNNING and present in types and not can_move(job):
        return (present,) if present is not None else ()
    accepted = allowed_types(job, types)
    own = [present] if present in types and present is not None and present not in accepted else []
    return (*own, *accepted)


def _weight(job: Job, state: State) -> float:
    tenant = state.tenants.get(job.spec.tenant)
    return job.spec.weight * (tenant.weight if tenant is not None else 1.0)
