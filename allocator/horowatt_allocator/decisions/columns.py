# SPDX-License-Identifier: Apache-2.0
"""The candidates of a job: legal widths x GPU types x power limits, and waiting.

What a job is offered depends on what it does:

- A job that holds no slots may wait, or start at any legal width that exists and that its tenant's
  quota allows.
- A running job is not offered waiting, nor another GPU type: its training state lives only in its
  workers, and nothing durable exists yet that could be resumed from.
- Within ``dwell_s`` of its last resize, and until the workers have trained at the published width,
  only that width; its power limit may change. A width that is planned but not published yet may still
  be withdrawn.
- A running job on a node that went silent is offered what it has, and nothing else.
"""

from collections.abc import Mapping
from itertools import pairwise

from horowatt_allocator.decisions.capacity import GpuType, gpu_types, limit_steps_w
from horowatt_allocator.decisions.estimates import Predictor
from horowatt_allocator.records.cluster import State
from horowatt_allocator.records.jobs import WAITING, Column, Job, JobEstimate, JobPhase

NOTHING_MEASURED = JobEstimate()


def columns_for(
    job: Job, state: State, now: float, types: Mapping[str, GpuType] | None = None
) -> tuple[Column, ...]:
    """Return the columns a job may be given now; empty for a job that stops or has ended.

    Args:
        job: The job.
        state: Everything else.
        now: Unix time, seconds.
        types: :func:`~horowatt_allocator.decisions.capacity.gpu_types` of the state, when the caller
            has it already.
    """
    types = gpu_types(state, now) if types is None else types
    if job.phase is JobPhase.QUEUED:
        return (WAITING, *_columns(job, state, types, allowed_types(job, types), job.spec.legal_widths))
    if job.phase is not JobPhase.RUNNING:
        return ()
    gpu_type = job.column.gpu_type
    if gpu_type is None or gpu_type not in types or on_silent_node(job, state):
        return (job.column,)
    offered = _columns(job, state, types, (gpu_type,), offered_widths(job, state, now))
    return offered or (job.column,)


def offered_widths(job: Job, state: State, now: float) -> tuple[int, ...]:
    """Return the widths a running job may be given now, ascending."""
    if resize_in_flight(job):
        return (job.width,)
    if job.column.width != job.width:
        return tuple(sorted({job.width, job.column.width}))
    if job.changed_s > 0 and now - job.changed_s < state.policy.dwell_s:
        return (job.width,)
    return tuple(sorted({*job.spec.legal_widths, job.width}))


def resize_in_flight(job: Job) -> bool:
    """Return whether the published width was not trained at yet."""
    return bool(job.generations) and job.generations[-1].first_step_end_s is None


def on_silent_node(job: Job, state: State) -> bool:
    """Return whether a lease of the job, or its launcher, is on a node that went silent."""
    nodes = {state.leases[lease_id].node for lease_id in job.lease_ids if lease_id in state.leases}
    if job.home_node is not None:
        nodes.add(job.home_node)
    return any(name in state.nodes and state.nodes[name].silent for name in nodes)


def allowed_types(job: Job, types: Mapping[str, GpuType]) -> tuple[str, ...]:
    """Return the GPU types that exist and that the job accepts."""
    accepted = job.spec.gpu_types
    return tuple(name for name in types if not accepted or name in accepted)


def fair_rate_per_s(
    job: Job, state: State, types: Mapping[str, GpuType], names: tuple[str, ...], fair_width: float
) -> float:
    """Return the rate of a job at its fair width: the unit in which the program values it.

    The fair width need not be legal or whole: the rate is interpolated, from 0 at width 0, on the legal
    widths of the type where that is fastest, and stays that of the widest beyond it. Samples per
    second, or nominal if never measured; 0 when no legal width exists.
    """
    best = 0.0
    for name in names:
        predictor = predictor_for(job, state, types[name])
        widths = [width for width in job.spec.legal_widths if width <= types[name].num_gpus]
        curve = [(0.0, 0.0), *((float(width), predictor.full_rate_per_s(width)) for width in widths)]
        best = max(best, _interpolate(curve, fair_width))
    return best


def predictor_for(job: Job, state: State, gpu_type: GpuType) -> Predictor:
    """Return the predictor of a job on a type from what the state has measured."""
    estimate = state.estimates.get(job.spec.job_id, NOTHING_MEASURED)
    return Predictor(job, estimate, gpu_type.gpu, state.policy)


def _columns(
    job: Job,
    state: State,
    types: Mapping[str, GpuType],
    names: tuple[str, ...],
    widths: tuple[int, ...],
) -> tuple[Column, ...]:
    tenant = state.tenants.get(job.spec.tenant)
    quota = tenant.gpu_quota if tenant is not None else None
    found: list[Column] = []
    for name in names:
        gpu_type = types[name]
        predictor = predictor_for(job, state, gpu_type)
        limits = limit_steps_w(gpu_type, state.policy)
        for width in widths:
            held = width <= max(job.width, 0)
            if width > gpu_type.num_gpus or (quota is not None and width > quota and not held):
                continue
            found.extend(predictor.column(width, limit_w) for limit_w in limits)
    return tuple(found)


def _interpolate(curve: list[tuple[float, float]], at: float) -> float:
    for (x0, y0), (x1, y1) in pairwise(curve):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return curve[-1][1]
