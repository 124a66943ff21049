# SPDX-License-Identifier: Apache-2.0
"""What holds of every state, after every step. Checked in tests and, on request, in production."""

from horowatt_allocator.records.cluster import State
from horowatt_allocator.records.jobs import ENDED, Job, JobPhase


def check_invariants(state: State) -> None:
    """Raise an ``AssertionError`` that names what does not hold.

    - A slot has at most one unreleased lease, withdrawn ones included: one owner at every moment.
    - A running job's published leases exist, are its own, are not withdrawn, and are as many as a
      legal width; its slots are of its target's GPU type, or of the one that it is leaving; it has a home.
    - Only a job that stops or waits is suspended, and only one that made a durable commit.
    - Queued and ended jobs hold nothing; a queued job's target may wait for slots.
    - A stopping job knows what follows.
    - Lease ids are below the counter, so none is ever given twice.
    """
    _check_owners(state)
    for job_id, job in state.jobs.items():
        _hold(job_id == job.spec.job_id, f"job {job_id} is filed under another id")
        _check_job(state, job)


def _check_owners(state: State) -> None:
    owners: dict[tuple[str, str], str] = {}
    for lease_id, lease in state.leases.items():
        _hold(lease_id == lease.lease_id, f"lease {lease_id} is filed under another id")
        _hold(lease.job_id in state.jobs, f"lease {lease_id} belongs to no job")
        number = int(lease_id.removeprefix(state.lease_prefix))
        _hold(number < state.next_lease, f"lease {lease_id} is at or above the counter {state.next_lease}")
        place = (lease.node, lease.gpu_uuid)
        other = owners.get(place)
        _hold(other is None, f"slot {place} has two owners: {other} and {lease_id}")
        owners[place] = lease_id


def _check_job(state: State, job: Job) -> None:
    name = job.spec.job_id
    held = [lease for lease in state.leases.values() if lease.job_id == name] if job.phase in ENDED else []
    if job.phase in ENDED or job.phase is JobPhase.QUEUED:
        _hold(not job.lease_ids, f"job {name} is {job.phase.value} and has published leases")
        _hold(not held, f"job {name} has ended and holds leases")
    if job.suspension is not None:
        _hold(job.phase in {JobPhase.STOPPING, JobPhase.QUEUED}, f"job {name} is suspended and {job.phase}")
        _hold(job.last_commit_s is not None, f"job {name} is suspended without a commit to go on from")
    if job.phase is JobPhase.STOPPING:
        _hold(job.ending is not None, f"job {name} stops without knowing what follows")
    if job.phase in ENDED:
        _hold(job.ended_s is not None, f"job {name} has ended without a time")
    if job.phase is not JobPhase.RUNNING:
        return
    _hold(job.width in job.spec.legal_widths, f"job {name} runs at the illegal width {job.width}")
    _hold(job.column.width in job.spec.legal_widths, f"job {name} is given the width {job.column.width}")
    _hold(len(set(job.lease_ids)) == job.width, f"job {name} has a lease twice")
    _hold(job.home_node is not None, f"job {name} runs without a home")
    leases = [state.leases[lease_id] for lease_id in job.lease_ids if lease_id in state.leases]
    _hold(len(leases) == job.width, f"job {name} has published leases that do not exist")
    _hold(all(lease.job_id == name for lease in leases), f"job {name} has another job's lease")
    _hold(all(lease.withdrawn_s is None for lease in leases), f"job {name} has a withdrawn lease")
    types = {job.column.gpu_type} | ({job.leaving.gpu_type} if job.leaving is not None else set())
    _hold({lease.gpu_type for lease in leases} <= types, f"job {name} is on a GPU type that is not its own")


def _hold(true: bool, otherwise: str) -> None:
    if not true:
        raise AssertionError(otherwise)
