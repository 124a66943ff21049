# SPDX-License-Identifier: Apache-2.0
"""Resizes under way: who has joined, what may be stopped or moved, and how long to wait after a failure.

A grant is *pending* from the slots file that first names it until the launcher says that workers train
at that generation. While any is pending the old workers train on, so it may be taken back at no cost.
A start has no pending grants: nobody trains yet, and the launcher gives its verdict.

A job *moves* when its plan names another GPU type than that of its workers. No old worker would be left,
so the union of old and new slots is published first, then the new ones alone. Where no legal width is
large enough for a union the job is suspended and starts again on the new type.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from horowatt.records import LauncherKind
from horowatt_allocator.decisions.estimates import expected_pause_s
from horowatt_allocator.records.cluster import Policy, State
from horowatt_allocator.records.jobs import GpuFailure, Job, JobEstimate, JobPhase, LeaseState, ResizePhase

MAX_BACKOFF_S = 300.0
"""Longest wait between two starts, or two growths, of one job."""
GPU_BACKOFF_S = 300.0
"""First time for which a job is kept from a GPU on which its worker failed; doubles each time."""
MAX_GPU_BACKOFF_S = 86_400.0
COMMIT_DIR_VARIABLE = "HOROWATT_COMMIT_DIR"
"""Set in a job's environment: its commits lie in a folder that all nodes share."""


def published(job: Job, leases: Mapping[str, LeaseState]) -> list[LeaseState]:
    """Return the leases of the job's latest generation."""
    return [leases[lease_id] for lease_id in job.lease_ids if lease_id in leases]


def has_joined(job: Job, lease: LeaseState) -> bool:
    """Return whether the worker of a lease trains, or trained, with the others."""
    if lease.steps > 0:
        return True
    # A launcher that goes on without standbys that failed counts the generation as applied.
    return lease.generation <= job.generation_applied and lease.lease_id not in failed_standbys(job)


def pending(job: Job, leases: Mapping[str, LeaseState]) -> list[LeaseState]:
    """Return the published grants whose workers have not joined those that train; none at a start."""
    if job.phase is not JobPhase.RUNNING or job.spec.launcher is LauncherKind.ATTACHED:
        return []
    waiting = [lease for lease in published(job, leases) if not has_joined(job, lease)]
    return waiting if len(waiting) < job.width else []


def failed_standbys(job: Job) -> dict[str, str]:
    """Return the leases whose standbys failed, as the launcher says of the latest resize, and why."""
    if not job.resizes or job.resizes[-1].number != job.generation:
        return {}
    latest = job.resizes[-1]
    marks = [mark for mark in latest.marks if mark.phase is ResizePhase.STANDBY_FAILED]
    return {mark.last_lease_id: latest.why for mark in marks if mark.last_lease_id}


def in_flight(job: Job) -> bool:
    """Return whether the launcher has yet to apply the latest generation: nothing is added meanwhile."""
    return job.spec.launcher is LauncherKind.HOROWATT and job.generation_applied < job.generation


def held_type(job: Job, leases: Mapping[str, LeaseState]) -> str | None:
    """Return the GPU type a running job is on, the one it is leaving while it moves; None without slots."""
    types = [lease.gpu_type for lease in published(job, leases)]
    if job.leaving is not None and job.leaving.gpu_type in types:
        return job.leaving.gpu_type
    return types[0] if types else None


def outgoing(job: Job, leases: Mapping[str, LeaseState]) -> list[LeaseState]:
    """Return the published leases that are of another GPU type than the plan's."""
    return [lease for lease in published(job, leases) if lease.gpu_type != job.column.gpu_type]


def is_union(job: Job, leases: Mapping[str, LeaseState]) -> bool:
    """Return whether a job holds slots of the type it leaves and of the one it goes to."""
    return 0 < len(outgoing(job, leases)) < job.width


def union_width(job: Job, width: int) -> int | None:
    """Return the most new slots, at most ``width``, with which all old ones make a legal width."""
    legal = set(job.spec.legal_widths)
    fits = [new for new in job.spec.legal_widths if new <= width and new + job.width in legal]
    return fits[-1] if fits else None


