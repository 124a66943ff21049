# SPDX-License-Identifier: Apache-2.0
"""What the service keeps, and what it asks of whatever keeps it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from horowatt.records import EnergyInterval, StreamChunk
from horowatt_allocator.records.cluster import Action, Decision, Inventory, Policy, State, Tenant, Told
from horowatt_allocator.records.energy import BookedInterval


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChunk:
    """A piece of one stream of one job, not yet held by the store."""

    job_id: str
    chunk: StreamChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """What is new in an agent's report.

    Attributes:
        intervals: Not yet in the ledger, ascending by ``seq``.
        chunks: Each begins where the held part of its stream ends.
    """

    agent_id: str
    node: str
    intervals: tuple[EnergyInterval, ...] = ()
    chunks: tuple[JobChunk, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """An Idempotency-Key with what it was first used for."""

    uid: int
    key: str
    digest: str
    job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    """A page of a job's log.

    Attributes:
        pieces: Node, stream and text (whole lines) in order of arrival.
        cursor: Position after the last piece; ask again from here.
        more: True when the page was cut because it would have become too long.
    """

    pieces: tuple[tuple[str, str, str], ...]
    cursor: int
    more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Which streams of a log are wanted: exactly ``stream``, or all but the ``without`` ones."""

    stream: str | None = None
    without: frozenset[str] = field(default_factory=frozenset)


class Store(Protocol):
    """Keeps the state of the service. One writer at a time; reads may come from any thread."""

    def load(self, inventory: Inventory, tenants: Mapping[str, Tenant], policy: Policy) -> State:
        """Return the stored state under the given inventory, tenants and policy."""
        ...

    def commit(
        self,
        state: State,
        *,
        now_s: float,
        actions: Sequence[Action] = (),
        intake: Intake | None = None,
        submission: Submission | None = None,
    ) -> bool:
        """Store what differs from the last commit, all or nothing.

        Returns:
            True when there was something to store.

        Raises:
            NeedsOperator: when it could not be stored; then nothing of it is.
        """
        ...

    def acked_seq(self, agent_id: str) -> int:
        """Return the highest interval held of an agent, 0 for one that was never seen."""
        ...

    def agent_node(self, agent_id: str) -> str | None:
        """Return the node that an agent last reported for; None for one that was never seen."""
        ...

    def offsets(self, job_id: str, node: str) -> Mapping[str, int]:
        """Return up to where the streams of a job on a node are held, bytes."""
        ...

    def num_jobs_ever(self) -> int:
        """Return how many jobs were ever stored, removed ones included."""
        ...

    def job_energy_j(self, job_id: str) -> float | None:
        """Return the joules booked on a job so far; None when none was measured."""
        ...

    def submission(self, uid: int, key: str) -> Submission | None:
        """Return what an Idempotency-Key was used for."""
        ...

    def log_page(self, job_id: str, after: int, wanted: LogFilter) -> LogPage:
        """Return the log of a job after a cursor."""
        ...

    def story(self, job_id: str, limit: int) -> tuple[Told, ...]:
        """Return the latest lines of a job's story, oldest first."""
        ...

    def decisions(self, after: int, limit: int) -> tuple[Decision, ...]:
        """Return decisions with a number above ``after``, ascending; the latest ``limit`` of them."""
        ...

    def intervals(self, start_s: float | None, end_s: float | None) -> Iterator[BookedInterval]:
        """Yield the intervals that touch a stretch of time, by GPU and start."""
        ...

    def created_s(self) -> float:
        """Return when the database was created."""
        ...

    def prefix(self) -> str:
        """Return the random text that makes ids of this database unique."""
        ...

    def close(self) -> None:
        """Let another service use the database."""
        ...
