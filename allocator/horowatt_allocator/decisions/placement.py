# SPDX-License-Identifier: Apache-2.0
"""The plan laid on hosts and GPUs: which leases go, which slots come.

Stable: a job keeps its leases. A job that shrinks gives up its newest slots, those away from its
launcher first, so that at least one old worker goes on. A job that grows takes free slots where it is
already, else whole on one node, else over as few nodes as possible. Slots are taken in the order of
submission; a job whose slots are not all free yet keeps those that are, for itself, and publishes nothing
until it has them all. A job that starts again takes the nodes with its commits first. A job that moves to
another GPU type adds the new slots beside the old ones, and gives those up once the new workers train. No
job is given a GPU on which its workers failed a while ago.

Known limitations: jobs are not moved to make room, so a job may span nodes although it would fit on one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from horowatt.records import LauncherKind
from horowatt_allocator.decisions.capacity import Slot, free_slots, leases_by_job
from horowatt_allocator.decisions.resizing import (
    avoided_gpus,
    commit_homes,
    has_joined,
    in_flight,
    outgoing,
    pending,
    union_width,
)
from horowatt_allocator.records.cluster import State
from horowatt_allocator.records.jobs import Column, Job, JobPhase, LeaseState


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One job's next generation.

    Attributes:
        keep: Leases that stay, in their order.
        drop: Leases to be withdrawn.
        add: Slots to be leased.
        num_missing: Slots that are not free yet; nothing is published while there are any.
        must_stop: True when the job can only move by being suspended; ``add`` is what it would get.
    """

    job_id: str
    keep: tuple[str, ...]
    drop: tuple[str, ...] = ()
    add: tuple[Slot, ...] = ()
    num_missing: int = 0
    must_stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Layouts of the jobs whose slots differ from their target: shrinks first, then growth by age."""

    layouts: tuple[Layout, ...]


def place(state: State, targets: Mapping[str, Column], now: float) -> Placement:
    """Return what to change so that every job gets the width its column says.

    Args:
        state: Nodes, jobs and leases.
        targets: Column by job id; only queued and running jobs are looked at.
        now: Unix time, seconds.
    """
    shrinking, growing = [], []
    layouts: list[Layout] = []
    for job_id, column in targets.items():
        job = state.jobs[job_id]
        old = outgoing(job, state.leases) if job.phase is JobPhase.RUNNING else []
        if old and len(old) < job.width:
            layouts += _arrive(job, state.leases, [lease.lease_id for lease in old])
        elif old:
            growing.append(job)
        elif job.phase is JobPhase.RUNNING and 0 < column.width < job.width:
            shrinking.append(job)
        elif job.phase in {JobPhase.QUEUED, JobPhase.RUNNING} and column.width > job.width:
            growing.append(job)
    layouts += [_shrink(job, state.leases, targets[job.spec.job_id].width) for job in shrinking]
    if growing:
        free = free_slots(state, now)
        held = leases_by_job(state.leases)
        for job in sorted(growing, key=lambda job: (job.spec.submitted_at_s, job.spec.job_id)):
            layout, free = _grow(job, held.get(job.spec.job_id, []), targets[job.spec.job_id], free, now)
            layouts.append(layout)
    return Placement(layouts=tuple(layouts))


def without(job: Job, leases: Mapping[str, LeaseState], gone: Iterable[str], width: int) -> Layout:
    """Return the layout of a job that loses the leases ``gone`` and then shrinks to ``width``."""
    lost = set(gone)
    rest = [lease_id for lease_id in job.lease_ids if lease_id not in lost]
    dropped = lost | set(_by_expendability(job, rest, leases)[: len(rest) - width])
    return Layout(
        job_id=job.spec.job_id,
        keep=tuple(lease_id for lease_id in job.lease_ids if lease_id not in dropped),
        drop=tuple(lease_id for lease_id in job.lease_ids if lease_id in dropped),
    )


def next_slot_index(taken: Iterable[int]) -> int:
    """Return the lowest position on a node that none of the job's published leases has."""
    used = set(taken)
    return next(index for index in range(len(used) + 1) if index not in used)


