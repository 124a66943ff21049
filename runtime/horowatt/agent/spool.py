# SPDX-License-Identifier: Apache-2.0
"""Intervals that the head has not acknowledged, and the ones that are still open.

Invariants:
    * ``seq`` runs from 1 without holes; a ``seq`` is never given out twice.
    * Only what is on disk is reported, so that the head never knows more than the agent remembers.
    * What is on disk always covers a GPU's time without a hole: closed intervals up to an instant,
      and an open one from there.

While nothing can be written, closed intervals wait in memory and :attr:`Spool.degraded` is set. The
caller then stops closing intervals by age; edges are few, so memory stays bounded. If the agent is
killed meanwhile, the open interval on disk is older than the lost ones and covers their energy.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from horowatt import wire
from horowatt.agent.meter import OpenInterval
from horowatt.agent.state import StateFile
from horowatt.errors import NeedsOperator
from horowatt.records import EnergyInterval

REPORT_LIMIT = 2000
"""Most intervals in one report (about 1 MB); the rest follows with the next ones."""


class Spool:
    """The outbox of energy intervals.

    Attributes:
        degraded: Why nothing can be written now, or None.
    """

    def __init__(self, state: StateFile) -> None:
        self._state = state
        self.degraded: NeedsOperator | None = None
        self._waiting: list[EnergyInterval] = []
        self._waiting_opened: dict[str, OpenInterval | None] = {}
        stored = state.rows("SELECT value FROM meta WHERE key = 'next_seq'")
        self._next_seq = int(stored[0][0]) if stored else 1
        self._acked_seq = 0

    @property
    def next_seq(self) -> int:
        """The ``seq`` that the next stored interval will get."""
        return self._next_seq

    @property
    def num_waiting(self) -> int:
        """Intervals that wait in memory for space on disk."""
        return len(self._waiting)

    def opened(self) -> dict[str, OpenInterval]:
        """Return the intervals that were open when the file was last written, by GPU UUID."""
        records = [
            wire.decode(record, OpenInterval) for (record,) in self._state.rows("SELECT record FROM opened")
        ]
        return {record.gpu_uuid: record for record in records}

    def store(
        self, closed: Sequence[EnergyInterval], opened: Iterable[OpenInterval], gone: Iterable[str] = ()
    ) -> None:
        """Store intervals that ended and those that began; a full disk only sets ``degraded``.

        Args:
            gone: GPUs that have no open interval any more, by UUID.
        """
        self._waiting.extend(closed)
        self._waiting_opened.update({record.gpu_uuid: record for record in opened})
        self._waiting_opened.update(dict.fromkeys(gone))
        self.flush()

    def flush(self) -> None:
        """Write what waits in memory, if anything does."""
        if not self._waiting and not self._waiting_opened:
            return
        numbered = [
            (seq, wire.encode(dataclasses.replace(interval, seq=seq)))
            for seq, interval in enumerate(self._waiting, start=self._next_seq)
        ]
        opened = [(uuid, wire.encode(record)) for uuid, record in self._waiting_opened.items() if record]
        gone = [(uuid,) for uuid, record in self._waiting_opened.items() if not record]
        next_seq = self._next_seq + len(numbered)
        try:
            with self._state.transaction() as database:
                database.executemany("INSERT INTO intervals VALUES (?, ?)", numbered)
                database.executemany("INSERT OR REPLACE INTO opened VALUES (?, ?)", opened)
                database.executemany("DELETE FROM opened WHERE gpu_uuid = ?", gone)
                database.executemany(
                    "INSERT OR REPLACE INTO meta VALUES (?, ?)",
                    [("next_seq", str(next_seq)), ("boot_id", self._state.boot_id)],
                )
        except NeedsOperator as error:
            self.degraded = error
            return
        self.degraded = None
        self._waiting.clear()
        self._waiting_opened.clear()
        self._next_seq = next_seq

    def unacked(self, limit: int = REPORT_LIMIT) -> tuple[EnergyInterval, ...]:
        """Return the oldest stored intervals that the head has not acknowledged, by ``seq``."""
        rows = self._state.rows(
            "SELECT record FROM intervals WHERE seq > ? ORDER BY seq LIMIT ?", (self._acked_seq, limit)
        )
        return tuple(wire.decode(record, EnergyInterval) for (record,) in rows)

    def acknowledge(self, seq: int) -> bool:
        """Forget intervals up to ``seq``.

        Returns:
            False when the head knows intervals that this file never gave out, which happens when
            the run directory was restored from a copy; counting then goes on after the head's.
        """
        if seq <= self._acked_seq:
            return True
        self._acked_seq = seq
        known = seq < self._next_seq
        self._next_seq = max(self._next_seq, seq + 1)
        try:
            with self._state.transaction() as database:
                database.execute("DELETE FROM intervals WHERE seq <= ?", (seq,))
                if not known:
                    database.execute(
                        "INSERT OR REPLACE INTO meta VALUES ('next_seq', ?)", (str(self._next_seq),)
                    )
        except NeedsOperator as error:
            # What is acknowledged is not reported again; deleting it can wait for the next time.
            self.degraded = error
        return known
