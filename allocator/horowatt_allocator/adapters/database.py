# SPDX-License-Identifier: Apache-2.0
"""The database itself: opening, migrating, and saying what is wrong with it.

Nothing but the connection settings below knows SQLite; every statement runs on PostgreSQL too.
"""

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from horowatt.errors import HorowattError, NeedsOperator, RetryLater
from horowatt.files import disk_full

DATABASE_NAME = "horowatt.sqlite"
_BUSY_TIMEOUT_S = 5.0
_MIGRATIONS = Path(__file__).parent / "migrations"


def open_engine(path: Path) -> sa.Engine:
    """Return an engine for a SQLite file in WAL mode whose commits survive a loss of power."""
    engine = sa.create_engine(
        sa.URL.create("sqlite", database=str(path)), connect_args={"timeout": _BUSY_TIMEOUT_S}
    )

    @sa.event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: object) -> None:  # whatever the driver gives
        # The driver's own BEGIN comes too late: not before DDL, so that migrations would not be whole.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        # FULL: a job that was acknowledged is on the disk, also when the power fails a moment later.
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.close()

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


@contextmanager
def mapped_errors(path: Path) -> Iterator[None]:
    """Turn errors of the database into errors that people can act on.

    Raises:
        NeedsOperator: ``HW-DISK-001`` no space left, ``HW-DISK-002`` the disk cannot be written,
            ``HW-DB-001`` the file is no database or damaged, ``HW-DB-004`` anything else.
        RetryLater: ``HW-DB-003`` when the database is locked by another program.
    """
    try:
        yield
    except SQLAlchemyError as error:
        cause = error.orig if isinstance(error, DBAPIError) else None
        raise _mapped(path, cause or error) from error


def _mapped(path: Path, cause: BaseException) -> HorowattError:
    code = getattr(cause, "sqlite_errorcode", None)
    primary = code & 0xFF if isinstance(code, int) else None
    fields = {"path": str(path)}
    if primary == sqlite3.SQLITE_FULL or (primary in _IO_CODES and _no_space(path)):
        return disk_full(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    if primary in _IO_CODES:
        return NeedsOperator(
            "HW-DISK-002",
            f"{path} cannot be written",
            because=str(cause),
            hint="check the disk (dmesg), its quota and the permissions of the folder",
            fields=fields,
        )
    if primary in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
        return RetryLater(
            "HW-DB-003",
            f"another program has locked {path}",
            because=str(cause),
            hint="close the other program; the service goes on by itself",
            fields=fields,
        )
    if primary in {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}:
        return NeedsOperator(
            "HW-DB-001",
            f"{path} is damaged or not a database",
            because=str(cause),
            hint="restore it from a backup; running jobs go on meanwhile",
            fields=fields,
        )
    return NeedsOperator(
        "HW-DB-004",
        f"the database {path} refused an operation",
        because=str(cause),
        hint="this is a defect of Horowatt; please report it with the service's log",
        fields=fields,
    )


_IO_CODES = frozenset(
    {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}
)


def _no_space(path: Path) -> bool:
    # With no room for its shared index SQLite reports an I/O error instead of a full disk.
    try:
        free = os.statvfs(path.parent)
    except OSError:
        return False
    return free.f_bavail * free.f_frsize < 1 << 16


def migrate(engine: sa.Engine, path: Path) -> None:
    """Bring the schema up to this version of Horowatt, all or nothing.

    Raises:
        NeedsOperator: ``HW-DB-002`` when the database was written by a newer Horowatt.
    """
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    scripts = ScriptDirectory.from_config(config)
    with mapped_errors(path), engine.begin() as connection:
        found = MigrationContext.configure(connection).get_current_heads()
        known = {script.revision for script in scripts.walk_revisions()}
        if unknown := set(found) - known:
            raise NeedsOperator(
                "HW-DB-002",
                f"{path} was written by a newer version of Horowatt",
                because=f"its schema is {', '.join(sorted(unknown))}, this version knows up to "
                f"{scripts.get_current_head()}",
                hint="install the newer version again, or restore the backup made before the upgrade",
                fields={"path": str(path)},
            )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
