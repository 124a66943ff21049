# SPDX-License-Identifier: Apache-2.0
"""The agent's own memory: one SQLite file that survives ``kill -9`` of the agent.

Why SQLite and not a file that is appended to: closing an interval, opening the next and counting
``seq`` must happen together or not at all, acknowledged intervals must go, and half a line after a
crash must not exist.

``synchronous=FULL`` costs one fsync per commit, and there is about one commit in ten seconds. In
return a power cut cannot take back what the head was already told: with less, ``seq`` would be
given out twice and the head would drop the second as a repeat.

``locking_mode=EXCLUSIVE`` keeps the write-ahead index in memory instead of a mapped file, which
would kill the process when the file system is full.

What tenants write is never remembered here, and nothing that decides about rights (who a job runs
as, which leases it holds) is ever read back from a folder that a tenant owns.
"""

import contextlib
import os
import sqlite3
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from horowatt.errors import NeedsOperator
from horowatt.files import disk_full

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE intervals (seq INTEGER PRIMARY KEY, record BLOB NOT NULL) STRICT;
CREATE TABLE opened (gpu_uuid TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT;
CREATE TABLE jobs (job_id TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT;
CREATE TABLE leases (
  lease_id TEXT PRIMARY KEY,
  job_id TEXT NOT NULL,
  generation INTEGER NOT NULL,
  record BLOB NOT NULL
) STRICT;
"""


class StateFile:
    """The database; used by one thread.

    Attributes:
        agent_id: Random identity of this file; a new file is a new agent to the head.
        boot_id: This start of the node, as the kernel names it.
        same_boot: False when open intervals were last stored in another start of the node.
        set_aside: Where an unreadable predecessor went, or None.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set_aside: Path | None = None
        try:
            self._database = _connect(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise _cannot_write(path, error) from error
            self.set_aside = _move_aside(path)
            self._database = _connect(path)
        self._begin()

    def _begin(self) -> None:
        meta = dict(self.rows("SELECT key, value FROM meta"))
        self.boot_id = _boot_id()
        self.same_boot = meta.get("boot_id") == self.boot_id
        self.agent_id = str(meta.get("agent_id") or uuid.uuid4().hex)
        if "agent_id" not in meta:
            with self.transaction() as database:
                database.execute("INSERT INTO meta VALUES ('agent_id', ?)", (self.agent_id,))

    def close(self) -> None:
        """Close the file; nothing is lost."""
        self._database.close()

    def rows(self, query: str, parameters: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query.

        Raises:
            NeedsOperator: ``HW-AGENT-007`` when the file cannot be read.
        """
        try:
            return self._database.execute(query, parameters).fetchall()
        except sqlite3.OperationalError as error:
            raise _cannot_write(self.path, error) from error

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit all statements of the block, or none.

        Raises:
            NeedsOperator: ``HW-DISK-001`` when the file system is full, ``HW-AGENT-007`` when the
                file cannot be written for another reason; nothing of the block is then stored.
        """
        try:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                yield self._database
        except sqlite3.OperationalError as error:
            raise _cannot_write(self.path, error) from error


def _connect(path: Path) -> sqlite3.Connection:
    # Created before SQLite does, so that it is never readable by others, whatever the umask.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    database = sqlite3.connect(path, isolation_level=None, timeout=5.0)
    try:
        database.execute("PRAGMA locking_mode=EXCLUSIVE")
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        version = int(database.execute("PRAGMA user_version").fetchone()[0])
        if version == 0:
            database.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version={_SCHEMA_VERSION};COMMIT;")
        elif version != _SCHEMA_VERSION:
            raise NeedsOperator(
                "HW-AGENT-008",
                f"{path} was written by another version of Horowatt",
                because=f"its layout is {version}, this version knows {_SCHEMA_VERSION}",
                hint="run the version that wrote it, or move the file away once all jobs here ended",
                fields={"path": str(path)},
            )
    except BaseException:
        database.close()
        raise
    return database


def _move_aside(path: Path) -> Path:
    target = path.with_name(f"{path.name}.unreadable-{int(time.time())}")
    path.replace(target)
    for suffix in ("-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return target


def _cannot_write(path: Path, error: sqlite3.OperationalError) -> NeedsOperator:
    if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
        return disk_full(path, OSError(0, str(error)))
    return NeedsOperator(
        "HW-AGENT-007",
        f"the agent's state file {path} cannot be used",
        because=str(error),
        hint="check that the run directory is on a local, writable file system in good health",
        fields={"path": str(path)},
    )


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
