# SPDX-License-Identifier: Apache-2.0
"""The timeline of each resize, from the events that launcher and workers of a job append on its nodes.

Clocks. Hosts' clocks may be minutes apart. A node's offset to the head is estimated from its reports
(:func:`observe_clock`) and is always late by the quickest report's way, milliseconds. So times within one
node are kept as the node wrote them and only shifted as a whole, durations within a node are exact, and
those across nodes are as good as the offsets. A pause does not depend on offsets by more than one step:
see :func:`standstill_of`.

Trust. Tenants write these events. Values are checked, texts cut, counts bounded; a job that lies can only
spoil its own timeline and estimate. An event that cannot be placed is dropped, never an error.

Order. Chunks of several nodes arrive in any order, and some never. Marks are minima and maxima, so their
order does not matter; an event that names no generation is placed by width and time.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from horowatt_allocator.records.jobs import (
    Generation,
    Job,
    JobPhase,
    NodeClock,
    PauseKind,
    PhaseMark,
    Resize,
    ResizePhase,
)

KEPT_RESIZES = 32
"""Resizes of a job whose timeline is kept; they are written with the job at each report."""
CLOCK_OFF_S = 1.0
"""Offset from which a node's clock is said to be off."""
CLOCK_ERROR_S = 1.0
"""By how much two times of different clocks may be in the wrong order after correction."""
FUTURE_S = 10.0
"""How far ahead of the head an event may be after correction; further is not plausible."""
STRETCH_REPORTS = 16
"""A clock's offset is the smallest difference of the last one to two stretches of reports."""
SET_BACK_REPORTS = 5
"""Reports in a row that must say so before a clock counts as set back, rather than the network as slow."""
MAX_OFFSET_S = 1e9
"""An offset beyond this is no clock."""
MAX_TEXT_CHARS = 200
MAX_COUNT = 1_000_000
_NAMED_BY_GENERATION = frozenset(
    {
        ResizePhase.GRANTED,
        ResizePhase.STANDBY_STARTED,
        ResizePhase.STANDBY_READY,
        ResizePhase.STANDBY_FAILED,
        ResizePhase.PUBLISHED,
        ResizePhase.ASSIGNED,
        ResizePhase.RESTARTED,
    }
)
_OF_ONE_WIDTH = frozenset({ResizePhase.WORLD, ResizePhase.SYNCED, ResizePhase.RESUMED})
_BESIDE = frozenset({ResizePhase.STANDBY_FAILED, ResizePhase.RESTARTED, ResizePhase.LEFT})
"""Phases that are not on the way to the first step."""
_PUBLICATION = "publication"


class JobEvent(msgspec.Struct, frozen=True):
    """A line of ``events.jsonl`` as far as timelines need it; times by the writer's clock, seconds."""

    kind: str
    at_s: float | None = None
    lease_id: str = ""
    generation: int | None = None
    world_size: int | None = None
    last_step_end_s: float | None = None
    first_step_end_s: float | None = None
    cold: bool | None = None
    trigger: str = ""
    code: str = ""
    why: str = ""


class ResizeKind(StrEnum):
    """What a resize does to the width."""

    START = "start"
    GROW = "grow"
    SHRINK = "shrink"
    SAME_WIDTH = "same-width"
    """Other slots, or back to those that the job never left."""


