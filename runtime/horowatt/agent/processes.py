# SPDX-License-Identifier: Apache-2.0
"""Processes of users: started as them, named beyond doubt, found by what they hold, ended.

A pid alone names nothing, because pids are used again; here a process is its pid and the kernel
tick of its start. Signals go through a pidfd that was checked after it was opened.
"""

import contextlib
import errno
import os
import pwd
import re
import resource
import signal
import stat
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from horowatt.errors import NotAllowed
from horowatt.files import open_owned

_PROC = Path("/proc")
_START_FIELD = 19
"""Index of ``starttime`` among the fields after the command's name in ``/proc/<pid>/stat``."""
_NORMAL_NICE = 20
"""``RLIMIT_NICE`` that allows a process to lower its niceness to 0, and no further."""
_MAX_ANCESTORS = 64
_DEAD_STATES = frozenset({"Z", "X", "x"})
_REAL_UID = re.compile(r"^Uid:\s+(\d+)", re.MULTILINE)
_STANDARD_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """One process, for ever.

    Attributes:
        start_ticks: When it started, clock ticks since the node's start.
    """

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUser:
    """Whom a process runs as."""

    uid: int
    gid: int
    name: str
    home: str
    groups: tuple[int, ...]


def identify(pid: int) -> ProcessId | None:
    """Return the identity of a living process, or None when there is none (a zombie is none)."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command's name may hold spaces and brackets; the fields start after its last bracket.
    fields = text.rpartition(")")[2].split()
    if len(fields) <= _START_FIELD or fields[0] in _DEAD_STATES:
        return None
    return ProcessId(pid=pid, start_ticks=int(fields[_START_FIELD]))


def is_alive(process: ProcessId) -> bool:
    """Tell whether exactly this process lives."""
    return identify(process.pid) == process


def real_uid(pid: int) -> int | None:
    """Return the real user of a process, or None when it is gone."""
    try:
        found = _REAL_UID.search((_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return int(found[1]) if found else None


def send_signal(process: ProcessId, uid: int, number: signal.Signals) -> bool:
    """Signal exactly this process, if it is one of user ``uid``.

    Returns:
        False when it is gone, or belongs to somebody else.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not is_alive(process) or real_uid(process.pid) != uid:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def lock_holders(lock_paths: Iterable[Path], uid: int) -> tuple[ProcessId, ...]:
    """Return the processes of user ``uid`` that hold one of these files by ``flock``.

    A lock file is the tenant's, who could put another file in its place; so it must be a plain file
    of the tenant, and only processes of the tenant are named, never those of others.
    """
    wanted = {inode for path in lock_paths if (inode := _inode(path, uid)) is not None}
    if not wanted:
        return ()
    return tuple(
        process
        for entry in _PROC.iterdir()
        if entry.name.isdigit()
        and int(entry.name) != os.getpid()
        and real_uid(int(entry.name)) == uid
        and (process := identify(int(entry.name))) is not None
        and _holds(entry, wanted)
    )


def belongs_to(pid: int, lock_paths: Iterable[Path], uid: int) -> bool:
    """Tell whether a process of user ``uid``, or one it descends from, holds one of these files by ``flock``.

    Children of a worker inherit its lock, but those that were started with their descriptors closed
    are known by their parents only.
    """
    wanted = {inode for path in lock_paths if (inode := _inode(path, uid)) is not None}
    for _ in range(_MAX_ANCESTORS):
        if not wanted or real_uid(pid) != uid:
            return False
        if _holds(_PROC / str(pid), wanted):
            return True
        parent = _parent(pid)
        if parent is None:
            return False
        pid = parent
    return False


def _parent(pid: int) -> int | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _inode(path: Path, uid: int) -> tuple[int, int] | None:
    try:
        descriptor = open_owned(path, uid)
    except (NotAllowed, OSError):
        return None
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return status.st_dev, status.st_ino


def _holds(process_folder: Path, wanted: set[tuple[int, int]]) -> bool:
    try:
        descriptors = list((process_folder / "fd").iterdir())
    except OSError:
        return False
    for descriptor in descriptors:
        try:
            status = descriptor.stat()
            if (status.st_dev, status.st_ino) not in wanted:
                continue
            # An open file is not yet a lock: a shell that only reads the file must not be killed.
            if "FLOCK" in (process_folder / "fdinfo" / descriptor.name).read_text(encoding="ascii"):
                return True
        except OSError:
            continue
    return False


def find_user(uid: int, gid: int, username: str) -> JobUser:
    """Return the user of a job; supplementary groups only where the name really is that user's."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return JobUser(uid=uid, gid=gid, name=username, home="/", groups=())
    groups = tuple(os.getgrouplist(entry.pw_name, gid))
    return JobUser(uid=uid, gid=gid, name=entry.pw_name, home=entry.pw_dir, groups=groups)


def clean_environment(user: JobUser, program: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the small environment of a launcher: nothing of the agent's own but ``extra``."""
    return {
        "PATH": f"{program.parent}:{_STANDARD_PATH}",
        "HOME": user.home,
        "USER": user.name,
        "LOGNAME": user.name,
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",  # noqa: S108 - a default for the tenant's programs, nothing is written here
        **extra,
    }


def start_detached(
    arguments: Sequence[str],
    *,
    user: JobUser,
    folder: Path,
    log: Path,
    environment: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """Start a process that outlives the agent: own session, as the user, output into ``log``.

    Started by root, it and its children may lower their niceness again to 0, as users usually may not.

    Args:
        folder: Working directory.

    Raises:
        OSError: when the program cannot be started as this user.
        NotAllowed: ``HW-FILE-001`` when ``log`` is not a plain file of the user.
    """
    as_root = os.geteuid() == 0
    output = _open_log(log, user)
    try:
        process = subprocess.Popen(
            list(arguments),
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            umask=0o077,
            user=user.uid if as_root else None,
            group=user.gid if as_root else None,
            extra_groups=user.groups if as_root else None,
        )
    finally:
        os.close(output)
    if as_root:
        # Without this right a standby that has stepped back could not return to normal priority. A root
        # that lacks CAP_SYS_RESOURCE cannot give it; standbys then do not step back.
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(process.pid, resource.RLIMIT_NICE, (_NORMAL_NICE, _NORMAL_NICE))
    return process


def _open_log(path: Path, user: JobUser) -> int:
    """Open a log for appending in a folder that its tenant owns, following no link."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return _reopen_log(path, user)
    if os.geteuid() == 0:
        os.fchown(descriptor, user.uid, user.gid)
    return descriptor


def _reopen_log(path: Path, user: JobUser) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _not_a_log(path) from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != user.uid:
        os.close(descriptor)
        raise _not_a_log(path)
    os.set_blocking(descriptor, True)
    return descriptor


def _not_a_log(path: Path) -> NotAllowed:
    return NotAllowed(
        "HW-FILE-001",
        f"{path} is not written to",
        because="it is not a regular file of the job's user",
        hint="files in a job's folder are written by Horowatt; do not replace them",
        fields={"path": str(path)},
    )
