# SPDX-License-Identifier: Apache-2.0
"""Files that are whole or absent, and files of tenants read without trusting them."""

import errno
import os
import stat
import tempfile
from pathlib import Path

from horowatt.errors import NeedsOperator, NotAllowed

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def disk_full(path: Path, error: OSError) -> NeedsOperator:
    """Return the error that says which file system is full."""
    return NeedsOperator(
        "HW-DISK-001",
        f"no space left to write {path}",
        because=error.strerror or str(error),
        hint=f"free space on the file system of {path.parent}; nothing already stored is lost",
        fields={"path": str(path)},
    )


def write_atomic(
    path: Path, data: bytes, *, mode: int = 0o600, uid: int | None = None, gid: int | None = None
) -> None:
    """Replace ``path`` by ``data`` so that a reader sees the old or the new content, never a part.

    Args:
        uid: Owner of the new file; None keeps the caller.

    Raises:
        NeedsOperator: ``HW-DISK-001`` when the file system is full; the old content stays.
    """
    handle, name = -1, ""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            if uid is not None:
                os.fchown(stream.fileno(), uid, gid if gid is not None else -1)
            os.fsync(stream.fileno())
        Path(name).replace(path)
    except OSError as error:
        if name:
            Path(name).unlink(missing_ok=True)
        if error.errno in _NO_SPACE:
            raise disk_full(path, error) from error
        raise


def open_owned(path: Path, uid: int) -> int:
    """Open a regular file of user ``uid`` for reading and return its descriptor.

    An agent reads files that tenants can replace: a link or somebody else's file is refused, so
    that no tenant can have the agent read what the tenant itself may not.

    Raises:
        FileNotFoundError: when there is no such file.
        NotAllowed: ``HW-FILE-001`` for a link, a special file or a file of another user.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_plain(path, "it is a symbolic link") from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != uid:
        os.close(descriptor)
        raise _not_plain(path, f"it is not a regular file of user {uid}")
    return descriptor


def read_owned(path: Path, uid: int, *, limit_bytes: int = 1 << 20, offset: int = 0) -> bytes:
    """Return at most ``limit_bytes`` of a file that ``open_owned`` accepts, from ``offset`` on."""
    descriptor = open_owned(path, uid)
    try:
        return os.pread(descriptor, limit_bytes, offset)
    finally:
        os.close(descriptor)


def _not_plain(path: Path, why: str) -> NotAllowed:
    return NotAllowed(
        "HW-FILE-001",
        f"{path} is not read",
        because=why,
        hint="files in a job's folder are written by Horowatt; do not replace them",
        fields={"path": str(path)},
    )
