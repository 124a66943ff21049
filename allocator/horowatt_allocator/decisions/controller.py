# SPDX-License-Identifier: Apache-2.0
"""The controller: ``step(state, event, now) -> (state, actions)``, and what follows from a state alone.

Life of a job::

    QUEUED -> RUNNING -> STOPPING -> FINISHED | FAILED | CANCELLED
       ^                    |
       +------- lost -------+     at most ``max_restarts`` times

Slots change hands in two moves: a generation that takes slots away is published at once, one that
adds slots only when all of them are free. Decisions are made when something happened that the plan did not
assume, at most once per :data:`COALESCE_S`, and at least every ``decide_every_s`` while jobs are active.
The order within a step: take the event in, watch the clock, decide, publish what can be published.

Known limitations: a running job is never suspended or migrated; a job whose node never comes back stays
as it is until it is cancelled and the node reports.
"""

from dataclasses import replace

from horowatt.records import LauncherKind
from horowatt_allocator.decisions import program
from horowatt_allocator.decisions.capacity import free_slots, gpu_types, is_alive
from horowatt_allocator.decisions.columns import predictor_for
from horowatt_allocator.decisions.draft import Draft
from horowatt_allocator.decisions.estimates import same_limit
from horowatt_allocator.decisions.intake import absorb
from horowatt_allocator.decisions.invariants import check_invariants
from horowatt_allocator.decisions.ordering import orders
from horowatt_allocator.decisions.placement import place, without
from horowatt_allocator.decisions.posing import active_jobs, pose
from horowatt_allocator.decisions.problem import Problem, present_choice, same_column
from horowatt_allocator.decisions.reasons import SILENT_NODE, Round, reasons_for, silent
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
from horowatt_allocator.records.jobs import ENDED, Column, Job, JobPhase, Reason

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
        if job.phase is not JobPhase.RUNNING:
            continue
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
    leases = [draft.leases[lease_id] for lease_id in job.lease_ids]
    dead = [
        lease.lease_id
        for lease in leases
        if lease.died_s is not None and draft.now >= lease.died_s + DEAD_GRACE_S
    ]
    legal = [width for width in job.spec.legal_widths if width <= job.width - len(dead)]
    if dead and legal:
        _go_on_without(draft, job, dead, legal[-1])


def _go_on_without(draft: Draft, job: Job, dead: list[str], width: int) -> None:
    """Publish a generation without dead workers; below the minimum it is the launcher's to judge."""
    layout = without(job, draft.leases, dead, width)
    sentence = f"went on with {width} of {job.width} workers: {len(dead)} died"
    gpu_type = gpu_types(draft.view(), draft.now).get(job.column.gpu_type or "")
    column = (
        replace(job.column, width=width)
        if gpu_type is None
        else predictor_for(job, draft.view(), gpu_type).column(width, job.column.limit_w)
    )
    job = replace(job, column=column)
    draft.publish(job, layout.keep, layout.drop, (), Reason(code="worker-died", sentence=sentence))
    draft.decide_because(f"a worker of job '{job.spec.name}' died")


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
    if reason is not None:
        only_limit = job.phase is JobPhase.RUNNING and column.width == job.column.width
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
    targets = {
        job_id: job.column
        for job_id, job in draft.jobs.items()
        if job.phase in {JobPhase.QUEUED, JobPhase.RUNNING} and job.column.width not in {0, job.width}
    }
    if not targets:
        return
    for layout in place(draft.view(), targets, draft.now).layouts:
        if layout.num_missing == 0:
            job = draft.jobs[layout.job_id]
            draft.publish(job, layout.keep, layout.drop, layout.add, job.reason)


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
    return before.width != after.width or not same_limit(before.limit_w, after.limit_w)