class ResizeOutcome(StrEnum):
    """What became of a resize."""

    APPLIED = "applied"
    """The job trained at its width."""
    WITHDRAWN = "withdrawn"
    """Taken back before publication, or together with the job."""
    SUPERSEDED = "superseded"
    """Another one followed before the first step."""
    FAILED = "failed"
    """The join failed, or the job was lost in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """One phase of a resize, in seconds after the decision.

    Attributes:
        first_after_s, last_after_s: When it was noted first and last.
        took_s: From the phase before it; None where it is not on the way to the first step.
        slowest: True for the one phase that took longest.
        last_lease_id: Who noted it last, if that was a worker.
    """

    phase: ResizePhase
    first_after_s: float
    last_after_s: float
    count: int
    took_s: float | None
    slowest: bool
    last_lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeStory:
    """One resize as it is shown.

    Attributes:
        width_before: Width that the job trained at before; 0 at a start.
        outcome: None while it is under way.
        cold: As in :class:`Resize`.
        pause_s: Seconds in which no worker trained because of it; None if not measured.
        first_step_after_s: From the decision to the first step at the new width, or None.
        clocks_s: Nodes whose clock was off by more than a second, and what was added to its times.
    """

    number: int
    kind: ResizeKind
    width_before: int
    width: int
    decided_s: float
    outcome: ResizeOutcome | None
    cold: bool | None
    pause_s: float | None
    first_step_after_s: float | None
    phases: tuple[PhaseSpan, ...]
    clocks_s: Mapping[str, float]
    code: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """Between two worlds of a job, by the head's clock.

    Attributes:
        seconds_s: Without training, one step's duration not yet taken off.
    """

    stopped_s: float
    resumed_s: float
    seconds_s: float


# ------------------------------------------------------------------------------------- clocks


def observe_clock(clock: NodeClock | None, sent_at_s: float, received_s: float) -> NodeClock | None:
    """Return a node's clock after one more report; a repeated report changes nothing.

    Args:
        sent_at_s: By the node's clock.
        received_s: By the head's.
    """
    difference_s = received_s - sent_at_s
    if not abs(difference_s) <= MAX_OFFSET_S or (clock is not None and clock.sent_at_s == sent_at_s):
        return clock
    if clock is None:
        return NodeClock(earlier_s=difference_s, recent_s=difference_s, num_recent=1, sent_at_s=sent_at_s)
    clock = replace(clock, sent_at_s=sent_at_s)
    if difference_s <= clock.offset_s + CLOCK_OFF_S:
        clock = replace(clock, num_late=0)
    else:
        late_s = difference_s if clock.num_late == 0 else min(clock.late_s, difference_s)
        clock = replace(clock, num_late=clock.num_late + 1, late_s=late_s)
        if clock.num_late >= SET_BACK_REPORTS:
            return replace(clock, earlier_s=late_s, recent_s=late_s, num_recent=1, num_late=0)
    if clock.num_recent >= STRETCH_REPORTS:
        return replace(clock, earlier_s=clock.recent_s, recent_s=difference_s, num_recent=1)
    return replace(clock, recent_s=min(clock.recent_s, difference_s), num_recent=clock.num_recent + 1)


def offset_s(job: Job, node: str) -> float:
    """Return what to add to times of a node of the job to have the head's, seconds; 0 if not known."""
    clock = job.clocks.get(node)
    return 0.0 if clock is None else clock.offset_s


# ------------------------------------------------------------------------------------- taking in


def parse_event(line: str) -> JobEvent | None:
    """Return the event of a line, or None when it is none or its values do not fit."""
    try:
        return msgspec.json.decode(line, type=JobEvent)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def follow(job: Job) -> Job:
    """Return the job with a timeline for each of its latest generations; no events are in a new one yet."""
    known = job.resizes[-1].number if job.resizes else 0
    missing = list(_unfollowed(job, known))
    if not missing:
        return job
    resizes = (*job.resizes, *missing)[-KEPT_RESIZES:]
    settled = tuple(_by_head_clock(job, resize) for resize in resizes[:-1])
    started = any(resize.width_before == 0 for resize in missing)
    return replace(job, resizes=(*settled, resizes[-1]), cold="" if started else job.cold)


def _unfollowed(job: Job, known: int) -> Iterator[Resize]:
    recent = job.generations[-KEPT_RESIZES - 1 :]
    for index, generation in enumerate(recent):
        if generation.number <= known:
            continue
        before = recent[index - 1] if index else None
        start = (
            before is None
            or before.ended_s is None
            or before.ended_s < generation.published_s
            or generation.published_s == job.attempt_s
        )
        yield Resize(
            number=generation.number,
            decided_s=generation.published_s,
            width=generation.width,
            width_before=0 if start or before is None else before.width,
        )


