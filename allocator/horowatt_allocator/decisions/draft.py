# SPDX-License-Identifier: Apache-2.0
"""The working copy of the state within one step, and the few ways in which a job may change.

Mappings are copied once per step; what a step returns shares nothing mutable with it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from horowatt_allocator.decisions.capacity import Slot
from horowatt_allocator.decisions.placement import next_slot_index
from horowatt_allocator.decisions.resizing import commit_homes, waits_since_s
from horowatt_allocator.records.cluster import Action, Decided, Decision, Plan, Policy, State, Tenant, Told
from horowatt_allocator.records.jobs import (
    WAITING,
    Generation,
    Job,
    JobPhase,
    LeaseState,
    Reason,
    Suspension,
)


class Draft:
    """A state that may be changed until :meth:`freeze`."""

    def __init__(self, state: State, now: float) -> None:
        self.now = now
        self.nodes = dict(state.nodes)
        self.jobs = dict(state.jobs)
        self.leases = dict(state.leases)
        self.estimates = dict(state.estimates)
        self.plan: Plan | None = state.plan
        self.needs_decision = state.needs_decision
        self.last_decision_s = state.last_decision_s
        self.num_decisions = state.num_decisions
        self.actions: list[Action] = []
        self._state = state
        self._next_lease = state.next_lease
        self._lease_ids: dict[str, list[str]] = {}
        for lease in state.leases.values():
            self._lease_ids.setdefault(lease.job_id, []).append(lease.lease_id)

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        """Tenants by name."""
        return self._state.tenants

    @property
    def policy(self) -> Policy:
        """The operator's choices."""
        return self._state.policy

    def freeze(self) -> State:
        """Return the state as it is now: the very one it began with when nothing changed."""
        after = replace(
            self._state,
            nodes=self.nodes,
            jobs=self.jobs,
            leases=self.leases,
            estimates=self.estimates,
            plan=self.plan,
            needs_decision=self.needs_decision,
            last_decision_s=self.last_decision_s,
            num_decisions=self.num_decisions,
            next_lease=self._next_lease,
        )
        return self._state if after == self._state else after

    def view(self) -> State:
        """Return the draft as a state for functions that only read; valid until the next change."""
        return self.freeze()

    def decide_because(self, why: str) -> None:
        """Ask for a decision; the first reason since the last one is kept."""
        self.needs_decision = self.needs_decision or why

    def tell(self, job_id: str, reason: Reason) -> None:
        """Add a line to a job's story."""
        self.actions.append(Told(at_s=self.now, job_id=job_id, reason=reason))

    def record(self, decision: Decision) -> None:
        """Keep a decision."""
        self.actions.append(Decided(decision=decision))

    def leases_of(self, job_id: str) -> list[LeaseState]:
        """Return all leases of a job, withdrawn ones too."""
        return [self.leases[lease_id] for lease_id in self._lease_ids.get(job_id, [])]

    def put(self, job: Job) -> None:
        """Replace a job."""
        self.jobs[job.spec.job_id] = job

    def publish(
        self, job: Job, keep: Sequence[str], drop: Iterable[str], add: Sequence[Slot], reason: Reason
    ) -> Job:
        """Publish a job's next generation; a queued job starts with it. Returns the job.

        Leases in ``drop`` stay on their slots, withdrawn, until their node says that no process of
        the worker lives.
        """
        for lease_id in drop:
            self.leases[lease_id] = replace(self.leases[lease_id], withdrawn_s=self.now)
        granted = self._grant(job, [self.leases[lease_id] for lease_id in keep], add)
        lease_ids = (*keep, *(lease.lease_id for lease in granted))
        starting = job.phase is JobPhase.QUEUED
        job = replace(
            job,
            phase=JobPhase.RUNNING,
            generation=job.generation + 1,
            lease_ids=lease_ids,
            generations=(*self._close_generation(job), self._generation(job, len(lease_ids))),
            window=None,
            reason=reason,
        )
        if starting:
            job = replace(
                job,
                attempt=job.attempt + 1,
                started_s=self.now if job.started_s is None else job.started_s,
                home_node=_home(granted, commit_homes(job)),
                launcher_alive=True,
                generation_applied=0,
                samples=0 if job.attempt == 0 else job.samples,
                exit_code=None,
                suspension=None,
                attempt_s=self.now,
                waited_s=max(0.0, self.now - waits_since_s(job)),
                not_before_s=0.0,
                growth_failures=0,
                grow_not_before_s=0.0,
            )
        else:
            job = replace(job, changed_s=self.now)
        self.put(job)
        self.tell(job.spec.job_id, reason)
        return job

    def suspend(self, job: Job, reason: Reason, why: str, wait_s: float) -> Job:
        """Order a job to commit and to stop; it may start again ``wait_s`` seconds later. Returns the job."""
        suspension = Suspension(since_s=self.now, why=why)
        job = replace(job, suspension=suspension, not_before_s=self.now + wait_s)
        return self.stop(job, JobPhase.QUEUED, reason)

    def stop(self, job: Job, ending: JobPhase, reason: Reason, exit_code: int | None = None) -> Job:
        """Order a job to end; once every slot is free it enters the phase ``ending``. Returns the job."""
        nodes = [job.home_node, *(self.leases[lease_id].node for lease_id in job.lease_ids)]
        for lease_id in job.lease_ids:
            if self.leases[lease_id].withdrawn_s is None:
                self.leases[lease_id] = replace(self.leases[lease_id], withdrawn_s=self.now)
        job = replace(
            job,
            phase=JobPhase.STOPPING,
            ending=ending,
            reason=reason,
            exit_code=exit_code if exit_code is not None else job.exit_code,
            column=WAITING,
            window=None,
            leaving=None,
            commit_nodes=tuple(dict.fromkeys(node for node in nodes if node is not None)),
        )
        self.put(job)
        self.tell(job.spec.job_id, reason)
        self.decide_because(f"job '{job.spec.name}' ends")
        return job

    def settle(self, job: Job) -> Job:
        """Move a stopping job whose slots are all free to the phase that follows. Returns the job."""
        ending = job.ending or JobPhase.FAILED
        job = replace(
            job,
            phase=ending,
            ending=None,
            column=WAITING,
            lease_ids=(),
            home_node=None,
            launcher_alive=False,
            generations=self._close_generation(job),
            ended_s=None if ending is JobPhase.QUEUED else self.now,
            restarts=job.restarts + (1 if ending is JobPhase.QUEUED and job.suspension is None else 0),
            suspension=job.suspension if ending is JobPhase.QUEUED else None,
            changed_s=0.0,
        )
        self.put(job)
        self.decide_because(
            f"job '{job.spec.name}' is to start again"
            if ending is JobPhase.QUEUED
            else f"job '{job.spec.name}' left its GPUs"
        )
        return job

    def drop_lease(self, lease: LeaseState) -> None:
        """Forget a lease whose worker is gone; its samples stay with the job."""
        job = self.jobs[lease.job_id]
        uncountable = lease.samples is None and lease.steps > 0
        past = None if uncountable or job.past_samples is None else job.past_samples + (lease.samples or 0)
        self.put(replace(job, past_samples=past))
        del self.leases[lease.lease_id]
        self._lease_ids[lease.job_id].remove(lease.lease_id)

    def _grant(self, job: Job, kept: list[LeaseState], add: Sequence[Slot]) -> list[LeaseState]:
        taken: dict[str, list[int]] = {}
        for lease in kept:
            taken.setdefault(lease.node, []).append(lease.slot_index)
        granted = []
        for slot in add:
            index = next_slot_index(taken.get(slot.node, []))
            taken.setdefault(slot.node, []).append(index)
            lease = LeaseState(
                lease_id=f"{self._state.lease_prefix}{self._next_lease:08d}",
                job_id=job.spec.job_id,
                node=slot.node,
                gpu_uuid=slot.gpu.uuid,
                gpu_type=slot.gpu.gpu_type,
                slot_index=index,
                simulated=slot.gpu.simulated,
                generation=job.generation + 1,
                granted_s=self.now,
            )
            self._next_lease += 1
            self.leases[lease.lease_id] = lease
            self._lease_ids.setdefault(lease.job_id, []).append(lease.lease_id)
            granted.append(lease)
        return granted

    def _generation(self, job: Job, width: int) -> Generation:
        return Generation(
            number=job.generation + 1,
            width=width,
            gpu_type=job.column.gpu_type or "",
            limit_w=job.column.limit_w,
            published_s=self.now,
            samples_before=0 if job.attempt == 0 else job.samples,
        )

    def _close_generation(self, job: Job) -> tuple[Generation, ...]:
        if not job.generations or job.generations[-1].ended_s is not None:
            return job.generations
        return (*job.generations[:-1], replace(job.generations[-1], ended_s=self.now))


def _home(leases: list[LeaseState], preferred: Sequence[str]) -> str | None:
    """Return where the launcher starts: the first preferred node with a lease, else that with the most."""
    counts: dict[str, int] = {}
    for lease in leases:
        counts[lease.node] = counts.get(lease.node, 0) + 1
    for node in preferred:
        if node in counts:
            return node
    return max(counts, key=lambda node: counts[node], default=None)
