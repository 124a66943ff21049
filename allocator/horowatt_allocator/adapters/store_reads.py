# SPDX-License-Identifier: Apache-2.0
"""What is read from the database on demand: logs, stories, decisions, intervals, used keys."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import sqlalchemy as sa

from horowatt.records import EnergyInterval, EnergyMethod
from horowatt_allocator.adapters import schema
from horowatt_allocator.adapters.database import mapped_errors
from horowatt_allocator.adapters.store_rows import decode_document
from horowatt_allocator.ports.store import LogFilter, LogPage, Submission
from horowatt_allocator.records.cluster import Decision, Told
from horowatt_allocator.records.energy import BookedInterval
from horowatt_allocator.records.jobs import Reason

MAX_PAGE_LENGTH = 256 << 10
"""A page of a log is cut after this many characters."""
_MAX_PAGE_ROWS = 1000
INTERVAL_FIELDS = tuple(item.name for item in fields(EnergyInterval))


class StoreReads:
    """The reading half of the store; each call sees one committed state, from any thread."""

    def __init__(self, engine: sa.Engine, path: Path) -> None:
        self._engine = engine
        self._path = path

    def submission(self, uid: int, key: str) -> Submission | None:
        """Return what an Idempotency-Key was used for in the last days."""
        rows = schema.submissions.c
        query = sa.select(rows.digest, rows.job_id).where(rows.uid == uid, rows.key == key)
        with mapped_errors(self._path), self._engine.connect() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else Submission(uid=uid, key=key, digest=row.digest, job_id=row.job_id)

    def log_page(self, job_id: str, after: int, wanted: LogFilter) -> LogPage:
        """Return the log of a job after a cursor, cut at about ``MAX_PAGE_LENGTH`` characters."""
        rows = schema.log_pieces.c
        query = sa.select(rows.id, rows.node, rows.stream, rows.text).where(
            rows.job_id == job_id, rows.id > after
        )
        if wanted.stream is not None:
            query = query.where(rows.stream == wanted.stream)
        elif wanted.without:
            query = query.where(rows.stream.not_in(sorted(wanted.without)))
        pieces, cursor, length, more = [], after, 0, False
        with mapped_errors(self._path), self._engine.connect() as connection:
            for row in connection.execute(query.order_by(rows.id).limit(_MAX_PAGE_ROWS)):
                if length >= MAX_PAGE_LENGTH:
                    more = True
                    break
                pieces.append((row.node, row.stream, row.text))
                cursor, length = row.id, length + len(row.text)
        return LogPage(pieces=tuple(pieces), cursor=cursor, more=more or len(pieces) == _MAX_PAGE_ROWS)

    def story(self, job_id: str, limit: int) -> tuple[Told, ...]:
        """Return the latest lines of a job's story, oldest first."""
        rows = schema.stories.c
        query = sa.select(schema.stories).where(rows.job_id == job_id).order_by(rows.id.desc()).limit(limit)
        with mapped_errors(self._path), self._engine.connect() as connection:
            found = connection.execute(query).all()
        return tuple(
            Told(at_s=row.at_s, job_id=row.job_id, reason=Reason(code=row.code, sentence=row.sentence))
            for row in reversed(found)
        )

    def decisions(self, after: int, limit: int) -> tuple[Decision, ...]:
        """Return decisions with a number above ``after``, ascending; the latest ``limit`` of them."""
        rows = schema.decisions.c
        query = sa.select(rows.document).where(rows.number > after).order_by(rows.number.desc()).limit(limit)
        with mapped_errors(self._path), self._engine.connect() as connection:
            texts = connection.scalars(query).all()
        return tuple(decode_document(self._path, text, Decision) for text in reversed(texts))

    def intervals(self, start_s: float | None, end_s: float | None) -> Iterator[BookedInterval]:
        """Yield the intervals that touch a stretch of time, by GPU and start."""
        rows = schema.intervals.c
        query = sa.select(rows.node, *(rows[name] for name in INTERVAL_FIELDS))
        if start_s is not None:
            query = query.where(rows.end_s > start_s)
        if end_s is not None:
            query = query.where(rows.start_s < end_s)
        query = query.order_by(rows.gpu_uuid, rows.start_s, rows.seq)
        with mapped_errors(self._path), self._engine.connect() as connection:
            for node, *values in connection.execution_options(yield_per=1000).execute(query):
                record = dict(zip(INTERVAL_FIELDS, values, strict=True))
                record["method"] = EnergyMethod(record["method"])
                yield BookedInterval(node=node, interval=EnergyInterval(**record))
