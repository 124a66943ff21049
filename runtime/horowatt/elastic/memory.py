# SPDX-License-Identifier: Apache-2.0
"""How much memory processes use, and how much is left."""

import contextlib
import os
from pathlib import Path


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, bytes; 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int | None:
    """Return the memory that can be had without swapping, bytes; None where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    return None
