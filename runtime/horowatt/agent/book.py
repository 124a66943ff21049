# SPDX-License-Identifier: Apache-2.0
"""What the agent remembers of its jobs, in its own file and not in the folders of tenants."""

import dataclasses
from dataclasses import dataclass

from horowatt import wire
from horowatt.agent.processes import ProcessId
from horowatt.agent.state import StateFile
from horowatt.records import LauncherStatus, LaunchSpec, Lease, SlotsFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a launcher.

    Attributes:
        process: None until the start has succeeded; the attempt is remembered before, so that an
            agent that is killed in between never starts the same attempt twice.
    """

    attempt: int
    at_s: float
    process: ProcessId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMemory:
    """One job of this node.

    Attributes:
        slots: Newest slots file that was ordered.
        run: False once the head wants the job to end.
        suspend: True when the job is to write a durable commit before it ends.
        attempt: Start number that was ordered.
        start: The latest start of a launcher here, or None.
        verdict: What the agent found in place of a launcher's last word, or None.
    """

    spec: LaunchSpec
    slots: SlotsFile
    run: bool
    launcher_here: bool
    attempt: int
    start: Start | None = None
    verdict: LauncherStatus | None = None
    suspend: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLease:
    """A lease that was ever published here.

    Attributes:
        generation: The last generation that had it.
    """

    lease: Lease
    generation: int


class JobBook:
    """Jobs and leases of this node, stored before anything is done about them."""

    def __init__(self, state: StateFile, node: str) -> None:
        self._state = state
        self._node = node

    def jobs(self) -> dict[str, JobMemory]:
        """Return all jobs by id."""
        rows = self._state.rows("SELECT job_id, record FROM jobs ORDER BY rowid")
        return {job_id: wire.decode(record, JobMemory) for job_id, record in rows}

    def leases(self, job_id: str) -> dict[str, KnownLease]:
        """Return the leases of a job by id."""
        rows = self._state.rows("SELECT lease_id, generation, record FROM leases WHERE job_id = ?", (job_id,))
        return {
            lease_id: KnownLease(lease=wire.decode(record, Lease), generation=generation)
            for lease_id, generation, record in rows
        }

    def remember(self, memory: JobMemory) -> None:
        """Store a job and the leases that it has on this node.

        Raises:
            NeedsOperator: as :meth:`StateFile.transaction`; then nothing is stored.
        """
        slots = memory.slots
        leases = [
            (lease.lease_id, slots.job_id, slots.generation, wire.encode(lease))
            for lease in slots.leases
            if lease.node == self._node
        ]
        with self._state.transaction() as database:
            database.execute(
                "INSERT INTO jobs VALUES (?, ?) ON CONFLICT DO UPDATE SET record = excluded.record",
                (memory.spec.job_id, wire.encode(memory)),
            )
            database.executemany(
                "INSERT INTO leases VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE "
                "SET generation = excluded.generation",
                leases,
            )

    def forget(self, job_id: str) -> None:
        """Remove a job and its leases.

        Raises:
            NeedsOperator: as :meth:`StateFile.transaction`; then nothing is removed.
        """
        with self._state.transaction() as database:
            database.execute("DELETE FROM jobs WHERE job_id = ?", (job_id,))
            database.execute("DELETE FROM leases WHERE job_id = ?", (job_id,))


def with_slots(leases: dict[str, KnownLease], slots: SlotsFile, node: str) -> dict[str, KnownLease]:
    """Return the known leases after a slots file was published, as the book would load them."""
    known = dict(leases)
    for lease in slots.leases:
        if lease.node != node:
            continue
        old = known.get(lease.lease_id)
        known[lease.lease_id] = (
            KnownLease(lease=lease, generation=slots.generation)
            if old is None
            else dataclasses.replace(old, generation=slots.generation)
        )
    return known
