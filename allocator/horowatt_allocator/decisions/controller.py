# SPDX-License-Identifier: Apache-2.0
"""The controller: ``step(state, event, now) -> (state, actions)``, and what follows from a state alone.

Life of a job::

    QUEUED -> RUNNING -> STOPPING -> FINISHED | FAILED | CANCELLED
       ^                    |
       +- lost, suspended --+     lost at most ``max_restarts`` times in ``restart_window_s``

Slots change hands in two moves: a generation that takes slots away is published at once, one that
adds slots only when all of them are free and the generation before is applied. New workers that do not join
are withdrawn, and others tried later. A running job that has made a durable commit may be suspended; one that
moves to another GPU type holds old and new slots until the new workers train.

Decisions are made when something happened that the plan did not assume, at most once per
:data:`COALESCE_S`, and at least every ``decide_every_s`` while jobs are active.
The order within a step: take the event in, watch the clock, decide, publish what can be published.

Known limitations: a job whose node never comes back stays as it is until it is cancelled and the node
reports; jobs move for the sake of a GPU type, never to be closer together.
"""

from collections.abc import Sequence
from dataclasses import replace

from horowatt.records import LauncherKind
from horowatt_allocator.decisions import program
from horowatt_allocator.decisions.capacity import free_slots, gpu_types, is_alive, withheld
from horowatt_allocator.decisions.columns import predictor_for
from horowatt_allocator.decisions.draft import Draft
from horowatt_allocator.decisions.estimates import same_limit
from horowatt_allocator.decisions.intake import absorb
from horowatt_allocator.decisions.invariants import check_invariants
from horowatt_allocator.decisions.ordering import orders
from horowatt_allocator.decisions.placement import Layout, place, without
from horowatt_allocator.decisions.posing import active_jobs, pose
from horowatt_allocator.decisions.problem import Problem, present_choice, same_column
from horowatt_allocator.decisions.reasons import SILENT_NODE, Round, counted, reasons_for, silent
from horowatt_allocator.decisions.resizing import (
    MAX_BACKOFF_S,
    backoff_s,
    can_stop,
    failed_standbys,
    has_joined,
    held_type,
    in_flight,
    is_union,
    outgoing,
    overlap,
    pending,
    published,
    with_failed_gpus,
)
from horowatt_allocator.records.cluster import (
    Action,
    AgentReported,
    CancelRequested,
    Change,
    Decision,
    Event,
    JobSubmitted,
    Plan,
    State,
)
from horowatt_allocator.records.jobs import ENDED, Column, Job, JobPhase, LeaseState, Reason

__all__ = ["check_invariants", "next_due", "orders", "step"]

COALESCE_S = 1.0
"""Decisions are at least this far apart, so that what happens together is decided together."""
DEAD_GRACE_S = 10.0
"""Time in which the launcher may still give its verdict over a worker that died."""


def step(
    state: State, event: Event, now: float, solve: program.Solve = program.solve
) -> tuple[State, tuple[Action, ...]]:
    """Return the state after an event, and what is to be stored with it.

    Args:
        state: Before the event; not changed.
        event: What happened; any event may be repeated.
        now: Unix time of the head's clock, seconds; must not go back.
        solve: Solver of the program.
    """
    draft = Draft(state, now)
    if isinstance(event, JobSubmitted):
        _submit(draft, event)
    elif isinstance(event, CancelRequested):
        _cancel(draft, event)
    elif isinstance(event, AgentReported):
        absorb(draft, event.report)
    _watch(draft)
    if _decision_is_due(draft):
        _decide(draft, solve)
    _publish(draft)
    return draft.freeze(), tuple(draft.actions)