def can_stop(job: Job) -> bool:
    """Return whether a job would go on from a durable commit if it were stopped."""
    return job.spec.launcher is LauncherKind.HOROWATT and job.last_commit_s is not None


def can_move(job: Job) -> bool:
    """Return whether a job could ever change its GPU type while it runs."""
    legal = job.spec.legal_widths
    unions = any(width + legal[0] in legal for width in legal)
    return can_stop(job) or (job.spec.launcher is LauncherKind.HOROWATT and unions)


def has_dwelt(job: Job, policy: Policy, now: float) -> bool:
    """Return whether the latest start or resize is ``dwell_s`` ago."""
    return now - max(job.changed_s, job.attempt_s or 0.0) >= policy.dwell_s


def stop_cost_s(job: Job, estimate: JobEstimate, policy: Policy, now: float) -> float:
    """Return the training lost by stopping a job and starting it again, seconds.

    That is the latest measured time from a start to its first step, or the prior pause, and the work since
    the last durable commit (of the horizon at most: a commit may fail, and then it is lost).
    """
    starts = [
        generation.first_step_end_s - generation.published_s
        for generation in job.generations
        if generation.first_step_end_s is not None and generation.stopped_s is None
    ]
    restart_s = max(starts[-1], 0.0) if starts else expected_pause_s(estimate, policy)
    uncommitted_s = 0.0 if job.last_commit_s is None else max(0.0, now - job.last_commit_s)
    return restart_s + min(uncommitted_s, policy.horizon_s)


def waits_since_s(job: Job) -> float:
    """Return since when a queued job waits, Unix seconds: its suspension, else its submission."""
    return job.suspension.since_s if job.suspension is not None else job.spec.submitted_at_s


def backoff_s(policy: Policy, failures: int) -> float:
    """Return the wait after so many failures in a row, seconds."""
    return float(min(MAX_BACKOFF_S, policy.restart_backoff_s * 2 ** min(max(failures - 1, 0), 30)))


def losses_within_window(job: Job, policy: Policy, now: float) -> tuple[float, ...]:
    """Return when a job was lost, as far as it still counts."""
    return tuple(at_s for at_s in job.losses_s if now - at_s < policy.restart_window_s)


def avoided_gpus(job: Job, now: float) -> frozenset[str]:
    """Return the UUIDs of GPUs that a job is not given because its workers failed on them."""
    return frozenset(uuid for uuid, failure in job.failed_gpus.items() if now < failure.until_s)


def with_failed_gpus(job: Job, uuids: Iterable[str], now: float) -> Job:
    """Return the job with one more failure on each of these GPUs."""
    known = {uuid: f for uuid, f in job.failed_gpus.items() if now < f.until_s + MAX_GPU_BACKOFF_S}
    for uuid in uuids:
        count = known[uuid].count + 1 if uuid in known else 1
        wait_s = min(MAX_GPU_BACKOFF_S, GPU_BACKOFF_S * 2 ** min(count - 1, 30))
        known[uuid] = GpuFailure(count=count, until_s=now + wait_s)
    return replace(job, failed_gpus=known)


def with_joined(job: Job, leases: Iterable[LeaseState]) -> Job:
    """Return the job after the workers of these leases have joined: their GPUs, and growth, work."""
    joined = {lease.gpu_uuid for lease in leases if lease.held or not lease.started}
    if not joined:
        return job
    failed = {uuid: failure for uuid, failure in job.failed_gpus.items() if uuid not in joined}
    return replace(job, failed_gpus=failed, growth_failures=0, grow_not_before_s=0.0)


def commit_homes(job: Job) -> tuple[str, ...]:
    """Return the nodes that a restart prefers: those with the job's commits, unless all nodes share them."""
    return () if COMMIT_DIR_VARIABLE in job.spec.environment else job.commit_nodes


def overlap(state: State) -> dict[str, tuple[int, float]]:
    """Return the slots and watts that moving jobs hold beyond their plan's column, by job id."""
    found = {}
    for job_id, job in state.jobs.items():
        if job.phase is JobPhase.RUNNING and job.leaving is not None and is_union(job, state.leases):
            count = len(outgoing(job, state.leases))
            found[job_id] = (count, job.leaving.marginal_w * count / max(job.leaving.width, 1))
    return found
