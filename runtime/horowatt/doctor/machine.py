# SPDX-License-Identifier: Apache-2.0
"""Checks of the machine: ssh, network, clock, disk, limits, and the service's socket."""

import ctypes
import os
import resource
import shutil
import socket
import time
from pathlib import Path

from horowatt.client import ServiceClient
from horowatt.doctor.record import Check, failure, good, warning
from horowatt.errors import HorowattError
from horowatt.horovod_build.toolchain import first_line

OLDEST_CLOCK_S = 1_735_689_600.0
"""2025-01-01 UTC: a clock before it was never set."""
MIN_PORTS = 2_000
"""Each worker listens on a few ports of its own, each launcher on two or three."""
MIN_FILES = 1_024
FEW_FREE_BYTES = 2 << 30
NO_FREE_BYTES = 200 << 20

CONNECT_TIMEOUT_S = 5.0

_TIME_ERROR = 5
"""What adjtimex returns while the kernel's clock is not synchronised."""
_TIMEX_BYTES = 512
"""More than any libc's struct timex."""
_SYSTEM_SBIN = "/usr/sbin:/usr/local/sbin:/sbin"


def check_ssh() -> Check:
    """Check ssh, which a user's own horovodrun uses between machines."""
    client = shutil.which("ssh")
    server = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:{_SYSTEM_SBIN}")
    version = first_line(client, "-V") if client else ""
    found = f"{version or client or 'no ssh client'}; {server or 'no sshd'}"
    if client and server:
        return good("ssh", found)
    missing = [*([] if client else ["openssh-client"]), *([] if server else ["openssh-server"])]
    return warning(
        "ssh",
        "HW-DOC-020",
        found,
        "your own 'horovodrun' cannot reach from or to this machine; Horowatt's own launcher on one machine "
        "needs no ssh",
        f"Debian and Ubuntu: apt-get install {' '.join(missing)}",
    )


def check_network() -> Check:
    """Check that this machine can listen on its loopback interface and has ports to give."""
    name = "ports"
    interfaces = [interface for _, interface in socket.if_nameindex()]
    consequence = "workers cannot talk to each other, so no job can run"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen(1)
            # With the interface down, listening still works; only a connection shows it.
            socket.create_connection(probe.getsockname(), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return failure(
            name,
            "HW-DOC-021",
            f"127.0.0.1 cannot be reached: {error.strerror or error}; "
            f"interfaces: {', '.join(interfaces) or 'none'}",
            consequence,
            "bring the loopback interface up: ip link set lo up",
        )
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        low, high = (int(part) for part in text.split())
    except (OSError, ValueError):
        return good(name, f"127.0.0.1 works; interfaces: {', '.join(interfaces)}")
    found = f"127.0.0.1 works; ports {low} to {high}; interfaces: {', '.join(interfaces)}"
    if high - low + 1 < MIN_PORTS:
        return warning(
            name,
            "HW-DOC-022",
            found,
            "many workers on this machine may run out of ports",
            'sysctl -w net.ipv4.ip_local_port_range="32768 60999"',
        )
    return good(name, found)


def check_clock(now_s: float | None = None) -> Check:
    """Check that the clock was set and is kept in step with others.

    Args:
        now_s: The wall clock, seconds since the epoch; None asks it.
    """
    name = "clock"
    now_s = time.time() if now_s is None else now_s
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    if now_s < OLDEST_CLOCK_S:
        return failure(
            name,
            "HW-DOC-023",
            f"it says {shown}",
            "energy and deadlines would be booked at a wrong time",
            "set the clock, and install a time service such as chrony",
        )
    if not _clock_synchronised():
        return warning(
            name,
            "HW-DOC-024",
            f"{shown}, not synchronised as far as the kernel knows",
            "energy of several machines is put on one time line only as well as their clocks agree",
            "install a time service such as chrony (in a virtual machine its host may do it already)",
        )
    return good(name, f"{shown}, synchronised")


def _clock_synchronised() -> bool:
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    # All zero is a request that changes nothing.
    return adjtimex is None or adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)) != _TIME_ERROR


def check_disk(folder: Path) -> Check:
    """Check that the folder for state can be written and has room."""
    name = "state-folder"
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    free_bytes = shutil.disk_usage(there).free
    found = f"{folder}: {free_bytes / (1 << 30):.1f} GiB free"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return warning(
            name,
            "HW-DOC-025",
            f"{folder} cannot be written by this user",
            "a service or an agent cannot keep its state there",
            "name another folder, or give this user the right to write there",
        )
    if free_bytes < NO_FREE_BYTES:
        return failure(
            name, "HW-DOC-026", found, "state and logs of jobs cannot be written", "free space there"
        )
    if free_bytes < FEW_FREE_BYTES:
        return warning(
            name, "HW-DOC-026", found, "logs of jobs may fill it; the service then stops", "free space there"
        )
    return good(name, found)


def check_open_files() -> Check:
    """Check how many files one process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} open files per process, may be raised to {_limit(hard)}"
    if soft != resource.RLIM_INFINITY and soft < MIN_FILES:
        return warning(
            "open-files",
            "HW-DOC-027",
            found,
            "launchers of wide jobs and services with many jobs run out of files",
            "ulimit -n 4096, or LimitNOFILE= in the service's unit",
        )
    return good("open-files", found)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def check_service(socket_path: Path) -> Check:
    """Check that the service answers on its socket."""
    try:
        ServiceClient(socket_path).request("GET", "/healthz")
    except HorowattError as error:
        return warning(
            "service",
            error.code,
            f"{error.message}: {error.because}" if error.because else error.message,
            "jobs can be neither submitted nor seen",
            error.hint,
        )
    return good("service", f"it answers on {socket_path}")
