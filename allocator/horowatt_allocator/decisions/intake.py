# SPDX-License-Identifier: Apache-2.0
"""What an agent's report changes: nodes, leases, counters, rate windows, pauses, ends of jobs.

A report is a level. One that is repeated, or that arrives after a newer one, changes nothing.

Slots are freed here, and only here. A withdrawn lease is released when its node says that no process
of the worker lives, that the slots file without it is published, and that nobody is about to start
the worker (it was seen before, or the launcher has applied the newer generation or is gone).
"""

from collections.abc import Mapping
from dataclasses import replace

from horowatt.records import (
    AgentReport,
    GpuReport,
    JobReport,
    LauncherKind,
    LauncherState,
    LauncherStatus,
    LeaseReport,
)
from horowatt_allocator.decisions.capacity import STUCK_AFTER_S, is_long_busy
from horowatt_allocator.decisions.draft import Draft
from horowatt_allocator.decisions.measuring import absorb_events, measure
from horowatt_allocator.decisions.reasons import lost_text
from horowatt_allocator.decisions.resizing import backoff_s, losses_within_window, published, with_joined
from horowatt_allocator.records.cluster import Gpu, Node
from horowatt_allocator.records.jobs import ENDED, Job, JobPhase, LeaseState, Reason

STALE_WITHIN_S = 300.0
"""A report this much older than the latest one is a clock that was set back, not a late report."""
ATTACHED_PATIENCE_S = 5.0
"""Time in which a user's ``horovodrun`` has noticed a new hostfile: it looks once a second."""
_LIVING = frozenset({LauncherState.STARTING, LauncherState.RUNNING})
_ABSENT_ENDS = frozenset({LauncherState.LOST, LauncherState.STOPPED})
_VERDICTS = frozenset({LauncherState.FINISHED, LauncherState.FAILED})


def absorb(draft: Draft, report: AgentReport) -> bool:
    """Take a report into the draft. Returns False when its node is unknown or the report is stale."""
    node = draft.nodes.get(report.node)
    if node is None or _is_stale(node, report):
        return False
    _absorb_node(draft, node, report)
    listed = {job_report.job_id: job_report for job_report in report.jobs}
    for job_report in report.jobs:
        if job_report.job_id in draft.jobs:
            _absorb_job(draft, report.node, job_report)
    for job in [job for job in draft.jobs.values() if job.home_node == report.node]:
        if job.phase is JobPhase.STOPPING and job.spec.job_id not in listed:
            draft.put(replace(job, launcher_alive=False))
    _release(draft, report.node, listed)
    return True


def _is_stale(node: Node, report: AgentReport) -> bool:
    return (
        node.agent_id == report.agent_id
        and node.sent_at_s is not None
        and node.sent_at_s - STALE_WITHIN_S < report.sent_at_s < node.sent_at_s
    )


def _absorb_node(draft: Draft, node: Node, report: AgentReport) -> None:
    if node.silent or node.last_seen_s is None:
        draft.decide_because(f"node '{report.node}' reports")
    known = {gpu.uuid: gpu for gpu in node.gpus}
    held = {lease.gpu_uuid for lease in draft.leases.values() if lease.node == report.node}
    gpus = tuple(
        _gpu(gpu, known.get(gpu.uuid), gpu.uuid in held, draft.now)
        for gpu in sorted(report.gpus, key=lambda gpu: gpu.nvml_index)
    )
    was_busy = [
        gpu for gpu in gpus if not gpu.busy and gpu.uuid in known and is_long_busy(known[gpu.uuid], draft.now)
    ]
    if {(gpu.uuid, gpu.lost) for gpu in gpus} != {(gpu.uuid, gpu.lost) for gpu in node.gpus} or was_busy:
        draft.decide_because(f"the GPUs of node '{report.node}' changed")
    acked_seq = node.acked_seq if node.agent_id == report.agent_id else 0
    draft.nodes[report.node] = replace(
        node,
        gpus=gpus,
        last_seen_s=draft.now,
        agent_id=report.agent_id,
        acked_seq=max([acked_seq, *(interval.seq for interval in report.intervals)]),
        isolated=report.isolated,
        notes=report.notes,
        sent_at_s=report.sent_at_s,
        silent=False,
        job_ids=tuple(job.job_id for job in report.jobs),
        drained_job_ids=tuple(job.job_id for job in report.jobs if not job.streams),
    )


