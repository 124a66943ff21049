# SPDX-License-Identifier: Apache-2.0
"""What the agent does in folders that tenants own, and what it reads there, trusting nothing."""

import dataclasses
import json
import os
import re
import stat
from pathlib import Path

from horowatt import wire
from horowatt.elastic.counters import Counters, read_counters
from horowatt.elastic.folder import JobFolder, LeaseFolder, checked_name
from horowatt.errors import HorowattError, InvalidInput, NotAllowed
from horowatt.files import open_owned, read_owned
from horowatt.records import LauncherStatus, LeaseReport

_STATUS_LIMIT_BYTES = 64 * 1024
_EXIT_LIMIT_BYTES = 1024
_MAX_EXIT_CODE = 255
_TAIL_BYTES = 4096
_TAIL_LINES = 5
_MAX_FOUND_LEASES = 256

_CODE = re.compile(r"HW-[A-Z]+-\d{3}")
_MAX_EXIT_CODE = 255
_MAX_MESSAGE_CHARS = 4096


def make_job_folder(folder: JobFolder, uid: int, gid: int) -> None:
    """Make the private folder of a job; may be repeated.

    Raises:
        NotAllowed: ``HW-FILE-001`` when something else lies in its place.
    """
    try:
        folder.root.mkdir(mode=0o700)
    except FileExistsError:
        status = folder.root.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid:
            raise NotAllowed(
                "HW-FILE-001",
                f"{folder.root} is not used",
                because=f"it is not a folder of user {uid}",
                hint="remove it; the agent makes the folders of jobs itself",
                fields={"path": str(folder.root)},
            ) from None
    else:
        os.chown(folder.root, uid, gid, follow_symlinks=False)
    _make_commits_folder(folder, uid, gid)


def _make_commits_folder(folder: JobFolder, uid: int, gid: int) -> None:
    """Make the folder of the job's commits; what its user put in its place is that user's loss."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    root = os.open(folder.root, flags)
    try:
        os.mkdir(folder.commits.name, 0o700, dir_fd=root)
        # By descriptor, and a folder only: its name is the tenant's, who could put another file there.
        made = os.open(folder.commits.name, flags, dir_fd=root)
        try:
            os.fchown(made, uid, gid)
        finally:
            os.close(made)
    except FileExistsError:
        return
    finally:
        os.close(root)


def read_status(folder: JobFolder, uid: int) -> LauncherStatus | None:
    """Return what the launcher last said, or None when there is nothing that can be understood."""
    try:
        data = read_owned(folder.launcher_json, uid, limit_bytes=_STATUS_LIMIT_BYTES)
        said = wire.decode(data, LauncherStatus)
    except (OSError, HorowattError):
        return None
    # The file is the tenant's: what it says is shown to people, so it must look like what ours says.
    known_exit = said.exit_code is None or abs(said.exit_code) <= _MAX_EXIT_CODE
    return dataclasses.replace(
        said,
        code=said.code if _CODE.fullmatch(said.code) else "",
        message=said.message[:_MAX_MESSAGE_CHARS],
        exit_code=said.exit_code if known_exit else None,
    )


def read_tail(path: Path, uid: int) -> str:
    """Return the last lines of a log, or an empty string."""
    try:
        descriptor = open_owned(path, uid)
    except (OSError, NotAllowed):
        return ""
    try:
        size = os.fstat(descriptor).st_size
        data = os.pread(descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    finally:
        os.close(descriptor)
    return "\n".join(data.decode("utf-8", "replace").strip().splitlines()[-_TAIL_LINES:])


def found_leases(folder: JobFolder, uid: int) -> list[str]:
    """Return the ids of leases that have a folder, at most a bounded number of them."""
    try:
        descriptor = os.open(folder.leases, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        own = os.fstat(descriptor).st_uid == uid
        names = sorted(os.listdir(descriptor)) if own else []  # noqa: PTH208 - a descriptor has no path
    except OSError:
        return []
    finally:
        os.close(descriptor)
    return [name for name in names if _is_lease_id(name)][:_MAX_FOUND_LEASES]


def _is_lease_id(name: str) -> bool:
    try:
        checked_name(name, "lease id")
    except InvalidInput:
        return False
    return True


def lease_report(
    folder: LeaseFolder, lease_id: str, uid: int, *, held: bool, now_s: float
) -> tuple[LeaseReport, Counters | None]:
    """Return what became of a lease, and the counters of its worker if there are any."""
    try:
        counters = read_counters(folder.counters, uid)
    except NotAllowed:
        counters = None
    exit_code = None if held else _exit_code(folder, uid)
    report = LeaseReport(
        lease_id=lease_id,
        held=held,
        started=held or counters is not None or exit_code is not None,
        rank=counters.rank if counters else None,
        world_size=counters.world_size if counters else None,
        steps=counters.steps if counters else 0,
        samples=counters.samples if counters else None,
        epoch_samples=counters.epoch_samples if counters else None,
        first_step_end_s=counters.first_step_end_s if counters else None,
        last_step_end_s=counters.last_step_end_s if counters else None,
        exit_code=exit_code,
        sampled_at_s=now_s,
    )
    return report, counters


def _exit_code(folder: LeaseFolder, uid: int) -> int | None:
    try:
        said = json.loads(read_owned(folder.exit_json, uid, limit_bytes=_EXIT_LIMIT_BYTES))
    except (OSError, ValueError, NotAllowed, RecursionError):
        return None
    code = said.get("exit_code") if isinstance(said, dict) else None
    return (
        code if isinstance(code, int) and not isinstance(code, bool) and abs(code) <= _MAX_EXIT_CODE else None
    )
