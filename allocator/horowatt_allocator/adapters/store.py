# SPDX-License-Identifier: Apache-2.0
"""The store: the service's state in a relational database.

Every commit writes what differs from the last one, in one transaction: after a crash the database
holds the state before an event or after it, never something between. What a report repeats is
recognised here, by the sequence numbers of intervals and the offsets of streams.

Known limitations: one database connection writes; a second service is kept away by a lock file.
"""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, TypeVar, get_type_hints

import sqlalchemy as sa

from horowatt.records import EnergyInterval
from horowatt_allocator.adapters import schema
from horowatt_allocator.adapters.database import DATABASE_NAME, mapped_errors, migrate, open_engine
from horowatt_allocator.adapters.log_streams import StreamKey, StreamState, Taken, flush, take
from horowatt_allocator.adapters.process_lock import ProcessLock
from horowatt_allocator.adapters.store_reads import INTERVAL_FIELDS, StoreReads
from horowatt_allocator.adapters.store_rows import (
    changed_records,
    decode_document,
    encode_document,
    estimate_row,
    job_row,
    lease_row,
    node_row,
    write_rows,
)
from horowatt_allocator.ports.store import Intake, Submission
from horowatt_allocator.records.cluster import (
    Action,
    Decided,
    Decision,
    Inventory,
    Node,
    Policy,
    State,
    Tenant,
    Told,
)
from horowatt_allocator.records.jobs import ENDED, Job, JobEstimate, LeaseState

T = TypeVar("T")

_KEYS_KEPT_S = 7 * 86_400.0
"""How long an Idempotency-Key is remembered."""
_TABLED = frozenset({"nodes", "tenants", "policy", "jobs", "leases", "estimates"})
_SCALARS = {name: kind for name, kind in get_type_hints(State).items() if name not in _TABLED}
"""Fields of the state that have no table of their own; they are rows of ``meta``."""
_SCALAR_PREFIX = "state."
_NUM_JOBS = "num_jobs"
_TABLES: tuple[tuple[str, sa.Table, str, Callable[[Any], dict[str, object]]], ...] = (
    ("jobs", schema.jobs, "job_id", job_row),
    ("leases", schema.leases, "lease_id", lease_row),
    ("estimates", schema.estimates, "job_id", estimate_row),
    ("nodes", schema.nodes, "name", node_row),
)


@dataclass(slots=True)
class _Saved:
    """What the database holds, so that a commit finds the differences without reading."""

    jobs: Mapping[str, Job] = field(default_factory=dict)
    leases: Mapping[str, LeaseState] = field(default_factory=dict)
    estimates: Mapping[str, JobEstimate] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    scalars: dict[str, object] = field(default_factory=dict)
    acked: dict[str, int] = field(default_factory=dict)
    agent_nodes: dict[str, str] = field(default_factory=dict)
    streams: dict[StreamKey, StreamState] = field(default_factory=dict)
    offsets: dict[tuple[str, str], Mapping[str, int]] = field(default_factory=dict)
    kept_by_job: dict[str, int] = field(default_factory=dict)
    energy_j: dict[str, float] = field(default_factory=dict)
    num_jobs: int = 0

    def put_stream(self, key: StreamKey, stream: StreamState) -> None:
        """Take over the state of a stream; readers on other threads see the old offsets or the new."""
        job_id, node, name = key
        before = self.streams.get(key) or StreamState()
        self.kept_by_job[job_id] = self.kept_by_job.get(job_id, 0) + stream.kept_bytes - before.kept_bytes
        self.streams[key] = stream
        self.offsets[job_id, node] = {**self.offsets.get((job_id, node), {}), name: stream.offset_bytes}


