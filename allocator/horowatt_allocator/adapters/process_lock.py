# SPDX-License-Identifier: Apache-2.0
"""One service per state folder."""

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Self

from horowatt.errors import NeedsOperator


class ProcessLock:
    """Held by ``flock`` for the life of the process: the kernel lets go of it, also after kill -9."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path

    @classmethod
    def take(cls, path: Path) -> Self:
        """Take the lock and write this process's id into it.

        Raises:
            NeedsOperator: ``HW-SRV-002`` when another service holds it; the message names its pid.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise NeedsOperator(
                "HW-SRV-002",
                f"another service (pid {holder}) already uses {path.parent}",
                because=f"it holds {path}",
                hint=f"stop process {holder} first, or give this service another --state-dir",
                fields={"pid": holder, "state_dir": str(path.parent)},
            ) from error
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            # The pid is a help for people; the lock itself needs no space.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                os.close(descriptor)
                raise
        return cls(descriptor, path)

    def release(self) -> None:
        """Let go. The file stays: removing it would let two services lock two files of one name."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
