# SPDX-License-Identifier: Apache-2.0
"""Rates, powers and pauses of running jobs, from counters and events.

A rate window opens ``settle_s`` after every worker ended its first step at the full published width, and
closes ``window_s`` later; the next one opens where it closed. It is thrown away when the width or the
enforced power limit changes in it. An observation is booked at the limit that the driver enforces, not at
the one that was ordered.

Pause of a generation, in seconds, from the ``resumed`` events of its workers: end of the first step
after the resize of the worker that was first to resume, less the end of the last step before it of the
worker that was last to stop, less the duration of one step if it is known, at least 0. So it is the time
in which no worker trained. A start has no pause, since no worker came from a generation before.

Nodes' clocks may be minutes apart: times of different nodes are never compared as they are, see
:mod:`horowatt_allocator.decisions.timeline`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from horowatt.records import StreamChunk
from horowatt_allocator.decisions.deadlines import needed_rate_per_s
from horowatt_allocator.decisions.draft import Draft
from horowatt_allocator.decisions.estimates import observe, observe_pause, observed, same_limit
from horowatt_allocator.decisions.reasons import counted
from horowatt_allocator.decisions.timeline import (
    follow,
    note_event,
    observe_clock,
    offset_s,
    parse_event,
    pause_kind_of,
    standstill_of,
)
from horowatt_allocator.records.cluster import Gpu
from horowatt_allocator.records.jobs import (
    Job,
    JobEstimate,
    JobPhase,
    LeaseState,
    Observation,
    RateWindow,
    StreamCursor,
)

EVENTS = "events"
MAX_TAIL_CHARS = 65_536
"""A line of events that is longer is dropped: tenants write this file."""
POWER_SURPRISE = 0.10
"""Relative difference from which a measured power contradicts the plan."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """Counters of all workers and GPUs of a job: sums, and the mean instants they belong to.

    Attributes:
        trained_s: Since the first step at this width, mean of the workers, seconds. Each worker's own
            times are compared only with each other.
    """

    at_s: float
    trained_s: float
    samples: int
    energy_at_s: float
    energy_j: float | None


def absorb_events(draft: Draft, job_id: str, node: str, streams: Iterable[StreamChunk]) -> None:
    """Read the ``events`` chunks of a node's report; those read before are skipped.

    The node's own part of the report must have been taken in before: it dates the report.
    """
    job = follow(_with_clock(draft, draft.jobs[job_id], node))
    lease_ids = {lease.lease_id for lease in draft.leases_of(job_id)}
    for chunk in streams:
        if chunk.stream != EVENTS:
            continue
        cursor = job.events.get(node, StreamCursor())
        text = _unread(chunk, cursor)
        if text is None:
            continue
        *lines, tail = ((cursor.tail if chunk.offset <= cursor.next_offset else "") + text).split("\n")
        tail = tail if len(tail) <= MAX_TAIL_CHARS else ""
        cursor = StreamCursor(next_offset=chunk.next_offset, tail=tail)
        job = replace(job, events={**job.events, node: cursor})
        for line in lines:
            event = parse_event(line)
            job = job if event is None else note_event(job, node, event, lease_ids, draft.now)
    draft.put(job)


def _with_clock(draft: Draft, job: Job, node: str) -> Job:
    reporter = draft.nodes.get(node)
    if reporter is None or reporter.sent_at_s is None or reporter.last_seen_s is None:
        return job
    known = job.clocks.get(node)
    clock = observe_clock(known, reporter.sent_at_s, reporter.last_seen_s)
    return job if clock is None or clock is known else replace(job, clocks={**job.clocks, node: clock})


def measure(draft: Draft, job_id: str) -> None:
    """Update samples, generation, pause and rate window of a job from its leases."""
    job = draft.jobs[job_id]
    leases = [draft.leases[lease_id] for lease_id in job.lease_ids if lease_id in draft.leases]
    job = _count(job, draft.leases_of(job_id))
    if job.phase is JobPhase.RUNNING and leases:
        job = _enter_generation(draft, job, leases)
        job = _advance_window(draft, job, leases)
    draft.put(job)


def _unread(chunk: StreamChunk, cursor: StreamCursor) -> str | None:
    """Return the text of a chunk after the cursor, or None when all of it was read before."""
    if chunk.next_offset <= cursor.next_offset:
        return None
    known = cursor.next_offset - chunk.offset
    if known <= 0:
        return chunk.text
    return chunk.text.encode()[known:].decode(errors="replace")


def _count(job: Job, leases: list[LeaseState]) -> Job:
    """Sum the samples; None as soon as one worker that trained could not count its own."""
    uncountable = any(lease.samples is None and lease.steps > 0 for lease in leases)
    samples = None
    if job.past_samples is not None and not uncountable:
        samples = job.past_samples + sum(lease.samples or 0 for lease in leases)
    generations = job.generations
    if generations:
        before = generations[-1].samples_before
        trained = None if samples is None or before is None else max(0, samples - before)
        generations = (*generations[:-1], replace(generations[-1], samples=trained))
    return replace(job, samples=samples, generations=generations)


def _enter_generation(draft: Draft, job: Job, leases: list[LeaseState]) -> Job:
    """Note that all workers train at the published width, and the pause before it once."""
    generation = job.generations[-1]
    known = [
        lease.first_step_end_s + offset_s(job, lease.node)
        for lease in leases
        if lease.world_size == job.width and lease.first_step_end_s is not None
    ]
    if generation.first_step_end_s is None and len(known) == job.width:
        generation = replace(generation, first_step_end_s=min(known))
        draft.decide_because(f"job '{job.spec.name}' trains on {counted(job.width, 'GPU')}")
    job = replace(job, generations=(*job.generations[:-1], generation))
    standstill = standstill_of(job)
    if generation.pause_s is not None or generation.first_step_end_s is None or standstill is None:
        return job
    pause_s = max(0.0, standstill.seconds_s - (job.step_s or 0.0))
    generation = replace(
        generation, pause_s=pause_s, stopped_s=standstill.stopped_s, resumed_s=standstill.resumed_s
    )
    estimate = draft.estimates.get(job.spec.job_id, JobEstimate())
    draft.estimates[job.spec.job_id] = observe_pause(estimate, pause_s, pause_kind_of(job))
    return replace(job, generations=(*job.generations[:-1], generation))


def _advance_window(draft: Draft, job: Job, leases: list[LeaseState]) -> Job:
    gpus = [gpu for lease in leases if (gpu := _gpu_of(draft, lease)) is not None]
    reading = _read(job, leases, gpus)
    settled, limit_w = _enforced_limit_w(gpus)
    if reading is None or not settled or reading.trained_s < draft.policy.settle_s:
        return replace(job, window=None)
    window = job.window
    if (
        window is None
        or window.generation != job.generation
        or not same_limit(window.limit_w, limit_w)
        or reading.samples < window.end_samples
    ):
        return replace(job, window=_open(job, limit_w, reading))
    window = replace(
        window,
        end_s=reading.at_s,
        end_samples=reading.samples,
        end_energy_j=reading.energy_j,
        end_energy_at_s=reading.energy_at_s,
    )
    if window.end_s - window.start_s < draft.policy.window_s:
        return replace(job, window=window)
    job = _close(draft, job, window)
    return replace(job, window=_open(job, limit_w, reading))


def _read(job: Job, leases: list[LeaseState], gpus: list[Gpu]) -> _Reading | None:
    """Return the job's counters; None unless every worker trains at the full width and counts."""
    steps_s = [
        (lease.first_step_end_s, lease.last_step_end_s)
        for lease in leases
        if lease.held and lease.world_size == job.width
    ]
    spans_s = [(first, last) for first, last in steps_s if first is not None and last is not None]
    ends = [last for _, last in spans_s]
    if len(ends) != job.width or len(gpus) != job.width or any(lease.samples is None for lease in leases):
        return None
    energies = [gpu.energy_j for gpu in gpus]
    return _Reading(
        at_s=sum(ends) / len(ends),
        trained_s=sum(last - first for first, last in spans_s) / len(spans_s),
        samples=sum(lease.samples or 0 for lease in leases),
        energy_at_s=sum(gpu.sampled_at_s for gpu in gpus) / len(gpus),
        energy_j=None if None in energies else sum(energy or 0.0 for energy in energies),
    )