def next_due(state: State, now: float) -> float:
    """Return when a Tick is due at the latest, Unix seconds, at least ``now``."""
    policy = state.policy
    last_s = state.last_decision_s
    due = [now + policy.decide_every_s]
    active = [job for job in state.jobs.values() if job.phase not in ENDED]
    if state.needs_decision:
        due.append(now if last_s is None else last_s + COALESCE_S)
    if active and last_s is not None:
        due.append(last_s + policy.decide_every_s)
    due += [
        node.last_seen_s + policy.agent_timeout_s
        for node in state.nodes.values()
        if node.last_seen_s is not None and not node.silent
    ]
    for job in active:
        due += [at_s for at_s in (job.not_before_s, job.grow_not_before_s) if at_s > now]
        if job.phase is not JobPhase.RUNNING:
            continue
        if waiting := pending(job, state.leases):
            overdue_s = _overdue_s(job, waiting, policy.resize_deadline_s)
            due += [overdue_s] if overdue_s > now else []
        if job.spec.wall_time_limit_s is not None and job.started_s is not None:
            due.append(job.started_s + job.spec.wall_time_limit_s)
        died = [state.leases[lease_id].died_s for lease_id in job.lease_ids if lease_id in state.leases]
        graces = [died_s + DEAD_GRACE_S for died_s in died if died_s is not None]
        due += [grace_s for grace_s in graces if grace_s > now]
    return max(now, min(due))


def _submit(draft: Draft, event: JobSubmitted) -> None:
    if event.spec.job_id in draft.jobs:
        return
    job = Job(spec=event.spec, phase=JobPhase.QUEUED)
    draft.put(job)
    draft.tell(event.spec.job_id, Reason(code="submitted", sentence=f"submitted by {event.spec.username}"))
    draft.decide_because(f"job '{event.spec.name}' was submitted")


def _cancel(draft: Draft, event: CancelRequested) -> None:
    job = draft.jobs.get(event.job_id)
    if job is None or job.phase in ENDED:
        return
    reason = Reason(code="cancelled", sentence=f"cancelled by {event.by}")
    if job.phase is JobPhase.RUNNING:
        draft.stop(job, JobPhase.CANCELLED, reason)
    elif job.phase is JobPhase.QUEUED:
        draft.settle(replace(job, ending=JobPhase.CANCELLED, reason=reason))
        draft.tell(event.job_id, reason)
    elif job.ending is JobPhase.QUEUED:
        draft.put(replace(job, ending=JobPhase.CANCELLED, reason=reason))
        draft.tell(event.job_id, reason)


def _watch(draft: Draft) -> None:
    """Act on what time alone brings, and end the jobs whose slots are free."""
    for name, node in list(draft.nodes.items()):
        if node.last_seen_s is not None and not node.silent and not is_alive(node, draft.now, draft.policy):
            draft.nodes[name] = replace(node, silent=True)
            draft.decide_because(f"node '{name}' went silent")
    for job in list(draft.jobs.values()):
        if job.phase is JobPhase.RUNNING:
            _watch_running(draft, job)
        elif job.phase is JobPhase.QUEUED and 0 < job.not_before_s <= draft.now:
            draft.put(replace(job, not_before_s=0.0))
            draft.decide_because(f"job '{job.spec.name}' may start again")
        elif job.phase is JobPhase.STOPPING:
            held = draft.leases_of(job.spec.job_id)
            if not held and not job.launcher_alive:
                draft.settle(job)


def _watch_running(draft: Draft, job: Job) -> None:
    limit_s = job.spec.wall_time_limit_s
    if limit_s is not None and job.started_s is not None and draft.now >= job.started_s + limit_s:
        sentence = f"its wall-time limit of {limit_s:,.0f} s has passed"
        draft.stop(job, JobPhase.FAILED, Reason(code="wall-time", sentence=sentence))
        return
    if job.spec.launcher is LauncherKind.ATTACHED:
        return
    if 0 < job.grow_not_before_s <= draft.now:
        job = replace(job, grow_not_before_s=0.0)
        draft.put(job)
        draft.decide_because(f"job '{job.spec.name}' may grow again")
    waiting = pending(job, draft.leases)
    failed = {lease.lease_id: why for lease in waiting if (why := _failure(draft, job, lease))}
    if failed:
        _withdraw(draft, job, [lease for lease in waiting if lease.lease_id in failed], failed)
        return
    if waiting and draft.now >= _overdue_s(job, waiting, draft.policy.resize_deadline_s):
        _withdraw(draft, job, waiting, {})
        return
    dead = [
        lease.lease_id
        for lease in published(job, draft.leases)
        if lease.died_s is not None and draft.now >= lease.died_s + DEAD_GRACE_S
    ]
    legal = [width for width in job.spec.legal_widths if width <= job.width - len(dead)]
    left = [lease for lease in published(job, draft.leases) if lease.lease_id not in dead]
    goes_on = not job.generation_applied or any(has_joined(job, lease) for lease in left)
    if dead and legal and goes_on:
        _go_on_without(draft, job, dead, legal[-1])