def _by_head_clock(job: Job, resize: Resize) -> Resize:
    """Return a resize with one mark per phase, by the head's clock."""
    if not any(mark.node for mark in resize.marks):
        return resize
    return replace(resize, marks=tuple(_merged(job, resize).values()), clocks_s=_clocks_off(job, resize))


def _merged(job: Job, resize: Resize) -> dict[ResizePhase, PhaseMark]:
    merged: dict[ResizePhase, PhaseMark] = {}
    for mark in resize.marks:
        here = mark
        if mark.node:
            shift_s = offset_s(job, mark.node)
            here = replace(mark, node="", first_s=mark.first_s + shift_s, last_s=mark.last_s + shift_s)
        merged[mark.phase] = _joined(merged[mark.phase], here) if mark.phase in merged else here
    return {phase: merged[phase] for phase in ResizePhase if phase in merged}


def _clocks_off(job: Job, resize: Resize) -> Mapping[str, float]:
    nodes = dict.fromkeys(mark.node for mark in resize.marks if mark.node)
    offsets = {node: round(offset_s(job, node), 3) for node in nodes}
    return {**resize.clocks_s, **{node: off_s for node, off_s in offsets.items() if abs(off_s) > CLOCK_OFF_S}}


def note_event(job: Job, node: str, event: JobEvent, lease_ids: Collection[str], now: float) -> Job:
    """Return the job after one event of a node; events of no interest, or not plausible, change nothing.

    Args:
        job: After :func:`follow`.
        node: Whose file the event is from.
        lease_ids: The job's leases; an event of another lease counts but is not named.
        now: By the head's clock.
    """
    if event.kind == "cold":
        why = _text(event.why) or "the launcher does not say why"
        return job if job.cold == why else replace(job, cold=why)
    if event.kind == ResizePhase.COMMITTED:
        job = _count_commit(job, node, event, now)
        if event.trigger != _PUBLICATION:
            return job
    phase = _phase_of(event)
    at_s = event.first_step_end_s if phase is ResizePhase.RESUMED else event.at_s
    if phase is None or at_s is None or not _is_plausible(job, node, at_s, now):
        return job
    index = None if _is_of_the_end(job, phase, event) else _place(job, node, phase, at_s, event)
    if index is None or _is_of_a_later_world(job, job.resizes[index], node, phase, at_s, event):
        return job
    resize = job.resizes[index]
    if any(mark.phase is phase and mark.count >= _most(resize) for mark in resize.marks):
        return job
    latest = index == len(job.resizes) - 1
    where, shift_s = (node, 0.0) if latest else ("", offset_s(job, node))
    lease_id = event.lease_id if event.lease_id in lease_ids else ""
    resize = _marked(resize, _mark(phase, where, at_s + shift_s, lease_id))
    last_s = event.last_step_end_s
    if phase is ResizePhase.RESUMED and last_s is not None and _is_stop(job, node, last_s, at_s):
        resize = _marked(resize, _mark(ResizePhase.STOPPED, where, last_s + shift_s, lease_id))
    resize = _with_circumstances(resize, phase, event)
    return replace(job, resizes=(*job.resizes[:index], resize, *job.resizes[index + 1 :]))


def _phase_of(event: JobEvent) -> ResizePhase | None:
    try:
        phase = ResizePhase(event.kind)
    except ValueError:
        return None
    return None if phase is ResizePhase.STOPPED else phase


def _is_of_the_end(job: Job, phase: ResizePhase, event: JobEvent) -> bool:
    """Return whether a worker leaves because the job is stopped: its lease is not taken back."""
    return phase is ResizePhase.LEFT and event.lease_id in job.lease_ids