class SqlStore(StoreReads):
    """A :class:`~horowatt_allocator.ports.store.Store` on SQLAlchemy.

    ``commit`` is called by one thread at a time; everything else may be called from any thread.
    """

    def __init__(self, engine: sa.Engine, path: Path, lock: ProcessLock) -> None:
        super().__init__(engine, path)
        self._lock = lock
        self._saved = _Saved()
        self._prefix = ""
        self._created_s = 0.0

    @classmethod
    def open(cls, state_dir: Path, now_s: float) -> Self:
        """Open the database of a state folder; create or migrate it first.

        Raises:
            NeedsOperator: ``HW-SRV-002`` another service uses it, ``HW-DB-00x`` and
                ``HW-DISK-00x`` as :func:`~horowatt_allocator.adapters.database.mapped_errors` says.
        """
        lock = ProcessLock.take(state_dir / "service.lock")
        path = state_dir / DATABASE_NAME
        try:
            # Before SQLite does: it would create the file readable by everybody under a loose umask.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            engine = open_engine(path)
            store = cls(engine, path, lock)
            migrate(engine, path)
            with mapped_errors(path), engine.begin() as connection:
                store._identify(connection, now_s)
        except BaseException:
            lock.release()
            raise
        return store

    def _identify(self, connection: sa.Connection, now_s: float) -> None:
        rows = connection.execute(sa.select(schema.meta.c.key, schema.meta.c.value))
        found: dict[str, str] = {row.key: row.value for row in rows}
        for key, value in (("prefix", secrets.token_hex(3)), ("created_s", repr(now_s)), (_NUM_JOBS, "0")):
            if key not in found:
                connection.execute(sa.insert(schema.meta).values(key=key, value=value))
                found[key] = value
        self._prefix, self._created_s = found["prefix"], float(found["created_s"])

    def prefix(self) -> str:
        """Return the random text that makes ids of this database unique."""
        return self._prefix

    def created_s(self) -> float:
        """Return when the database was created."""
        return self._created_s

    def close(self) -> None:
        """Close the connections and let another service use the database."""
        self._engine.dispose()
        self._lock.release()

    # Loading

    def load(self, inventory: Inventory, tenants: Mapping[str, Tenant], policy: Policy) -> State:
        """Return the stored state under the given inventory, tenants and policy.

        A node that left the inventory stays while jobs still hold leases on it: its agent is
        refused, so it counts as gone after the time-out and its jobs are moved.
        """
        with mapped_errors(self._path), self._engine.connect() as connection:
            saved = _Saved(
                jobs=self._documents(connection, schema.jobs, "job_id", Job),
                leases=self._documents(connection, schema.leases, "lease_id", LeaseState),
                estimates=self._documents(connection, schema.estimates, "job_id", JobEstimate),
                nodes=self._documents(connection, schema.nodes, "name", Node),
            )
            self._load_progress(connection, saved)
            for key, text in connection.execute(sa.select(schema.meta.c.key, schema.meta.c.value)):
                if key == _NUM_JOBS:
                    saved.num_jobs = int(text)
                name = key.removeprefix(_SCALAR_PREFIX)
                if key.startswith(_SCALAR_PREFIX) and name in _SCALARS:
                    saved.scalars[name] = decode_document(self._path, text, _SCALARS[name])
        self._saved = saved
        scalars: dict[str, Any] = {"lease_prefix": f"w{self._prefix}", **saved.scalars}
        nodes = {
            spec.name: replace(saved.nodes.get(spec.name) or Node(spec=spec), spec=spec)
            for spec in inventory.nodes
        }
        for lease in saved.leases.values():
            if lease.released_s is None and lease.node not in nodes and lease.node in saved.nodes:
                nodes[lease.node] = saved.nodes[lease.node]
        return State(
            nodes=nodes,
            tenants=dict(tenants),
            policy=policy,
            jobs=saved.jobs,
            leases=saved.leases,
            estimates=saved.estimates,
            **scalars,
        )

    def _load_progress(self, connection: sa.Connection, saved: _Saved) -> None:
        for row in connection.execute(sa.select(schema.agents)):
            saved.acked[row.agent_id] = row.acked_seq
            saved.agent_nodes[row.agent_id] = row.node
        for row in connection.execute(sa.select(schema.streams)):
            saved.put_stream(
                (row.job_id, row.node, row.stream),
                StreamState(offset_bytes=row.offset_bytes, kept_bytes=row.kept_bytes, tail=row.tail),
            )
        booked = schema.intervals.c
        sums = (
            sa.select(booked.job_id, sa.func.sum(booked.energy_j))
            .where(booked.job_id.is_not(None), booked.attributable, booked.energy_j.is_not(None))
            .group_by(booked.job_id)
        )
        for job_id, energy_j in connection.execute(sums):
            saved.energy_j[job_id] = energy_j

    def _documents(self, connection: sa.Connection, table: sa.Table, key: str, kind: type[T]) -> dict[str, T]:
        rows = connection.execute(sa.select(table.c[key], table.c.document).order_by(table.c[key]))
        return {name: decode_document(self._path, text, kind) for name, text in rows}

    # Writing

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
            NeedsOperator: ``HW-DISK-001`` and the others of
                :func:`~horowatt_allocator.adapters.database.mapped_errors`; ``HW-DB-005`` when a
                record would not come back as it is. Nothing is stored then.
        """
        saved = self._saved
        new_intervals = self._new_intervals(intake)
        taken = self._take_streams(state, intake)
        num_jobs = saved.num_jobs
        if state.jobs is not saved.jobs:
            num_jobs += sum(job_id not in saved.jobs for job_id in state.jobs)
        with mapped_errors(self._path), self._engine.begin() as connection:
            if num_jobs != saved.num_jobs:
                connection.execute(
                    sa.update(schema.meta).where(schema.meta.c.key == _NUM_JOBS).values(value=str(num_jobs))
                )
            written = sum(
                write_rows(connection, table, key, getattr(saved, name), getattr(state, name), to_row)
                for name, table, key, to_row in _TABLES
            )
            written += self._write_scalars(connection, state)
            self._write_actions(connection, actions)
            if intake is not None:
                self._write_intervals(connection, intake, new_intervals)
            self._write_streams(connection, taken)
            if submission is not None:
                self._write_submission(connection, submission, now_s)
        self._remember(state, intake, new_intervals, taken)
        saved.num_jobs = num_jobs
        return bool(written or actions or new_intervals or taken.states or submission)

    def _new_intervals(self, intake: Intake | None) -> list[EnergyInterval]:
        if intake is None:
            return []
        acked = self._saved.acked.get(intake.agent_id, 0)
        by_seq = {item.seq: item for item in intake.intervals if item.seq > acked}
        return [by_seq[seq] for seq in sorted(by_seq)]

    def _take_streams(self, state: State, intake: Intake | None) -> Taken:
        saved = self._saved
        chunks = []
        if intake is not None:
            chunks = [((item.job_id, intake.node, item.chunk.stream), item.chunk) for item in intake.chunks]
        taken = take(chunks, saved.streams, saved.kept_by_job)
        touched = {key[0] for key in taken.states}
        ended = {job_id for job_id, job in changed_records(saved.jobs, state.jobs) if job.phase in ENDED} | {
            job_id for job_id in touched if job_id in state.jobs and state.jobs[job_id].phase in ENDED
        }
        for job_id in sorted(ended):
            flush(taken, job_id, saved.streams)
        return taken

    def _remember(
        self,
        state: State,
        intake: Intake | None,
        new_intervals: list[EnergyInterval],
        taken: Taken,
    ) -> None:
        saved = self._saved
        saved.jobs, saved.leases, saved.estimates = state.jobs, state.leases, state.estimates
        saved.nodes, saved.scalars = state.nodes, {name: getattr(state, name) for name in _SCALARS}
        if intake is not None:
            last = new_intervals[-1].seq if new_intervals else 0
            saved.acked[intake.agent_id] = max(last, saved.acked.get(intake.agent_id, 0))
            saved.agent_nodes[intake.agent_id] = intake.node
        for item in new_intervals:
            if item.job_id is not None and item.attributable and item.energy_j is not None:
                saved.energy_j[item.job_id] = saved.energy_j.get(item.job_id, 0.0) + item.energy_j
        for key, stream in taken.states.items():
            saved.put_stream(key, stream)

    def _write_scalars(self, connection: sa.Connection, state: State) -> int:
        written = 0
        for name, kind in _SCALARS.items():
            value = getattr(state, name)
            key = f"{_SCALAR_PREFIX}{name}"
            if name not in self._saved.scalars:
                text = encode_document(value, kind)
                connection.execute(sa.insert(schema.meta).values(key=key, value=text))
            elif (before := self._saved.scalars[name]) is not value and before != value:
                text = encode_document(value, kind)
                connection.execute(sa.update(schema.meta).where(schema.meta.c.key == key).values(value=text))
            else:
                continue
            written += 1
        return written

    @staticmethod
    def _write_actions(connection: sa.Connection, actions: Sequence[Action]) -> None:
        decided = [action.decision for action in actions if isinstance(action, Decided)]
        told = [action for action in actions if isinstance(action, Told)]
        if decided:
            connection.execute(
                sa.insert(schema.decisions),
                [
                    {"number": item.number, "at_s": item.at_s, "document": encode_document(item, Decision)}
                    for item in decided
                ],
            )
        if told:
            connection.execute(
                sa.insert(schema.stories),
                [
                    {
                        "job_id": item.job_id,
                        "at_s": item.at_s,
                        "code": item.reason.code,
                        "sentence": item.reason.sentence,
                    }
                    for item in told
                ],
            )

    def _write_intervals(
        self, connection: sa.Connection, intake: Intake, new: Sequence[EnergyInterval]
    ) -> None:
        last = new[-1].seq if new else self._saved.acked.get(intake.agent_id, 0)
        if intake.agent_id not in self._saved.acked:
            connection.execute(
                sa.insert(schema.agents).values(agent_id=intake.agent_id, node=intake.node, acked_seq=last)
            )
        elif new or self._saved.agent_nodes[intake.agent_id] != intake.node:
            connection.execute(
                sa.update(schema.agents)
                .where(schema.agents.c.agent_id == intake.agent_id)
                .values(node=intake.node, acked_seq=last)
            )
        if new:
            connection.execute(
                sa.insert(schema.intervals),
                [
                    {
                        "agent_id": intake.agent_id,
                        "node": intake.node,
                        **{name: getattr(item, name) for name in INTERVAL_FIELDS},
                        "method": item.method.value,
                    }
                    for item in new
                ],
            )

    def _write_streams(self, connection: sa.Connection, taken: Taken) -> None:
        for key, stream in taken.states.items():
            job_id, node, name = key
            values = {item.name: getattr(stream, item.name) for item in fields(StreamState)}
            if key not in self._saved.streams:
                connection.execute(
                    sa.insert(schema.streams).values(job_id=job_id, node=node, stream=name, **values)
                )
            elif self._saved.streams[key] != stream:
                rows = schema.streams.c
                connection.execute(
                    sa.update(schema.streams)
                    .where(rows.job_id == job_id, rows.node == node, rows.stream == name)
                    .values(**values)
                )
        if taken.pieces:
            connection.execute(
                sa.insert(schema.log_pieces),
                [
                    {"job_id": key[0], "node": key[1], "stream": key[2], "text": text}
                    for key, text in taken.pieces
                ],
            )

    @staticmethod
    def _write_submission(connection: sa.Connection, submission: Submission, now_s: float) -> None:
        connection.execute(
            sa.delete(schema.submissions).where(schema.submissions.c.at_s < now_s - _KEYS_KEPT_S)
        )
        connection.execute(
            sa.insert(schema.submissions).values(
                uid=submission.uid,
                key=submission.key,
                digest=submission.digest,
                job_id=submission.job_id,
                at_s=now_s,
            )
        )

    # What a report or a view asks for often

    def acked_seq(self, agent_id: str) -> int:
        """Return the highest interval held of an agent, 0 for one that was never seen."""
        return self._saved.acked.get(agent_id, 0)

    def agent_node(self, agent_id: str) -> str | None:
        """Return the node that an agent last reported for; None for one that was never seen."""
        return self._saved.agent_nodes.get(agent_id)

    def offsets(self, job_id: str, node: str) -> Mapping[str, int]:
        """Return up to where the streams of a job on a node are held, bytes."""
        return self._saved.offsets.get((job_id, node), {})

    def num_jobs_ever(self) -> int:
        """Return how many jobs were ever stored, removed ones included."""
        return self._saved.num_jobs

    def job_energy_j(self, job_id: str) -> float | None:
        """Return the joules booked on a job so far; None when none was measured."""
        return self._saved.energy_j.get(job_id)
