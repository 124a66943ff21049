# SPDX-License-Identifier: Apache-2.0
"""Publishing a job's slots: the slots file, the hostfile derived from it, the discovery script.

Every file is replaced by an atomic rename, the hostfile last: whoever sees a lease in the hostfile
finds it in the slots file, and nobody ever reads a part of one.

Known limitations: Horovod splits a line of a hostfile at its colon, so an IPv6 address cannot be
published to an attached job; use a host name.
"""

import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from horowatt.elastic.folder import JobFolder, LeaseFolder, checked_name
from horowatt.errors import InvalidInput, NotAllowed
from horowatt.files import read_owned, write_atomic
from horowatt.records import LauncherKind, LaunchSpec, SlotsFile
from horowatt.wire import encode

MAX_ADDRESS_LENGTH = 253
"""Longest host name of RFC 1123, characters."""

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_ADDRESS = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")


def checked_address(address: str) -> str:
    """Return ``address`` when Horovod and ssh will take it as a host name or IPv4 address.

    Raises:
        InvalidInput: ``HW-JOB-021`` for anything else, options (``-oProxyCommand``) included.
    """
    if len(address) > MAX_ADDRESS_LENGTH or not _ADDRESS.fullmatch(address):
        raise InvalidInput(
            "HW-JOB-021",
            f"{address!r} is not a host name or IPv4 address",
            because="Horovod splits the lines of a hostfile at ':', and ssh reads a leading '-' as an option",
            hint="give the node a host name or an IPv4 address in the inventory",
            fields={"address": address},
        )
    return address


def render(slots: SlotsFile, launcher: LauncherKind) -> str:
    """Return the hostfile of ``slots``: one ``<host>:<slots>`` per line, in the order of the slots file.

    The Horowatt launcher gets one host per lease, because a host that Horovod has not seen before is
    neither blacklisted nor confused with a dead worker. A user's ``horovodrun`` must reach the hosts
    by ssh, so it gets addresses, in the order of their first lease.
    """
    if launcher is LauncherKind.HOROWATT:
        hosts = {checked_name(lease.lease_id, "lease id"): 1 for lease in slots.leases}
    else:
        hosts = dict(Counter(checked_address(lease.address) for lease in slots.leases))
    return "".join(f"{host}:{count}\n" for host, count in hosts.items())


def discovery_script(hostfile: Path) -> str:
    """Return the POSIX sh script that prints ``hostfile`` and never fails.

    Horovod gives a job up when its first discovery fails, so a hostfile that is not there yet is
    printed as no hosts at all.
    """
    return (
        "#!/bin/sh\n"
        "# Prints the hosts of this Horowatt job for horovodrun --host-discovery-script.\n"
        f"cat -- {shlex.quote(str(hostfile))} 2>/dev/null || :\n"
    )


def publish(
    folder: JobFolder,
    spec: LaunchSpec,
    slots: SlotsFile,
    uid: int,
    gid: int,
    node_environment: Mapping[str, str] | None = None,
) -> None:
    """Write everything that the launcher and the workers of ``slots`` read; may be repeated.

    The job's folder must exist. Nothing below it is trusted: its owner can replace what it holds by
    links, so folders are entered without following them.

    Args:
        uid: Owner of the files: the job's tenant.
        gid: Group of the files.
        node_environment: Variables by which workers that no agent started reach this node's GPUs.

    Raises:
        InvalidInput: ``HW-JOB-020`` or ``HW-JOB-021`` for an id or address that is not safe.
        NotAllowed: ``HW-JOB-022`` when a lease's folder was replaced by something else.
        NeedsOperator: ``HW-DISK-001`` when the file system is full; what was published stays.
    """
    hosts = render(slots, spec.launcher)
    for lease in slots.leases:
        checked_address(lease.address)
        _make_lease_folder(folder, folder.lease(lease.lease_id), uid, gid)
    write_atomic(folder.job_json, encode(spec), uid=uid, gid=gid)
    write_atomic(folder.node_json, encode(dict(node_environment or {})), uid=uid, gid=gid)
    script = discovery_script(folder.hostfile.absolute()).encode()
    if not _holds(folder.discover_script, uid, script):
        write_atomic(folder.discover_script, script, mode=0o700, uid=uid, gid=gid)
    write_atomic(folder.slots_json, encode(slots), uid=uid, gid=gid)
    write_atomic(folder.hostfile, hosts.encode(), uid=uid, gid=gid)


def published_files(folder: JobFolder) -> tuple[Path, ...]:
    """Return the files that :func:`publish` writes."""
    return (folder.job_json, folder.node_json, folder.discover_script, folder.slots_json, folder.hostfile)


def _holds(path: Path, uid: int, data: bytes) -> bool:
    try:
        return read_owned(path, uid, limit_bytes=len(data) + 1) == data and os.access(path, os.X_OK)
    except (OSError, NotAllowed):
        return False


def _make_lease_folder(folder: JobFolder, lease: LeaseFolder, uid: int, gid: int) -> None:
    with_root = os.open(folder.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with_leases = _enter(with_root, folder.leases, uid, gid)
        try:
            os.close(_enter(with_leases, lease.root, uid, gid))
        finally:
            os.close(with_leases)
    finally:
        os.close(with_root)


def _enter(parent: int, path: Path, uid: int, gid: int) -> int:
    """Make the folder ``path.name`` in the open folder ``parent`` if it is absent, and open it."""
    try:
        os.mkdir(path.name, 0o700, dir_fd=parent)
    except FileExistsError:
        made = False
    else:
        made = True
    try:
        descriptor = os.open(
            path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent
        )
    except OSError as error:
        raise _replaced(path) from error
    status = os.fstat(descriptor)
    if made:
        os.fchown(descriptor, uid, gid)
    elif status.st_uid != uid or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(descriptor)
        raise _replaced(path)
    return descriptor


def _replaced(path: Path) -> NotAllowed:
    return NotAllowed(
        "HW-JOB-022",
        f"{path} is not used",
        because="it is not a private folder of the job's user",
        hint="folders below a job's folder are made by Horowatt; do not replace them",
        fields={"path": str(path)},
    )