def _count_commit(job: Job, node: str, event: JobEvent, now: float) -> Job:
    if event.at_s is None or not _is_plausible(job, node, event.at_s, now):
        return job
    at_s = min(event.at_s + offset_s(job, node), now)
    latest_s = at_s if job.last_commit_s is None else max(job.last_commit_s, at_s)
    return replace(job, last_commit_s=latest_s, num_commits=min(job.num_commits + 1, MAX_COUNT))


def _is_plausible(job: Job, node: str, at_s: float, now: float) -> bool:
    if not math.isfinite(at_s):
        return False
    here_s = at_s + offset_s(job, node)
    return job.spec.submitted_at_s - CLOCK_ERROR_S <= here_s <= now + FUTURE_S


def _is_stop(job: Job, node: str, last_s: float, first_s: float) -> bool:
    """Return whether a worker may have ended its last step before a resize at ``last_s``."""
    if not math.isfinite(last_s) or last_s > first_s:
        return False
    began_s = job.spec.submitted_at_s if job.started_s is None else job.started_s
    return last_s + offset_s(job, node) >= began_s - CLOCK_ERROR_S


def _place(job: Job, node: str, phase: ResizePhase, at_s: float, event: JobEvent) -> int | None:
    """Return the index of the resize that an event belongs to."""
    resizes = job.resizes
    if phase in _NAMED_BY_GENERATION:
        return next((n for n, resize in enumerate(resizes) if resize.number == event.generation), None)
    newest_first = range(len(resizes) - 1, -1, -1)
    if phase is ResizePhase.COMMITTED:
        return next((n for n in newest_first if _was_decided(job, resizes[n], node, at_s)), None)
    begun = [n for n in newest_first if _has_begun(job, resizes[n], node, at_s)]
    if phase in _OF_ONE_WIDTH:
        return next((n for n in begun if resizes[n].width == event.world_size), None)
    # A worker that stops belongs to what the launcher has published, not to what was only decided.
    published = [n for n in begun if _mark_of(resizes[n], ResizePhase.PUBLISHED) is not None]
    if phase is ResizePhase.INTERRUPTED:
        published = [n for n in published if _mark_of(resizes[n], ResizePhase.RESUMED) is None]
    return next(iter(published or begun), None)


def _was_decided(job: Job, resize: Resize, node: str, at_s: float) -> bool:
    return resize.decided_s <= at_s + offset_s(job, node) + CLOCK_ERROR_S


def _has_begun(job: Job, resize: Resize, node: str, at_s: float) -> bool:
    """Return whether a worker's event may be of a resize: not earlier than its publication."""
    mark = _mark_of(resize, ResizePhase.PUBLISHED)
    if mark is None:
        return _was_decided(job, resize, node, at_s)
    return not _is_before(job, node, at_s, mark.node, mark.first_s)


def _is_before(job: Job, node: str, at_s: float, other: str, other_s: float) -> bool:
    """Return whether a time is certainly before another one; a node of "" is the head."""
    if node == other:
        return at_s < other_s
    here_s = at_s + (offset_s(job, node) if node else 0.0)
    there_s = other_s + (offset_s(job, other) if other else 0.0)
    return here_s < there_s - CLOCK_ERROR_S


def _is_of_a_later_world(
    job: Job, resize: Resize, node: str, phase: ResizePhase, at_s: float, event: JobEvent
) -> bool:
    """Return whether an event tells of a recovery at a width that the job had already trained at.

    Everything but the leaving of workers comes before the first step at that width.
    """
    resumed = [mark for mark in resize.marks if mark.phase is ResizePhase.RESUMED]
    if not resumed:
        return False
    if phase is ResizePhase.RESUMED:
        since_s = event.last_step_end_s
        if since_s is None:
            return sum(mark.count for mark in resumed) >= resize.width
    else:
        since_s = at_s
    if phase is ResizePhase.LEFT or not math.isfinite(since_s):
        return False
    return any(_is_before(job, mark.node, mark.first_s, node, since_s) for mark in resumed)


def _mark(phase: ResizePhase, node: str, at_s: float, lease_id: str) -> PhaseMark:
    return PhaseMark(phase=phase, node=node, first_s=at_s, last_s=at_s, last_lease_id=lease_id)