def _enforced_limit_w(gpus: list[Gpu]) -> tuple[bool, float | None]:
    """Return whether all GPUs enforce one limit, and that limit (None where none can be set)."""
    if not all(gpu.can_set_limit for gpu in gpus):
        return True, None
    limits = [gpu.limit_w for gpu in gpus if gpu.limit_w is not None]
    if len(limits) != len(gpus) or not limits:
        return False, None
    same = all(same_limit(limit, limits[0]) for limit in limits)
    return same, float(round(limits[0]))


def _open(job: Job, limit_w: float | None, reading: _Reading) -> RateWindow:
    return RateWindow(
        generation=job.generation,
        limit_w=limit_w,
        start_s=reading.at_s,
        start_samples=reading.samples,
        start_energy_j=reading.energy_j,
        end_s=reading.at_s,
        end_samples=reading.samples,
        end_energy_j=reading.energy_j,
        start_energy_at_s=reading.energy_at_s,
        end_energy_at_s=reading.energy_at_s,
    )


def _close(draft: Draft, job: Job, window: RateWindow) -> Job:
    seconds_s = window.end_s - window.start_s
    observation = Observation(
        gpu_type=job.column.gpu_type or "",
        width=job.width,
        limit_w=window.limit_w,
        rate_per_s=(window.end_samples - window.start_samples) / seconds_s,
        power_w=_power_w(window),
        seconds_s=seconds_s,
        at_s=draft.now,
    )
    estimate = draft.estimates.get(job.spec.job_id, JobEstimate())
    surprise = _surprise(draft, job, estimate, observation)
    if surprise:
        draft.decide_because(surprise)
    draft.estimates[job.spec.job_id] = observe(estimate, observation)
    return replace(job, rate_per_s=observation.rate_per_s, power_w=observation.power_w)