def _gpu(report: GpuReport, known: Gpu | None, held: bool, now: float) -> Gpu:
    """Return a GPU as reported; its idle power is the lowest seen while nobody held it."""
    idle_w = known.idle_w if known is not None else None
    busy_since_s = known.busy_since_s if known is not None else None
    if not held and not report.busy and report.power_w is not None:
        idle_w = report.power_w if idle_w is None else min(idle_w, report.power_w)
    return Gpu(
        uuid=report.uuid,
        nvml_index=report.nvml_index,
        gpu_type=report.gpu_type,
        simulated=report.simulated,
        energy_j=report.energy_j,
        power_w=report.power_w,
        idle_w=idle_w,
        limit_w=report.limit_w,
        default_limit_w=report.default_limit_w,
        min_limit_w=report.min_limit_w,
        max_limit_w=report.max_limit_w,
        can_set_limit=report.can_set_limit,
        lost=report.lost,
        sampled_at_s=report.sampled_at_s,
        busy=report.busy,
        busy_since_s=(now if busy_since_s is None else busy_since_s) if report.busy else None,
    )


def _absorb_job(draft: Draft, node: str, report: JobReport) -> None:
    job = draft.jobs[report.job_id]
    if job.phase in ENDED:
        return
    for lease_report in report.leases:
        lease = draft.leases.get(lease_report.lease_id)
        if lease is not None and lease.job_id == report.job_id and lease.node == node:
            _absorb_lease(draft, lease, lease_report)
    if job.home_node == node:
        _absorb_launcher(draft, draft.jobs[report.job_id], report.launcher)
    absorb_events(draft, report.job_id, node, report.streams)
    measure(draft, report.job_id)


def _absorb_lease(draft: Draft, lease: LeaseState, report: LeaseReport) -> None:
    """Update a lease; a worker that started anew in it leaves its old samples with the job."""
    job = draft.jobs[lease.job_id]
    if report.epoch_samples is not None and report.epoch_samples > 0:
        job = replace(job, epoch_samples=max(job.epoch_samples or 0, report.epoch_samples))
    began_anew = 0 < report.steps < lease.steps
    if began_anew:
        past = None if None in {job.past_samples, lease.samples} else job.past_samples
        job = replace(job, past_samples=None if past is None else past + (lease.samples or 0))
    elif (
        report.steps > lease.steps > 0
        # Only steps of one world: the first of a new one ends after the whole pause.
        and report.first_step_end_s is not None
        and report.first_step_end_s == lease.first_step_end_s
        and report.last_step_end_s is not None
        and lease.last_step_end_s is not None
        and report.last_step_end_s > lease.last_step_end_s
    ):
        seconds_s = report.last_step_end_s - lease.last_step_end_s
        job = replace(job, step_s=seconds_s / (report.steps - lease.steps))
    draft.put(job)
    counted = report.steps >= lease.steps or began_anew
    dead = report.started and not report.held and report.exit_code != 0 and lease.withdrawn_s is None
    died_s = lease.died_s if lease.died_s is not None else draft.now
    draft.leases[lease.lease_id] = replace(
        lease,
        held=report.held,
        started=lease.started or report.started,
        rank=report.rank,
        world_size=report.world_size,
        steps=report.steps if counted else lease.steps,
        samples=report.samples if counted else lease.samples,
        first_step_end_s=report.first_step_end_s,
        last_step_end_s=report.last_step_end_s if counted else lease.last_step_end_s,
        exit_code=report.exit_code,
        died_s=died_s if dead else None,
    )


