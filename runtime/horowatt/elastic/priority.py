# SPDX-License-Identifier: Apache-2.0
"""Staying out of the way of the workers that train, until this process trains itself."""

import contextlib
import errno
import os
import resource
import threading
import time
from pathlib import Path

STANDBY_NICENESS = 5
"""A third of the share of a worker that trains. With less, a standby on a busy node is never ready."""
_LAST = 19
_CAP_SYS_NICE = 1 << 23
_GROUP = Path("/proc/self/autogroup")
_RETRY_S = 0.11
_TRIES = 200


def may_return_to_normal() -> bool:
    """Return True when this process could undo a higher niceness: most users cannot."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    if soft == resource.RLIM_INFINITY or soft >= 20:  # noqa: PLR2004 - 20 less the niceness 0
        return True
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        effective = next(line.split()[1] for line in status if line.startswith("CapEff:"))
        return bool(int(effective, 16) & _CAP_SYS_NICE)
    return False


def step_back() -> bool:
    """Let other processes go first; returns False, and changes nothing, where it could not be undone."""
    if not may_return_to_normal():
        return False
    _set_niceness(STANDBY_NICENESS)
    _set_group(STANDBY_NICENESS)
    return True


def step_aside() -> None:
    """Let everybody else go first, for good: this process is about to end."""
    with contextlib.suppress(OSError):
        _set_niceness(_LAST)
    _set_group(_LAST)


def step_forward() -> None:
    """Undo :func:`step_back`, for every thread of this process."""
    with contextlib.suppress(OSError):
        _set_niceness(0)
    if not _set_group(0):
        threading.Thread(target=_insist, name="priority", daemon=True).start()


def _set_niceness(niceness: int) -> None:
    # On Linux the niceness is each thread's own, and with automatic groups each session's as well.
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - names only, and there may be hundreds
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(task), niceness)


def _set_group(niceness: int) -> bool:
    """Set the niceness of this session; False when the kernel wants to be asked again later."""
    try:
        _GROUP.write_text(str(niceness), encoding="ascii")
    except OSError as error:
        return error.errno != errno.EAGAIN
    return True


def _insist() -> None:
    # Without privileges the kernel takes one such request in a tenth of a second, of all users together.
    for _ in range(_TRIES):
        time.sleep(_RETRY_S)
        if _set_group(0):
            return