def _most(resize: Resize) -> int:
    """Return how often a phase is noted at most: more than workers do, so that a flood costs little."""
    return 16 + 4 * max(resize.width, resize.width_before)


def _mark_of(resize: Resize, phase: ResizePhase) -> PhaseMark | None:
    return next((mark for mark in resize.marks if mark.phase is phase), None)


def _marked(resize: Resize, new: PhaseMark) -> Resize:
    for index, mark in enumerate(resize.marks):
        if (mark.phase, mark.node) == (new.phase, new.node):
            marks = (*resize.marks[:index], _joined(mark, new), *resize.marks[index + 1 :])
            return replace(resize, marks=marks)
    return replace(resize, marks=(*resize.marks, new))


def _joined(one: PhaseMark, other: PhaseMark) -> PhaseMark:
    return replace(
        one,
        first_s=min(one.first_s, other.first_s),
        last_s=max(one.last_s, other.last_s),
        count=one.count + other.count,
        last_lease_id=other.last_lease_id if other.last_s >= one.last_s else one.last_lease_id,
    )


def _with_circumstances(resize: Resize, phase: ResizePhase, event: JobEvent) -> Resize:
    if phase is ResizePhase.STANDBY_STARTED:
        return replace(resize, cold=bool(event.cold) or bool(resize.cold))
    if phase is ResizePhase.STANDBY_READY and resize.cold is None:
        return replace(resize, cold=False)
    if phase in {ResizePhase.STANDBY_FAILED, ResizePhase.RESTARTED} and not resize.why:
        return replace(resize, code=_text(event.code), why=_text(event.why))
    return resize