def _absorb_launcher(draft: Draft, job: Job, launcher: LauncherStatus | None) -> None:
    stopping = job.phase is JobPhase.STOPPING
    if launcher is None:
        draft.put(replace(job, launcher_alive=job.launcher_alive and not stopping))
        return
    living = launcher.state in _LIVING
    if launcher.attempt != job.attempt:
        # An earlier start: the present one is yet to come, unless the job stops before.
        draft.put(replace(job, launcher_alive=job.launcher_alive and (living or not stopping)))
        return
    leases = published(job, draft.leases)
    before = {lease.lease_id for lease in leases if lease.generation <= job.generation_applied}
    job = replace(
        job,
        launcher_alive=living,
        generation_applied=max(job.generation_applied, launcher.generation_applied),
        exit_code=launcher.exit_code if not living else job.exit_code,
    )
    after = [lease for lease in leases if lease.generation <= job.generation_applied]
    job = with_joined(job, [lease for lease in after if lease.lease_id not in before])
    draft.put(job)
    if living:
        return
    if job.phase is JobPhase.RUNNING:
        _end(draft, job, launcher)
    elif job.suspension is not None and job.ending is JobPhase.QUEUED and launcher.state in _VERDICTS:
        # The script ended by itself while it was being stopped: there is nothing to go on with.
        ending, reason = _verdict(launcher)
        draft.put(replace(job, ending=ending, reason=reason))
        draft.tell(job.spec.job_id, reason)


def _end(draft: Draft, job: Job, launcher: LauncherStatus) -> None:
    """Act on the launcher's verdict over a job that nobody told to end."""
    ending, reason = _verdict(launcher)
    if ending is JobPhase.FINISHED:
        draft.stop(job, ending, reason, 0 if launcher.exit_code is None else launcher.exit_code)
        return
    if launcher.state not in _ABSENT_ENDS:
        draft.stop(job, ending, reason)
        return
    why = reason.sentence
    if job.spec.launcher is LauncherKind.ATTACHED:
        sentence = f"its horovodrun is gone: {why}"
        draft.stop(job, JobPhase.FAILED, Reason(code="launcher-gone", sentence=sentence))
        return
    policy = draft.policy
    losses_s = (*losses_within_window(job, policy, draft.now), draft.now)
    wait_s = backoff_s(policy, len(losses_s))
    job = replace(job, losses_s=losses_s)
    if len(losses_s) <= policy.max_restarts:
        sentence = f"lost: {why}; start {job.attempt + 1} follows in {wait_s:,.0f} s"
        job = replace(job, not_before_s=draft.now + wait_s)
        draft.stop(job, JobPhase.QUEUED, Reason(code="lost", sentence=sentence))
    else:
        sentence = f"{lost_text(len(losses_s), policy.restart_window_s)}, last: {why}"
        draft.stop(job, JobPhase.FAILED, Reason(code="lost-too-often", sentence=sentence))


def _verdict(launcher: LauncherStatus) -> tuple[JobPhase, Reason]:
    """Return the phase and the reason of a job whose launcher has ended, if it is not to start again."""
    said = " ".join(launcher.message.split())
    if launcher.state is LauncherState.FINISHED:
        said = said or "the script ended"
        return JobPhase.FINISHED, Reason(code=launcher.code or "finished", sentence=said)
    sentence = said or f"the launcher ended as {launcher.state.value}"
    return JobPhase.FAILED, Reason(code=launcher.code or "failed", sentence=sentence)


def _release(draft: Draft, node: str, listed: Mapping[str, JobReport]) -> None:
    withdrawn = [
        lease for lease in draft.leases.values() if lease.node == node and lease.withdrawn_s is not None
    ]
    for lease in withdrawn:
        if _is_free(draft, lease, listed.get(lease.job_id)):
            draft.drop_lease(lease)
            if draft.now - (lease.withdrawn_s or draft.now) > STUCK_AFTER_S:
                draft.decide_because("a slot that was stuck became free")


def _is_free(draft: Draft, lease: LeaseState, report: JobReport | None) -> bool:
    """Return whether no process of a withdrawn lease's worker lives, nor is about to be started."""
    job = draft.jobs[lease.job_id]
    own = [r for r in report.leases if r.lease_id == lease.lease_id] if report is not None else []
    if any(r.held for r in own):
        return False
    if job.phase is JobPhase.STOPPING:
        return not job.launcher_alive and not (report is not None and report.num_published)
    if report is None or report.generation_published < job.generation:
        return False
    if lease.started or not job.launcher_alive or job.generation_applied >= job.generation:
        return True
    patience_s = draft.now - (lease.withdrawn_s or draft.now)
    return job.spec.launcher is LauncherKind.ATTACHED and patience_s >= ATTACHED_PATIENCE_S