def _overdue_s(job: Job, waiting: Sequence[LeaseState], deadline_s: float) -> float:
    """Return when the patience with pending grants ends, Unix seconds."""
    return max([job.attempt_s or 0.0, *(lease.granted_s for lease in waiting)]) + deadline_s


def _failure(draft: Draft, job: Job, lease: LeaseState) -> str:
    """Return why the worker of a pending grant will not join, or an empty string."""
    said = failed_standbys(job)
    if lease.lease_id in said:
        return said[lease.lease_id] or "it failed"
    if lease.started and not lease.held and lease.exit_code is not None:
        return f"it ended with exit code {lease.exit_code} before it joined"
    if lease.died_s is not None and draft.now >= lease.died_s + DEAD_GRACE_S:
        return "it ended before it joined"
    return ""


def _withdraw(draft: Draft, job: Job, gone: Sequence[LeaseState], failed: dict[str, str]) -> None:
    """Take pending grants back, the job trains on; grow again after a wait, and not on GPUs that failed.

    Args:
        draft: The draft.
        job: Whose grants.
        gone: Grants to take back; a move is given up as a whole.
        failed: Why workers failed, by lease; empty when they only took too long.
    """
    if is_union(job, draft.leases):
        gone = [lease for lease in published(job, draft.leases) if not has_joined(job, lease)]
    legal = [width for width in job.spec.legal_widths if width <= job.width - len(gone)]
    if not legal:
        return
    failures = job.growth_failures + 1
    wait_s = backoff_s(draft.policy, failures)
    uuids = [lease.gpu_uuid for lease in gone if lease.lease_id in failed]
    job = with_failed_gpus(job, uuids, draft.now)
    job = replace(job, growth_failures=failures, grow_not_before_s=draft.now + wait_s)
    if failed:
        lease = next(lease for lease in gone if lease.lease_id in failed)
        gpu = f"GPU {lease.gpu_uuid} of node '{lease.node}'"
        what = f"the new worker on {gpu} failed: {failed[lease.lease_id]}"
    else:
        what = f"new workers did not join within {draft.policy.resize_deadline_s:,.0f} s"
    again = f"grows again in {wait_s:,.0f} s at the earliest"
    layout = without(job, draft.leases, [lease.lease_id for lease in gone], legal[-1])
    sentence = f"stays on {counted(legal[-1], 'GPU')}: {what}; {again}"
    _go_on(draft, job, layout, Reason(code="growth-failed", sentence=sentence))
    draft.decide_because(f"job '{job.spec.name}' could not grow")


def _go_on_without(draft: Draft, job: Job, dead: list[str], width: int) -> None:
    """Publish a generation without dead workers.

    Below the minimum, or when only workers that have not joined would be left, it is the launcher's to judge.
    """
    layout = without(job, draft.leases, dead, width)
    sentence = f"went on with {width} of {job.width} workers: {len(dead)} died"
    _go_on(draft, job, layout, Reason(code="worker-died", sentence=sentence))
    draft.decide_because(f"a worker of job '{job.spec.name}' died")


def _go_on(draft: Draft, job: Job, layout: Layout, reason: Reason) -> None:
    """Publish the rest of a job's leases, with a target that fits them."""
    types = {draft.leases[lease_id].gpu_type for lease_id in layout.keep}
    leaving: Column | None = job.leaving
    column = job.column
    if leaving is not None and column.gpu_type not in types:
        # The new type is lost: back to the old one.
        column, leaving = leaving, None
    elif leaving is not None and leaving.gpu_type not in types:
        leaving = None
    if leaving is None or len(types) == 1:
        width = len(layout.keep)
        gpu_type = gpu_types(draft.view(), draft.now).get(column.gpu_type or "")
        column = (
            replace(column, width=width)
            if gpu_type is None
            else predictor_for(job, draft.view(), gpu_type).column(width, column.limit_w)
        )
    job = replace(job, column=column, leaving=leaving)
    draft.publish(job, layout.keep, layout.drop, (), reason)


