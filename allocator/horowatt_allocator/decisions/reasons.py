# SPDX-License-Identifier: Apache-2.0
"""Why a job has the width it has, or waits: a stable code and a sentence with the figures of the case.

Codes: ``started``, ``grew``, ``shrank``, ``kept``, ``limit``, ``moves``, ``suspended``, ``waits``,
``no-gpus``, ``quota``, ``power-cap``, ``restart-backoff``, ``silent-node``, ``running``, ``worker-died``,
``growth-failed``; and for ends ``finished``, ``failed``, ``lost``, ``lost-too-often``, ``launcher-gone``,
``wall-time``, ``cancelled``, or the launcher's own.

A sentence names another job only to that job's own user.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horowatt_allocator.decisions.capacity import GpuType
from horowatt_allocator.decisions.estimates import countable, same_limit
from horowatt_allocator.decisions.problem import ROW_CAP
from horowatt_allocator.records.cluster import Plan, State
from horowatt_allocator.records.jobs import Column, Job, JobPhase, Reason

SILENT_NODE = "silent-node"
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One decision, as far as its reasons need it.

    Attributes:
        state: Before the decision.
        types: GPUs that were planned with.
        plan: What was decided.
        jobs: In the order of submission.
        needed: Rate that meets the deadline by job id, where one is known, samples per second.
        num_free: GPUs that may be granted now.
        withheld: Why GPUs that nobody holds may not be granted, one entry each.
        now_s: Time of the decision, Unix seconds.
    """

    state: State
    types: Mapping[str, GpuType]
    plan: Plan
    jobs: Sequence[Job]
    needed: Mapping[str, float]
    num_free: int
    withheld: Sequence[str] = ()
    now_s: float = 0.0


def reasons_for(decided: Round) -> dict[str, Reason]:
    """Return the reason of every job whose column changed, and of every job that waits."""
    winner = _winner(decided)
    reasons: dict[str, Reason] = {}
    position = 0
    for job in decided.jobs:
        column = decided.plan.columns[job.spec.job_id]
        if column.width == 0 and job.phase is JobPhase.RUNNING:
            reasons[job.spec.job_id] = _suspended(decided, job, column, winner)
        elif column.width == 0:
            position += 1
            reasons[job.spec.job_id] = _waits(decided, job, position)
        elif job.phase is JobPhase.QUEUED:
            if job.column.width != column.width:
                reasons[job.spec.job_id] = _started(decided, job, column)
        elif column.gpu_type != job.column.gpu_type:
            reasons[job.spec.job_id] = _moves(decided, job, column)
        elif column.width > job.column.width:
            reasons[job.spec.job_id] = _grew(decided, job, column)
        elif column.width < job.column.width:
            reasons[job.spec.job_id] = _shrank(decided, job, column, winner)
        elif not same_limit(column.limit_w, job.column.limit_w):
            reasons[job.spec.job_id] = _limit(decided, job, column)
    return reasons


def silent(job: Job, node: str, seconds_s: float) -> Reason:
    """Return the reason of a running job on a node that does not report."""
    sentence = f"node '{node}' has not reported for {seconds_s:.0f} s; job '{job.spec.name}' is left as it is"
    return Reason(code=SILENT_NODE, sentence=sentence)


def rate_text(before: Column, after: Column, job: Job) -> str:
    """Return what a change of column is expected to do to the rate, in words."""
    if not countable(job):
        return "its samples cannot be counted, so assumed rates are kept"
    if after.nominal:
        return "its rate is not known yet"
    if before.width == 0 or before.nominal:
        return f"{after.rate_per_s:,.0f} samples/s expected"
    now_per_s = job.rate_per_s if job.rate_per_s is not None else before.rate_per_s
    more = (after.width, after.limit_w or 0.0) >= (before.width, before.limit_w or 0.0)
    if (after.rate_per_s >= now_per_s) is not more:
        # Now is a moment, expected is an estimate: side by side they would say the opposite of why.
        return f"{after.rate_per_s:,.0f} samples/s expected"
    return f"{now_per_s:,.0f} → {after.rate_per_s:,.0f} samples/s expected"