def _text(text: str) -> str:
    return " ".join(text.split())[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode()


# ------------------------------------------------------------------------------------- figures


def standstill_of(job: Job) -> Standstill | None:
    """Return the standstill before the latest generation, or None while none was told.

    It is the end of the first step of the worker that was first to resume, less the end of the last step
    of the worker that was last to stop. Workers of several nodes are compared across their clocks, whose
    offsets are never exact. But the workers of a job end their steps together, within one step; so the
    standstill is at most the shortest one seen within one node, and less by no more than one step.
    """
    if not job.resizes or job.resizes[-1].number != job.generation:
        return None
    marks = job.resizes[-1].marks
    stops = {mark.node: mark.last_s for mark in marks if mark.phase is ResizePhase.STOPPED}
    resumes = {mark.node: mark.first_s for mark in marks if mark.phase is ResizePhase.RESUMED}
    if not stops or not resumes:
        return None
    stopped_s = max(at_s + offset_s(job, node) for node, at_s in stops.items())
    resumed_s = min(at_s + offset_s(job, node) for node, at_s in resumes.items())
    # Whoever tells when it stopped tells in the same line when it resumed.
    shortest_s = min(resumes[node] - at_s for node, at_s in stops.items())
    seconds_s = shortest_s
    if len(resumes) > 1:
        lowest_s = shortest_s - (job.step_s or 0.0)
        seconds_s = min(max(resumed_s - stopped_s, lowest_s), shortest_s)
    return Standstill(stopped_s=stopped_s, resumed_s=resumed_s, seconds_s=max(0.0, seconds_s))


def pause_kind_of(job: Job) -> PauseKind:
    """Return the kind of the latest resize, for the estimate of pauses."""
    stories = resize_stories(job)
    if stories and stories[-1].kind is ResizeKind.SHRINK:
        return PauseKind.SHRINK
    return PauseKind.GROW_WARM if stories and stories[-1].cold is False else PauseKind.GROW_COLD


def resize_stories(job: Job) -> tuple[ResizeStory, ...]:
    """Return the latest resizes and starts of a job as they are shown, oldest first."""
    job = follow(job)
    recent = {generation.number: generation for generation in job.generations[-KEPT_RESIZES:]}
    stories = []
    trained = 0
    for index, resize in enumerate(job.resizes):
        after = job.resizes[index + 1] if index + 1 < len(job.resizes) else None
        before = 0 if resize.width_before == 0 else trained or resize.width_before
        story = _story(job, resize, after, recent.get(resize.number), before)
        if story.outcome is ResizeOutcome.APPLIED:
            trained = resize.width
        elif before == 0:
            trained = 0
        stories.append(story)
    return tuple(stories)


def _story(
    job: Job, resize: Resize, after: Resize | None, generation: Generation | None, before: int
) -> ResizeStory:
    marks = _merged(job, resize)
    resumed = marks.get(ResizePhase.RESUMED)
    first_s = resumed.first_s if resumed is not None else None
    if first_s is None and generation is not None:
        first_s = generation.first_step_end_s
    # A job that went back to where it never left has been training there since before the decision.
    after_s = None if first_s is None or first_s < resize.decided_s else first_s - resize.decided_s
    return ResizeStory(
        number=resize.number,
        kind=_kind(before, resize.width),
        width_before=before,
        width=resize.width,
        decided_s=resize.decided_s,
        outcome=_outcome(job, marks, after, first_s is not None, before),
        cold=resize.cold,
        pause_s=None if generation is None else generation.pause_s,
        first_step_after_s=after_s,
        phases=tuple(_spans(marks, resize.decided_s)),
        clocks_s=_clocks_off(job, resize),
        code=resize.code,
        why=resize.why,
    )


def _kind(before: int, width: int) -> ResizeKind:
    if before == 0:
        return ResizeKind.START
    if width == before:
        return ResizeKind.SAME_WIDTH
    return ResizeKind.GROW if width > before else ResizeKind.SHRINK


def _outcome(
    job: Job, marks: Mapping[ResizePhase, PhaseMark], after: Resize | None, trained: bool, before: int
) -> ResizeOutcome | None:
    if trained:
        return ResizeOutcome.APPLIED
    if ResizePhase.RESTARTED in marks:
        return ResizeOutcome.FAILED
    if after is None:
        return _outcome_of_the_last(job)
    if after.width_before == 0:
        return ResizeOutcome.FAILED
    if ResizePhase.PUBLISHED in marks:
        return ResizeOutcome.SUPERSEDED
    taken_back = after.width == before or ResizePhase.STANDBY_FAILED in marks
    return ResizeOutcome.WITHDRAWN if taken_back else ResizeOutcome.SUPERSEDED


def _outcome_of_the_last(job: Job) -> ResizeOutcome | None:
    phase = job.ending or job.phase if job.phase is JobPhase.STOPPING else job.phase
    if phase is JobPhase.RUNNING:
        return None
    lost = phase is JobPhase.QUEUED and job.suspension is None
    return ResizeOutcome.FAILED if lost or phase is JobPhase.FAILED else ResizeOutcome.WITHDRAWN


def _spans(marks: Mapping[ResizePhase, PhaseMark], decided_s: float) -> Iterator[PhaseSpan]:
    """Yield the phases in the order in which they were done, by the last of the workers."""
    done_s = {
        phase: (mark.first_s if phase is ResizePhase.RESUMED else mark.last_s) - decided_s
        for phase, mark in marks.items()
    }
    in_order = sorted(marks, key=lambda phase: done_s[phase])
    reached_s = 0.0
    took: dict[ResizePhase, float] = {}
    for phase in in_order:
        if phase not in _BESIDE:
            took[phase] = max(0.0, done_s[phase] - reached_s)
            reached_s = max(reached_s, done_s[phase])
    slowest = max(took, key=lambda phase: took[phase], default=None)
    for phase in in_order:
        mark = marks[phase]
        yield PhaseSpan(
            phase=phase,
            first_after_s=max(0.0, mark.first_s - decided_s),
            last_after_s=max(0.0, mark.last_s - decided_s),
            count=mark.count,
            took_s=took.get(phase),
            slowest=phase is slowest and took[phase] > 0,
            last_lease_id=mark.last_lease_id,
        )