def _decision_is_due(draft: Draft) -> bool:
    last_s = draft.last_decision_s
    if last_s is not None and draft.now < last_s + COALESCE_S:
        return False
    if draft.needs_decision:
        return True
    active = any(job.phase not in ENDED for job in draft.jobs.values())
    return active and (last_s is None or draft.now >= last_s + draft.policy.decide_every_s)


def _decide(draft: Draft, solve: program.Solve) -> None:
    state = draft.view()
    trigger = draft.needs_decision or f"{draft.policy.decide_every_s:.0f} s passed"
    types = gpu_types(state, draft.now)
    jobs = active_jobs(state)
    problem = pose(state, types, jobs, draft.now)
    plan = _checked(problem, solve(problem, draft.policy.solve_limit_s))
    decided = Round(
        state=state,
        types=types,
        plan=plan,
        jobs=jobs,
        needed={c.job_id: c.needed_rate_per_s for c in problem.jobs if c.needed_rate_per_s is not None},
        num_free=len(free_slots(state, draft.now)),
        withheld=tuple(
            f"GPU {uuid} of node '{node}': {why}" for (node, uuid), why in withheld(state, draft.now).items()
        ),
        now_s=draft.now,
    )
    reasons = reasons_for(decided)
    changes = tuple(
        _change(job, plan.columns[job.spec.job_id], reasons[job.spec.job_id])
        for job in jobs
        if _differs(job.column, plan.columns[job.spec.job_id]) and job.spec.job_id in reasons
    )
    for job in jobs:
        _retarget(draft, job, plan.columns[job.spec.job_id], reasons.get(job.spec.job_id))
    draft.plan = plan
    draft.needs_decision = ""
    draft.last_decision_s = draft.now
    draft.num_decisions += 1
    draft.record(
        Decision(
            number=draft.num_decisions,
            at_s=draft.now,
            trigger=trigger,
            plan_status=plan.status,
            value=plan.value,
            bound=plan.bound,
            power_w=plan.power_w,
            cap_w=draft.policy.cap_w,
            binding=plan.binding,
            violations=plan.violations,
            solve_s=plan.solve_s,
            changes=changes,
        )
    )