def _shrink(job: Job, leases: Mapping[str, LeaseState], width: int) -> Layout:
    return without(job, leases, (), width)


def _by_expendability(job: Job, lease_ids: list[str], leases: Mapping[str, LeaseState]) -> list[str]:
    """Return leases in the order in which they are given up.

    Those whose workers have not joined yet go before all others. An attached job's ranks are ``0..n-1`` of
    each host, so there the highest positions must go first.
    """
    waiting = {lease.lease_id for lease in pending(job, leases)}

    def key(lease_id: str) -> tuple[bool, bool, int, int, str]:
        lease = leases[lease_id]
        at_home = lease.node == job.home_node
        if job.spec.launcher is LauncherKind.ATTACHED:
            return (True, at_home, -lease.slot_index, -lease.generation, lease_id)
        return (lease_id not in waiting, at_home, -lease.generation, -lease.slot_index, lease_id)

    return sorted(lease_ids, key=key)


def _arrive(job: Job, leases: Mapping[str, LeaseState], old: list[str]) -> list[Layout]:
    """Return the layout without the slots that a moving job leaves, once all its new workers train."""
    new = [lease_id for lease_id in job.lease_ids if lease_id not in old]
    legal = [width for width in job.spec.legal_widths if width <= len(new)]
    if in_flight(job) or not legal or not all(has_joined(job, leases[lease_id]) for lease_id in new):
        return []
    return [without(job, leases, old, legal[-1])]


def _grow(
    job: Job, held: list[LeaseState], column: Column, free: list[Slot], now: float
) -> tuple[Layout, list[Slot]]:
    moves = any(lease.gpu_type != column.gpu_type for lease in held if lease.withdrawn_s is None)
    union = union_width(job, column.width) if moves else None
    wanted = (union or column.width) if moves else column.width - job.width
    avoided = avoided_gpus(job, now)
    usable = [slot for slot in free if slot.gpu.gpu_type == column.gpu_type and slot.gpu.uuid not in avoided]
    homes = [lease.node for lease in held if lease.withdrawn_s is None]
    if job.phase is JobPhase.QUEUED:
        homes = list(commit_homes(job))
    chosen = _choose(usable, wanted, set(homes), job.home_node or next(iter(homes), None))
    taken = {(slot.node, slot.gpu.uuid) for slot in chosen}
    rest = [slot for slot in free if (slot.node, slot.gpu.uuid) not in taken]
    layout = Layout(
        job_id=job.spec.job_id,
        keep=job.lease_ids,
        add=tuple(chosen),
        num_missing=wanted - len(chosen),
        must_stop=moves and union is None,
    )
    return layout, rest


def _choose(usable: list[Slot], wanted: int, homes: set[str], home_node: str | None) -> list[Slot]:
    """Return up to ``wanted`` slots: at home, else one node that just holds the rest, else the largest."""
    by_node: dict[str, list[Slot]] = {}
    for slot in usable:
        by_node.setdefault(slot.node, []).append(slot)
    order = {name: position for position, name in enumerate(by_node)}
    chosen: list[Slot] = []
    for name in sorted((n for n in by_node if n in homes), key=lambda n: (n != home_node, order[n])):
        chosen += by_node.pop(name)[: wanted - len(chosen)]
    while by_node and len(chosen) < wanted:
        need = wanted - len(chosen)
        whole = [name for name, slots in by_node.items() if len(slots) >= need]
        best = (
            min(whole, key=lambda n: (len(by_node[n]), order[n]))
            if whole
            else max(by_node, key=lambda n: (len(by_node[n]), -order[n]))
        )
        chosen += by_node.pop(best)[:need]
    return chosen