def _winner(decided: Round) -> tuple[Job, Column] | None:
    """Return the job that gains most clearly by this decision: a late one, a starting one, a growing one."""
    gains = [
        (job, decided.plan.columns[job.spec.job_id])
        for job in decided.jobs
        if decided.plan.columns[job.spec.job_id].width > job.column.width
    ]
    if not gains:
        return None
    return min(gains, key=lambda gain: (gain[0].spec.deadline_s is None, gain[0].column.width > 0))


def lost_text(times: int, window_s: float) -> str:
    """Return in words how often a job was lost within the window, seconds."""
    often = {1: "once", 2: "twice"}.get(times, f"{times} times")
    window = "hour" if window_s == _HOUR_S else f"{window_s:,.0f} s"
    return f"lost {often} in the last {window}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _free(decided: Round, wanted: int) -> str:
    if decided.num_free >= wanted:
        total = sum(gpu_type.num_gpus for gpu_type in decided.types.values())
        return (
            f"{decided.num_free} of {counted(total, 'GPU')} {'was' if decided.num_free == 1 else 'were'} free"
        )
    lacking = wanted - decided.num_free
    return f"{counted(lacking, 'GPU')} {'comes' if lacking == 1 else 'come'} from other jobs"


def _deadline(decided: Round, job: Job, column: Column) -> str:
    needed = decided.needed.get(job.spec.job_id)
    if needed is None or column.nominal:
        return ""
    if column.rate_per_s >= needed:
        return f"; its deadline needs {needed:,.0f}"
    return f"; its deadline needs {needed:,.0f} and will be missed"


def _started(decided: Round, job: Job, column: Column) -> Reason:
    sentence = (
        f"starts on {column.width} {column.gpu_type}: {rate_text(job.column, column, job)}, "
        f"{_free(decided, column.width)}{_deadline(decided, job, column)}"
    )
    return Reason(code="started", sentence=sentence)


def _grew(decided: Round, job: Job, column: Column) -> Reason:
    grown = column.width - job.column.width
    sentence = (
        f"grew {job.column.width} → {column.width}: {rate_text(job.column, column, job)}, "
        f"{_free(decided, grown)}{_deadline(decided, job, column)}"
    )
    return Reason(code="grew", sentence=sentence)


def _shrank(decided: Round, job: Job, column: Column, winner: tuple[Job, Column] | None) -> Reason:
    if column.width == job.width:
        sentence = f"stays on {counted(job.width, 'GPU')}: growing to {job.column.width} was called off"
        return Reason(code="kept", sentence=sentence)
    head = f"shrank {job.column.width} → {column.width}: "
    why = why_less(decided, job, winner)
    if not why:
        saved_w = job.column.marginal_w - column.marginal_w
        why = f"the last {counted(job.column.width - column.width, 'GPU')} brought too little" + (
            f" for {saved_w:,.0f} W" if saved_w > 0 else ""
        )
    return Reason(code="shrank", sentence=f"{head}{why}; {rate_text(job.column, column, job)}")


def why_less(decided: Round, job: Job, winner: tuple[Job, Column] | None) -> str:
    """Return who or what takes GPUs from a job, or an empty string when it is the job's own worth."""
    if winner is not None:
        other, gained = winner
        who = f"job '{other.spec.name}'" if other.spec.uid == job.spec.uid else "another user's job"
        num_gpus = counted(gained.width, "GPU")
        if other.spec.deadline_s is not None:
            return f"{who} needs {num_gpus} to meet its deadline"
        if other.column.width == 0:
            return f"{who} starts on {num_gpus}"
        return f"{who} gains more from {num_gpus}"
    if ROW_CAP in decided.plan.binding or ROW_CAP in decided.plan.violations:
        return f"the power cap of {decided.state.policy.cap_w:,.0f} W binds"
    return ""


def _suspended(decided: Round, job: Job, column: Column, winner: tuple[Job, Column] | None) -> Reason:
    saved_w = job.column.marginal_w - column.marginal_w
    why = why_less(decided, job, winner) or f"the plan saves its {saved_w:,.0f} W"
    sentence = f"suspended on {counted(job.width, 'GPU')}, to go on from its commit: {why}"
    return Reason(code="suspended", sentence=sentence)


