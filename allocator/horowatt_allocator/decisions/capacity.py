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
BLAMED_BY = 2
"""Jobs whose workers must have failed on a GPU before nobody is given it."""
OWN_FAULT = 3
"""A job whose workers failed on so many GPUs blames none of them: it would fail anywhere."""


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

    GPUs of silent nodes, lost GPUs, slots that an old worker does not leave and GPUs that are not granted
    (see :func:`withheld`) count only as long as a running job holds them. A GPU whose node has only just
    said that it is busy counts: it mostly is not for long, after a worker has left.
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
    blamed = _blamed(state, now)
    by_type: dict[str, list[Gpu]] = {}
    for name, node in state.nodes.items():
        alive = is_alive(node, now, state.policy)
        for gpu in node.gpus:
            place = (name, gpu.uuid)
            usable = not gpu.lost and place not in stuck and gpu.uuid not in blamed
            if place in held or (alive and usable and not is_long_busy(gpu, now)):
                by_type.setdefault(gpu.gpu_type, []).append(gpu)
    return {name: _summary(by_type[name]) for name in sorted(by_type)}


def free_slots(state: State, now: float) -> list[Slot]:
    """Return the slots that may be granted, in inventory order: free, on nodes that are alive."""
    blamed = _blamed(state, now)
    taken = {(lease.node, lease.gpu_uuid) for lease in state.leases.values() if lease.released_s is None}
    return [
        Slot(node=name, gpu=gpu)
        for name, node in state.nodes.items()
        if is_alive(node, now, state.policy)
        for gpu in node.gpus
        if not (gpu.lost or gpu.busy or gpu.uuid in blamed or (name, gpu.uuid) in taken)
    ]


def withheld(state: State, now: float) -> dict[tuple[str, str], str]:
    """Return why GPUs that nobody holds are not granted, by (node, UUID), as half a sentence."""
    taken = {(lease.node, lease.gpu_uuid) for lease in state.leases.values() if lease.released_s is None}
    blamed = _blamed(state, now)
    found = {}
    for name, node in state.nodes.items():
        for gpu in node.gpus:
            if (name, gpu.uuid) in taken:
                continue
            if gpu.busy:
                found[name, gpu.uuid] = gpu.busy
            elif gpu.uuid in blamed:
                jobs, until_s = blamed[gpu.uuid]
                minutes = max(1, round((until_s - now) / 60))
                found[name, gpu.uuid] = f"workers of {jobs} jobs failed on it; avoided for {minutes} min"
    return found


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


def _blamed(state: State, now: float) -> dict[str, tuple[int, float]]:
    """Return the GPUs that several jobs blame: by how many, and until when, Unix seconds."""
    blamed: dict[str, list[float]] = {}
    for job in state.jobs.values():
        failed = {uuid: f.until_s for uuid, f in job.failed_gpus.items() if now < f.until_s}
        if len(failed) < OWN_FAULT:
            for uuid, until_s in failed.items():
                blamed.setdefault(uuid, []).append(until_s)
    # The GPU is tried again as soon as one job too few blames it.
    return {
        uuid: (len(untils), sorted(untils)[-BLAMED_BY])
        for uuid, untils in blamed.items()
        if len(untils) >= BLAMED_BY
    }


def is_long_busy(gpu: Gpu, now: float) -> bool:
    """Return whether a GPU has been busy for so long that it is not planned with."""
    return gpu.busy_since_s is not None and now - gpu.busy_since_s > STUCK_AFTER_S


def _summary(gpus: list[Gpu]) -> GpuType:
    idles = [gpu.idle_w for gpu in gpus if gpu.idle_w is not None]
    lows = [gpu.min_limit_w for gpu in gpus if gpu.min_limit_w is not None]
    highest = min(gpus, key=highest_limit_w)
    gpu = replace(highest, idle_w=fmean(idles) if idles else None, min_limit_w=_largest(lows), lost=False)
    return GpuType(num_gpus=len(gpus), gpu=gpu, all_settable=all(gpu.can_set_limit for gpu in gpus))


def _largest(values: Iterable[float]) -> float | None:
    return max(values, default=None)