def _checked(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with columns that were really offered: a solver is never believed."""
    columns: dict[str, Column] = {}
    for job, stays in zip(problem.jobs, present_choice(problem), strict=True):
        wanted = plan.columns.get(job.job_id)
        offered = [c.column for c in job.candidates]
        found = [column for column in offered if wanted is not None and same_column(column, wanted)]
        columns[job.job_id] = found[0] if found else offered[stays]
    return replace(plan, columns=columns)


def _retarget(draft: Draft, job: Job, column: Column, reason: Reason | None) -> None:
    """Give a job its new column; its slots follow when they can."""
    if job.phase is JobPhase.RUNNING and column.width == 0:
        reason = reason or Reason(code="suspended", sentence="suspended, to go on from its commit")
        why = reason.sentence.partition(": ")[2]
        draft.suspend(job, reason, why, draft.policy.dwell_s)
        return
    present = held_type(job, draft.leases)
    if job.phase is JobPhase.RUNNING and present is not None:
        moves = column.gpu_type != present
        job = replace(job, leaving=(job.leaving or job.column) if moves else None)
    if reason is not None:
        same_type = column.gpu_type == job.column.gpu_type
        only_limit = job.phase is JobPhase.RUNNING and column.width == job.column.width and same_type
        begins_to_wait = column.width == 0 and reason.code != job.reason.code
        if only_limit or begins_to_wait:
            draft.tell(job.spec.job_id, reason)
    silent_node = _silent_node(draft, job)
    if silent_node is not None:
        reason = silent_node
    elif reason is None and job.reason.code == SILENT_NODE:
        reason = Reason(code="running", sentence=f"trains on {job.width} GPUs; its nodes report again")
    draft.put(replace(job, column=column, reason=reason or job.reason))


def _silent_node(draft: Draft, job: Job) -> Reason | None:
    if job.phase is not JobPhase.RUNNING:
        return None
    nodes = [draft.leases[lease_id].node for lease_id in job.lease_ids]
    for name in dict.fromkeys([*nodes, *([job.home_node] if job.home_node else [])]):
        node = draft.nodes.get(name)
        if node is not None and node.silent and node.last_seen_s is not None:
            return silent(job, name, draft.now - node.last_seen_s)
    return None


def _publish(draft: Draft) -> None:
    """Publish what the targets ask for and the slots allow."""
    targets = {job_id: job.column for job_id, job in draft.jobs.items() if _may_publish(draft, job)}
    if not targets:
        return
    for layout in place(draft.view(), targets, draft.now).layouts:
        if layout.num_missing > 0:
            continue
        job = draft.jobs[layout.job_id]
        if job.leaving is not None and layout.add:
            _move(draft, job, layout)
            continue
        kept = {draft.leases[lease_id].gpu_type for lease_id in layout.keep}
        if job.leaving is not None and job.leaving.gpu_type not in kept:
            # Arrived: more of the new type is an ordinary growth.
            job = replace(job, leaving=None)
            draft.decide_because(f"job '{job.spec.name}' has moved to {job.column.gpu_type}")
        draft.publish(job, layout.keep, layout.drop, layout.add, job.reason)


def _may_publish(draft: Draft, job: Job) -> bool:
    """Return whether a job's slots differ from its target, and the difference may be published now."""
    column = job.column
    if job.phase not in {JobPhase.QUEUED, JobPhase.RUNNING} or column.width == 0:
        return False
    if job.phase is JobPhase.QUEUED:
        return True
    if outgoing(job, draft.leases):
        return not in_flight(job)
    # Growth that comes faster than the launcher can apply it is put together; what is taken back is not.
    return column.width < job.width or (column.width > job.width and not in_flight(job))


def _move(draft: Draft, job: Job, layout: Layout) -> None:
    """Publish old and new slots of a job that moves to another GPU type, or stop it where that cannot be."""
    name, column = job.spec.name, job.column
    tenant, plan = draft.tenants.get(job.spec.tenant), draft.plan
    held = sum(other.width for other in draft.jobs.values() if other.spec.tenant == job.spec.tenant)
    over_quota = (
        tenant is not None and tenant.gpu_quota is not None and held + len(layout.add) > tenant.gpu_quota
    )
    both_w = sum(watts for _, watts in overlap(draft.view()).values()) + (
        job.leaving.marginal_w if job.leaving is not None else 0.0
    )
    cap_w = draft.policy.cap_w
    over_cap = cap_w is not None and plan is not None and plan.power_w + both_w > cap_w
    if not (layout.must_stop or over_quota or over_cap):
        draft.publish(job, layout.keep, layout.drop, layout.add, job.reason)
        return
    if can_stop(job):
        why = f"to move to {counted(column.width, 'GPU')} of type {column.gpu_type}"
        sentence = f"suspended, to go on from its commit: {why}"
        draft.suspend(job, Reason(code="suspended", sentence=sentence), why, 0.0)
        return
    why = "its tenant's quota" if over_quota else "the power cap" if over_cap else "its legal widths"
    sentence = f"stays on {counted(job.width, 'GPU')}: {why} leaves no room for old and new workers"
    draft.put(
        replace(
            job,
            column=job.leaving or column,
            leaving=None,
            reason=Reason(code="kept", sentence=sentence),
            grow_not_before_s=draft.now + MAX_BACKOFF_S,
        )
    )
    draft.decide_because(f"job '{name}' cannot move")


def _change(job: Job, column: Column, reason: Reason) -> Change:
    return Change(
        job_id=job.spec.job_id,
        name=job.spec.name,
        width_before=job.column.width,
        width_after=column.width,
        limit_before_w=job.column.limit_w,
        limit_after_w=column.limit_w,
        reason=reason,
    )


def _differs(before: Column, after: Column) -> bool:
    moved = before.width > 0 and after.width > 0 and before.gpu_type != after.gpu_type
    return moved or before.width != after.width or not same_limit(before.limit_w, after.limit_w)