def _power_w(window: RateWindow) -> float | None:
    """Return the mean power of the window; None without counters, or when one was reset in it."""
    seconds_s = window.end_energy_at_s - window.start_energy_at_s
    if window.start_energy_j is None or window.end_energy_j is None or seconds_s <= 0:
        return None
    joules_j = window.end_energy_j - window.start_energy_j
    return joules_j / seconds_s if joules_j >= 0 else None


def _surprise(draft: Draft, job: Job, estimate: JobEstimate, new: Observation) -> str:
    """Return why an observation calls for a decision, or an empty string."""
    name = job.spec.name
    if observed(estimate, new.gpu_type, new.width, new.limit_w) is None:
        return f"job '{name}' was measured on {counted(new.width, 'GPU')} for the first time"
    column = job.column
    if column.width == new.width and same_limit(column.limit_w, new.limit_w):
        if not column.low_rate_per_s <= new.rate_per_s <= column.high_rate_per_s:
            return f"job '{name}' does {new.rate_per_s:,.0f} samples/s, not {column.rate_per_s:,.0f}"
        if new.power_w is not None and abs(new.power_w - column.held_w) > POWER_SURPRISE * column.held_w:
            return f"job '{name}' draws {new.power_w:,.0f} W, not {column.held_w:,.0f} W"
    needed = needed_rate_per_s(job, draft.now)
    if needed is not None and new.rate_per_s < needed <= column.high_rate_per_s:
        return f"job '{name}' is late: {new.rate_per_s:,.0f} of {needed:,.0f} samples/s"
    return ""


def _gpu_of(draft: Draft, lease: LeaseState) -> Gpu | None:
    node = draft.nodes.get(lease.node)
    if node is None:
        return None
    return next((gpu for gpu in node.gpus if gpu.uuid == lease.gpu_uuid), None)
