# SPDX-License-Identifier: Apache-2.0
"""Orders to an agent, derived from the state alone: the whole desired state of its node."""

from collections.abc import Mapping

from horowatt.records import AgentOrders, JobOrder, LaunchSpec, Lease, SlotsFile
from horowatt_allocator.records.cluster import Gpu, Node, State
from horowatt_allocator.records.jobs import ENDED, Job, JobPhase, JobSpec, LeaseState

REPORT_EVERY_S = 1.0
"""Agents call this often on small clusters."""
MAX_REPORTS_PER_S = 100.0
"""Agents of large clusters call less often, so that together they stay below this."""


def orders(
    state: State,
    node: str,
    streams: Mapping[str, Mapping[str, int]],
    acked_seq: int,
    now: float,
) -> AgentOrders:
    """Return what a node is to do.

    Named are the jobs with a lease there, those whose launcher runs there, and ended ones that
    still have a folder there. A node that the state does not know gets no orders.

    Args:
        state: Everything.
        node: Name of the node.
        streams: Offsets (bytes) up to which the streams of each job of this node are held, by job id.
        acked_seq: Every interval of this agent up to this one is in the ledger.
        now: Unix time, seconds: a suspension that takes longer than ``resize_deadline_s`` becomes a stop.
    """
    here = state.nodes.get(node)
    if here is None:
        return AgentOrders(acked_seq=acked_seq, jobs=(), limits_w={}, report_after_s=REPORT_EVERY_S)
    leases = [lease for lease in state.leases.values() if lease.node == node and lease.released_s is None]
    names = dict.fromkeys(lease.job_id for lease in leases)
    names.update(
        dict.fromkeys(
            job_id
            for job_id, job in state.jobs.items()
            if (job.home_node == node and job.phase not in ENDED)
            or (job.phase in ENDED and job_id in here.job_ids)
        )
    )
    return AgentOrders(
        acked_seq=acked_seq,
        jobs=tuple(
            _order(state, here, node, state.jobs[job_id], streams.get(job_id, {}), now)
            for job_id in sorted(names)
        ),
        limits_w=_limits_w(state, here, leases),
        report_after_s=max(REPORT_EVERY_S, len(state.nodes) / MAX_REPORTS_PER_S),
    )


def launch_spec(spec: JobSpec) -> LaunchSpec:
    """Return what a node needs to run a job."""
    return LaunchSpec(
        job_id=spec.job_id,
        name=spec.name,
        tenant=spec.tenant,
        uid=spec.uid,
        gid=spec.gid,
        username=spec.username,
        launcher=spec.launcher,
        command=spec.command,
        environment=spec.environment,
        working_dir=spec.working_dir,
        virtual_env=spec.virtual_env,
        min_width=spec.legal_widths[0],
        max_width=spec.legal_widths[-1],
        batch_rule=spec.batch_rule,
        batch_size=spec.batch_size,
    )


def _order(state: State, here: Node, node: str, job: Job, streams: Mapping[str, int], now: float) -> JobOrder:
    job_id = job.spec.job_id
    return JobOrder(
        job_id=job_id,
        run=job.phase is JobPhase.RUNNING,
        forget=job.phase in ENDED and job_id in here.drained_job_ids,
        launcher_here=job.home_node == node,
        attempt=job.attempt,
        spec=launch_spec(job.spec),
        slots=_slots(state, job),
        streams=dict(streams),
        suspend=(
            job.phase is JobPhase.STOPPING
            and job.ending is JobPhase.QUEUED
            and job.suspension is not None
            and now < job.suspension.since_s + state.policy.resize_deadline_s
        ),
    )


def _slots(state: State, job: Job) -> SlotsFile:
    return SlotsFile(
        job_id=job.spec.job_id,
        generation=job.generation,
        uid=job.spec.uid,
        leases=tuple(
            _lease(state, state.leases[lease_id]) for lease_id in job.lease_ids if lease_id in state.leases
        ),
        published_at_s=job.generations[-1].published_s if job.generations else 0.0,
    )


def _lease(state: State, lease: LeaseState) -> Lease:
    node = state.nodes.get(lease.node)
    return Lease(
        lease_id=lease.lease_id,
        job_id=lease.job_id,
        node=lease.node,
        address=node.spec.address if node is not None else lease.node,
        gpu_uuid=lease.gpu_uuid,
        gpu_type=lease.gpu_type,
        slot_index=lease.slot_index,
        simulated=lease.simulated,
    )


def _limits_w(state: State, here: Node, leases: list[LeaseState]) -> dict[str, float]:
    """Return the limit of each GPU that a running job holds and that lets its limit be set, W."""
    gpus: dict[str, Gpu] = {gpu.uuid: gpu for gpu in here.gpus}
    limits: dict[str, float] = {}
    for lease in leases:
        job, gpu = state.jobs[lease.job_id], gpus.get(lease.gpu_uuid)
        if gpu is None or not gpu.can_set_limit or lease.withdrawn_s is not None:
            continue
        leaves = job.leaving is not None and lease.gpu_type == job.leaving.gpu_type
        column = job.leaving if leaves and job.leaving is not None else job.column
        if job.phase is JobPhase.RUNNING and column.limit_w is not None:
            limits[lease.gpu_uuid] = column.limit_w
    return limits