def _moves(decided: Round, job: Job, column: Column) -> Reason:
    before = job.column if job.leaving is None else job.leaving
    if before.gpu_type == column.gpu_type:
        sentence = f"stays on {job.width} {column.gpu_type}: moving to {job.column.gpu_type} was called off"
        return Reason(code="kept", sentence=sentence)
    sentence = (
        f"moves from {job.width} {before.gpu_type} to {column.width} {column.gpu_type}: "
        f"{rate_text(before, column, job)}, {_free(decided, column.width)}{_deadline(decided, job, column)}"
    )
    return Reason(code="moves", sentence=sentence)


def _limit(decided: Round, job: Job, column: Column) -> Reason:
    def watts(limit_w: float | None) -> str:
        return "default" if limit_w is None else f"{limit_w:,.0f}"

    change_w = column.marginal_w - job.column.marginal_w
    sentence = (
        f"power limit {watts(job.column.limit_w)} → {watts(column.limit_w)} W: "
        f"{rate_text(job.column, column, job)}, {change_w:+,.0f} W{_deadline(decided, job, column)}"
    )
    return Reason(code="limit", sentence=sentence)


def _waits(decided: Round, job: Job, position: int) -> Reason:
    tail = f"; position {position}"
    if decided.now_s < job.not_before_s and job.suspension is None and job.losses_s:
        wait_s = job.not_before_s - decided.now_s
        often = lost_text(len(job.losses_s), decided.state.policy.restart_window_s)
        sentence = f"waits {wait_s:,.0f} s before start {job.attempt + 1}: {often}{tail}"
        return Reason(code="restart-backoff", sentence=sentence)
    if job.suspension is None:
        return _lacks(decided, job, tail)
    if decided.now_s < job.not_before_s:
        wait = f"waits {job.not_before_s - decided.now_s:,.0f} s before it may start again{tail}"
    else:
        wait = _lacks(decided, job, tail).sentence
    sentence = f"suspended {decided.now_s - job.suspension.since_s:,.0f} s ago, {job.suspension.why}; {wait}"
    return Reason(code="suspended", sentence=sentence)


def _lacks(decided: Round, job: Job, tail: str) -> Reason:
    """Return what a queued job waits for."""
    legal = job.spec.legal_widths[0]
    accepted = job.spec.gpu_types
    usable = sum(t.num_gpus for name, t in decided.types.items() if not accepted or name in accepted)
    wanted = f" {' or '.join(accepted)}" if accepted else ""
    tenant = decided.state.tenants.get(job.spec.tenant)
    if usable < legal:
        held_back = len(decided.withheld)
        why = f", {held_back} may not be given now ({decided.withheld[0]})" if held_back else ""
        lack = f"needs {counted(legal, f'{wanted} GPU'.strip())}, {usable} can be reached{why}"
        sentence = f"waits: {lack}{tail}"
        return Reason(code="no-gpus", sentence=sentence)
    if tenant is not None and tenant.gpu_quota is not None and f"quota {tenant.name}" in decided.plan.binding:
        sentence = f"waits: the quota of tenant '{tenant.name}' is {tenant.gpu_quota} GPUs{tail}"
        return Reason(code="quota", sentence=sentence)
    used = sum(column.width for column in decided.plan.columns.values())
    if used + legal <= usable:
        if ROW_CAP in decided.plan.binding or ROW_CAP in decided.plan.violations:
            sentence = f"waits: the power cap of {decided.state.policy.cap_w:,.0f} W leaves no room{tail}"
            return Reason(code="power-cap", sentence=sentence)
        patience = f"{decided.state.policy.max_wait_s:,.0f} s of its submission"
        sentence = f"waits: the plan saves its power; it must start within {patience}{tail}"
        return Reason(code="waits", sentence=sentence)
    if used >= usable:
        taken = "the only GPU is taken" if usable == 1 else f"all {usable} GPUs are taken"
        return Reason(code="waits", sentence=f"waits: {taken}{tail}")
    sentence = f"waits: needs {counted(legal, 'GPU')}, {usable - used} of {usable} are left{tail}"
    return Reason(code="waits", sentence=sentence)
