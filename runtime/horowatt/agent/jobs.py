# SPDX-License-Identifier: Apache-2.0
"""All jobs of this node. Jobs that orders do not name are left as they are."""

from collections.abc import Iterable
from pathlib import Path

from horowatt import wire
from horowatt.agent.book import JobMemory
from horowatt.agent.gates import Claim
from horowatt.agent.holders import LeaseState
from horowatt.agent.node_job import NodeJob, Surroundings
from horowatt.agent.notes import say
from horowatt.agent.streams import Budget
from horowatt.agent.trash import Trash
from horowatt.elastic.folder import JobFolder, checked_name
from horowatt.errors import HorowattError, InvalidInput
from horowatt.records import JobOrder, JobReport

_PARENT_MODE = 0o711
"""Users may enter the parent of the jobs' folders, which they cannot list."""


class JobKeeper:
    """Makes what the head ordered so, and tells what is.

    At start it takes up the jobs that an earlier run of the agent remembered, and writes their
    slots files again, should that run have died between remembering and publishing.
    """

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._turn = 0
        make_jobs_folder(around.run_dir)
        self._trash = Trash(around.run_dir / "trash", around.notes, around.monotonic_s)
        self._jobs: dict[str, NodeJob] = {
            job_id: NodeJob(memory, around) for job_id, memory in around.book.jobs().items()
        }

    @property
    def job_ids(self) -> tuple[str, ...]:
        """The jobs of this node."""
        return tuple(self._jobs)

    def apply(self, orders: Iterable[JobOrder], now_s: float) -> None:
        """Take orders; one that cannot be followed is noted and spoils no other."""
        for order in orders:
            try:
                self._apply(order)
            except HorowattError as error:
                self._around.notes.error(error)
        self.tend(now_s)

    def tend(self, now_s: float) -> None:
        """Look at every job's leases, and move it one step towards what was ordered."""
        for job_id, job in list(self._jobs.items()):
            try:
                job.look()
                job.tend(now_s)
            except Exception as error:  # noqa: BLE001 - one job's files must not end the agent of all
                self._around.notes.set("HW-AGENT-016", f"job {job_id} cannot be looked after: {error!r}")
                continue
            if job.forgetting and job.over(now_s):
                self._delete(job_id, job)
        self._trash.tend()

    def look(self) -> None:
        """Look at every job's leases, and do nothing about them."""
        for job in self._jobs.values():
            job.look()

    def close(self, wait_s: float = 0.0) -> None:
        """Give what is being deleted ``wait_s`` seconds, and then leave it to itself."""
        self._trash.close(wait_s)

    def lease_states(self) -> list[LeaseState]:
        """Return all leases of this node."""
        return [state for job in self._jobs.values() for state in job.lease_states()]

    def claims(self) -> dict[str, list[Claim]]:
        """Return the leases that are published or held, by GPU UUID, as of the last look."""
        claims: dict[str, list[Claim]] = {}
        for job in self._jobs.values():
            locks = job.lock_paths()
            for state in job.lease_states():
                if state.published or state.held:
                    claims.setdefault(state.lease.gpu_uuid, []).append(
                        Claim(
                            lease_id=state.lease.lease_id,
                            uid=job.memory.spec.uid,
                            held=state.held,
                            locks=locks,
                        )
                    )
        return claims

    def reports(self, now_s: float) -> tuple[JobReport, ...]:
        """Return every job's report; each time another job is the first to spend the budget."""
        jobs = list(self._jobs.values())
        if not jobs:
            return ()
        self._turn = (self._turn + 1) % len(jobs)
        budget = Budget()
        return tuple(self._report(job, now_s, budget) for job in [*jobs[self._turn :], *jobs[: self._turn]])

    def _report(self, job: NodeJob, now_s: float, budget: Budget) -> JobReport:
        """Return a job's report; what its own files make of it never spoils the report of the node."""
        try:
            report = job.report(now_s, budget)
            # What cannot be written, or would not be read at the other end, must not go with the rest.
            wire.decode(wire.encode(report), JobReport)
        except Exception as error:  # noqa: BLE001 - whatever is in those files
            job_id = job.memory.spec.job_id
            self._around.notes.set("HW-AGENT-016", f"the files of job {job_id} cannot be reported: {error!r}")
            return job.bare_report()
        return report

    def end_all(self, now_s: float) -> bool:
        """Move every job one step towards its end; return True once all are over.

        What was ordered is kept, so the head decides whether they start again.
        """
        for job in self._jobs.values():
            job.look()
            job.end(now_s)
        return all(job.over(now_s) for job in self._jobs.values())

    def _apply(self, order: JobOrder) -> None:
        job_id = order.job_id
        checked_name(job_id, "job id")
        for lease in order.slots.leases:
            checked_name(lease.lease_id, "lease id")
        if {order.spec.job_id, order.slots.job_id} != {job_id}:
            raise InvalidInput(
                "HW-AGENT-011",
                f"the order for job {job_id} is not followed",
                because="its parts name different jobs",
                hint="check that head and agent run the same version of Horowatt",
            )
        job = self._jobs.get(job_id)
        if job is None:
            if order.forget:
                self._delete_unknown(job_id)
                return
            job = self._add(order)
        job.order(order)

    def _add(self, order: JobOrder) -> NodeJob:
        memory = JobMemory(
            spec=order.spec,
            slots=order.slots,
            run=order.run,
            launcher_here=order.launcher_here,
            attempt=order.attempt,
            suspend=order.suspend and not order.run and not order.forget,
        )
        self._around.book.remember(memory)
        job = NodeJob(memory, self._around)
        self._jobs[order.job_id] = job
        return job

    def _delete(self, job_id: str, job: NodeJob) -> None:
        try:
            job.delete(self._trash)
        except HorowattError as error:
            self._around.notes.error(error)
            return
        except OSError as error:
            self._around.notes.set("HW-AGENT-017", f"the folder of job {job_id} cannot be deleted: {error}")
            return
        del self._jobs[job_id]
        say(f"job {job_id}: forgotten")

    def _delete_unknown(self, job_id: str) -> None:
        try:
            self._trash.discard(JobFolder.of(self._around.run_dir, job_id).root)
        except OSError as error:
            self._around.notes.set("HW-AGENT-017", f"the folder of job {job_id} cannot be deleted: {error}")


def make_jobs_folder(run_dir: Path) -> None:
    """Make the parent of the jobs' folders."""
    jobs = run_dir / "jobs"
    jobs.mkdir(mode=_PARENT_MODE, exist_ok=True)
    jobs.chmod(_PARENT_MODE)
