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
from horowatt_allocator.decisions.estimates import Predictor, expected_pause_s, idle_w, same_limit
from horowatt_allocator.decisions.problem import Candidate, JobChoice, Problem
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
    names = {job.spec.job_id: _usable_types(job, types) for job in jobs}
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
    return Problem(
        jobs=tuple(choices),
        gpus={name: gpu_type.num_gpus for name, gpu_type in types.items()},
        idle_w=sum(gpu_type.num_gpus * idle_w(gpu_type.gpu) for gpu_type in types.values()),
        cap_w=state.policy.cap_w,
        quotas={
            name: tenant.gpu_quota
            for name, tenant in state.tenants.items()
            if tenant.gpu_quota is not None and any(choice.tenant == name for choice in choices)
        },
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
    waited_s = now - job.spec.submitted_at_s
    impatient = job.spec.deadline_s is not None or waited_s >= state.policy.max_wait_s
    return JobChoice(
        job_id=job.spec.job_id,
        tenant=job.spec.tenant,
        weight=weight,
        fair_rate_per_s=fair_rate_per_s(job, state, types, names, fair_width),
        candidates=tuple(_candidate(job, state, predictors, column) for column in columns),
        present=job.column,
        needed_rate_per_s=needed_rate_per_s(job, now) if measured else None,
        must_run=job.phase is JobPhase.QUEUED and can_run and impatient,
    )


def _candidate(job: Job, state: State, predictors: Mapping[str, Predictor], column: Column) -> Candidate:
    predictor = predictors.get(column.gpu_type or "")
    planned = column.rate_per_s if predictor is None else predictor.planned_rate_per_s(column)
    pause_s = 0.0
    if job.phase is JobPhase.RUNNING and column.width != job.width:
        estimate = state.estimates.get(job.spec.job_id, NOTHING_MEASURED)
        pause_s = expected_pause_s(estimate, state.policy)
    elif job.phase is JobPhase.RUNNING and not same_limit(column.limit_w, job.column.limit_w):
        pause_s = LIMIT_CHANGE_S
    return Candidate(column=column, planned_rate_per_s=planned, pause_s=pause_s)


def _usable_types(job: Job, types: Mapping[str, GpuType]) -> tuple[str, ...]:
    """Return the types a job competes for: a running one only for the type that it is on."""
    present = job.column.gpu_type
    if job.phase is JobPhase.RUNNING and present is not None and present in types:
        return (present,)
    return allowed_types(job, types)


def _weight(job: Job, state: State) -> float:
    tenant = state.tenants.get(job.spec.tenant)
    return job.spec.weight * (tenant.weight if tenant is not None else 1.0)
