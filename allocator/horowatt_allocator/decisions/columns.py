# SPDX-License-Identifier: Apache-2.0
"""The candidates of a job: legal widths x GPU types x power limits, and waiting.

What a job is offered depends on what it does:

- A job that holds no slots may wait, or start at any legal width that exists and that its tenant's
  quota allows; only wait before its ``not_before_s``.
- A running job may be suspended when it has made a durable commit. It may be given another GPU type when
  old and new slots together make a legal width, or when it may be suspended.
- Within ``dwell_s`` of its last resize, and until the workers have trained at the published width,
  only that width; its power limit may change. What is planned but not published yet, or published but not
  joined yet, may still be withdrawn.
- A job whose growth failed is not grown before its ``grow_not_before_s``, and never on GPUs on which its
  workers failed a while ago.
- A running job on a node that went silent, or that holds slots of two types, is offered what it has.
"""

from collections.abc import Mapping
from itertools import pairwise

from horowatt.records import LauncherKind
from horowatt_allocator.decisions.capacity import GpuType, gpu_types, limit_steps_w
from horowatt_allocator.decisions.estimates import Predictor
from horowatt_allocator.decisions.resizing import (
    avoided_gpus,
    can_stop,
    has_dwelt,
    held_type,
    is_union,
    pending,
    union_width,
)
from horowatt_allocator.records.cluster import State
from horowatt_allocator.records.jobs import WAITING, Column, Job, JobEstimate, JobPhase

HOROWATT = LauncherKind.HOROWATT
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
        if now < job.not_before_s:
            return (WAITING,)
        names = allowed_types(job, types)
        return (WAITING, *_columns(job, state, types, names, job.spec.legal_widths, now))
    if job.phase is not JobPhase.RUNNING:
        return ()
    gpu_type = held_type(job, state.leases) or job.column.gpu_type
    if gpu_type is None or gpu_type not in types:
        return (job.column,)
    if on_silent_node(job, state) or is_union(job, state.leases):
        return (job.column,)
    offered = _columns(job, state, types, (gpu_type,), offered_widths(job, state, now), now)
    offered += _elsewhere(job, state, types, gpu_type, now)
    if may_be_suspended(job, state, now):
        offered = (WAITING, *offered)
    return offered or (job.column,)


def offered_widths(job: Job, state: State, now: float) -> tuple[int, ...]:
    """Return the widths a running job may be given now on its present GPU type, ascending."""
    legal = sorted({*job.spec.legal_widths, job.width})
    if resize_in_flight(job):
        joined = job.width - len(pending(job, state.leases))
        return tuple(width for width in legal if joined <= width <= job.width)
    if _is_moving(job, state):
        return (job.width,)
    if job.column.width != job.width:
        return tuple(sorted({job.width, job.column.width}))
    if job.changed_s > 0 and now - job.changed_s < state.policy.dwell_s:
        return (job.width,)
    return tuple(width for width in legal if width <= job.width or now >= job.grow_not_before_s)


def may_be_suspended(job: Job, state: State, now: float) -> bool:
    """Return whether waiting is a choice for a running job."""
    settled = not resize_in_flight(job) and job.column.width == job.width and not _is_moving(job, state)
    return settled and can_stop(job) and has_dwelt(job, state.policy, now)


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
    return Predictor(job, _estimate(job, state), gpu_type.gpu, state.policy)


def _is_moving(job: Job, state: State) -> bool:
    """Return whether the plan names another GPU type than the one that the job is on."""
    return job.column.gpu_type != held_type(job, state.leases)


def _elsewhere(
    job: Job, state: State, types: Mapping[str, GpuType], present: str, now: float
) -> tuple[Column, ...]:
    """Return the columns of a running job on other GPU types than the present one."""
    if _is_moving(job, state):
        target = job.column.gpu_type
        if target is None or target not in types:
            return ()
        return _columns(job, state, types, (target,), (job.column.width,), now)
    settled = not resize_in_flight(job) and has_dwelt(job, state.policy, now)
    measured = any(o.gpu_type == present for o in _estimate(job, state).observations)
    if not settled or not measured or now < job.grow_not_before_s or job.column.width != job.width:
        return ()
    names = tuple(name for name in allowed_types(job, types) if name != present)
    widths = tuple(
        width
        for width in job.spec.legal_widths
        if can_stop(job) or (union_width(job, width) is not None and job.spec.launcher is HOROWATT)
    )
    return _columns(job, state, types, names, widths, now)


def _estimate(job: Job, state: State) -> JobEstimate:
    return state.estimates.get(job.spec.job_id, NOTHING_MEASURED)


def _columns(
    job: Job,
    state: State,
    types: Mapping[str, GpuType],
    names: tuple[str, ...],
    widths: tuple[int, ...],
    now: float,
) -> tuple[Column, ...]:
    tenant = state.tenants.get(job.spec.tenant)
    quota = tenant.gpu_quota if tenant is not None else None
    found: list[Column] = []
    for name in names:
        gpu_type = types[name]
        predictor = predictor_for(job, state, gpu_type)
        limits = limit_steps_w(gpu_type, state.policy)
        reachable = gpu_type.num_gpus - _num_avoided(job, state, name, now)
        for width in widths:
            held = width <= max(job.width, 0)
            beyond = width > reachable or (quota is not None and width > quota)
            if width > gpu_type.num_gpus or (beyond and not held):
                continue
            found.extend(predictor.column(width, limit_w) for limit_w in limits)
    return tuple(found)


def _num_avoided(job: Job, state: State, gpu_type: str, now: float) -> int:
    """Return how many GPUs of a type the job neither holds nor is given, since its workers failed there."""
    avoided = avoided_gpus(job, now)
    if not avoided:
        return 0
    own = {state.leases[lease_id].gpu_uuid for lease_id in job.lease_ids if lease_id in state.leases}
    uuids = {gpu.uuid for node in state.nodes.values() for gpu in node.gpus if gpu.gpu_type == gpu_type}
    return len((avoided & uuids) - own)


def _interpolate(curve: list[tuple[float, float]], at: float) -> float:
    for (x0, y0), (x1, y1) in pairwise(curve):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return curve[-1][1]
