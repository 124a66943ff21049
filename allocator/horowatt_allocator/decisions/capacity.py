# SPDX-License-Identifier: Apache-2.0
"""Which slots there are: what may be planned with, and what is free this moment."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from horowatt_allocator.decisions.estimates import highest_limit_w
from horowatt_allocator.records.cluster import Gpu, Node, Policy, State
from horowatt_allocator.records.jobs import JobPhase, LeaseState

STUCK_AFTER_S = 60.0
"""A slot that its old worker does not leave within this time is no longer planned with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place for one worker."""

    node: str
    gpu: Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuType:
    """A GPU type as the program sees it.

    Attributes:
        num_gpus: GPUs that may be planned with: alive, or held by a running job wherever they are.
        gpu: Stands for all of them: mean idle power, narrowest range of limits.
        all_settable: True when the limit of every one can be set.
    """

    num_gpus: int
    gpu: Gpu
    all_settable: bool


def is_alive(node: Node, now: float, policy: Policy) -> bool:
    """Return whether the node reported within ``agent_timeout_s`` before ``now``."""
    return node.last_seen_s is not None and now - node.last_seen_s <= policy.agent_timeout_s


def gpu_types(state: State, now: float) -> dict[str, GpuType]:
    """Return the GPU types that may be planned with, by name.

    GPUs of silent nodes, lost GPUs and slots that an old worker does not leave count only as long as
    a running job holds them.
    """
    held = {
        (lease.node, lease.gpu_uuid)
        for lease in state.leases.values()
        if lease.withdrawn_s is None
        and lease.job_id in state.jobs
        and state.jobs[lease.job_id].phase is JobPhase.RUNNING
    }
    stuck = {
        (lease.node, lease.gpu_uuid)
        for lease in state.leases.values()
        if lease.withdrawn_s is not None and now - lease.withdrawn_s > STUCK_AFTER_S
    }
    by_type: dict[str, list[Gpu]] = {}
    for name, node in state.nodes.items():
        alive = is_alive(node, now, state.policy)
        for gpu in node.gpus:
            place = (name, gpu.uuid)
            if place in held or (alive and not gpu.lost and place not in stuck):
                by_type.setdefault(gpu.gpu_type, []).append(gpu)
    return {name: _summary(by_type[name]) for name in sorted(by_type)}


def free_slots(state: State, now: float) -> list[Slot]:
    """Return the slots without an unreleased lease, on nodes that are alive, in inventory order."""
    taken = {(lease.node, lease.gpu_uuid) for lease in state.leases.values() if lease.released_s is None}
    return [
        Slot(node=name, gpu=gpu)
        for name, node in state.nodes.items()
        if is_alive(node, now, state.policy)
        for gpu in node.gpus
        if not gpu.lost and (name, gpu.uuid) not in taken
    ]


def leases_by_job(leases: Mapping[str, LeaseState]) -> dict[str, list[LeaseState]]:
    """Return the unreleased leases of each job that has any."""
    grouped: dict[str, list[LeaseState]] = {}
    for lease in leases.values():
        if lease.released_s is None:
            grouped.setdefault(lease.job_id, []).append(lease)
    return grouped


def limit_steps_w(gpu_type: GpuType, policy: Policy) -> tuple[float | None, ...]:
    """Return the power limits offered on a type, W, highest first; ``(None,)`` when none can be set."""
    if not gpu_type.all_settable or not policy.limit_steps:
        return (None,)
    highest_w = highest_limit_w(gpu_type.gpu)
    lowest_w = gpu_type.gpu.min_limit_w or 0.0
    steps = {float(round(min(highest_w, max(lowest_w, share * highest_w)))) for share in policy.limit_steps}
    return tuple(sorted(steps, reverse=True))


def _summary(gpus: list[Gpu]) -> GpuType:
    idles = [gpu.idle_w for gpu in gpus if gpu.idle_w is not None]
    lows = [gpu.min_limit_w for gpu in gpus if gpu.min_limit_w is not None]
    highest = min(gpus, key=highest_limit_w)
    gpu = replace(highest, idle_w=fmean(idles) if idles else None, min_limit_w=_largest(lows), lost=False)
    return GpuType(num_gpus=len(gpus), gpu=gpu, all_settable=all(gpu.can_set_limit for gpu in gpus))


def _largest(values: Iterable[float]) -> float | None:
    return max(values, default=None)
