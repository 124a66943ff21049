# SPDX-License-Identifier: Apache-2.0
"""A job's folder on a node: the only place that knows the names of its files.

See the table "A job's folder on a node" in ``docs/architecture.md`` for who writes what.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from horowatt.errors import InvalidInput

MAX_NAME_LENGTH = 128
"""Longest accepted job or lease id, characters; leaves room for suffixes in 255-byte file names."""

_SAFE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


def checked_name(name: str, what: str) -> str:
    """Return ``name`` when it is safe as one component of a path and as a host name.

    Args:
        what: The noun for the message, such as ``"lease id"``.

    Raises:
        InvalidInput: ``HW-JOB-020`` for anything else, so that no id can lead out of its folder.
    """
    if len(name) > MAX_NAME_LENGTH or ".." in name or not _SAFE_NAME.fullmatch(name):
        raise InvalidInput(
            "HW-JOB-020",
            f"{name!r} is not a valid {what}",
            because=f"only letters, digits, '.', '_' and '-' (inside) are allowed, "
            f"at most {MAX_NAME_LENGTH} of them",
            hint="use the id exactly as Horowatt printed it",
            fields={what: name},
        )
    return name


@dataclass(frozen=True, slots=True)
class LeaseFolder:
    """The files of one lease, and so of one worker at a time."""

    root: Path

    @property
    def lock(self) -> Path:
        """Held by ``flock`` while any process of the worker lives."""
        return self.root / "lock"

    @property
    def counters(self) -> Path:
        """Memory-mapped counters, see :mod:`horowatt.elastic.counters`."""
        return self.root / "counters"

    @property
    def output_log(self) -> Path:
        """Standard output and error of the worker."""
        return self.root / "output.log"

    @property
    def exit_json(self) -> Path:
        """How the worker ended; absent while it runs."""
        return self.root / "exit"


@dataclass(frozen=True, slots=True)
class JobFolder:
    """The files of one job on one node."""

    root: Path

    @classmethod
    def of(cls, run_dir: Path, job_id: str) -> Self:
        """Return the folder of a job below an agent's ``RUN_DIR``.

        Raises:
            InvalidInput: ``HW-JOB-020`` when the id is not safe as a path component.
        """
        return cls(run_dir / "jobs" / checked_name(job_id, "job id"))

    @property
    def job_json(self) -> Path:
        """The ``LaunchSpec``."""
        return self.root / "job.json"

    @property
    def slots_json(self) -> Path:
        """The ``SlotsFile``: the truth."""
        return self.root / "slots.json"

    @property
    def node_json(self) -> Path:
        """Environment variables by which any process on this node reaches its simulated GPUs."""
        return self.root / "node.json"

    @property
    def hostfile(self) -> Path:
        """What Horovod's discovery reads, derived from the slots file."""
        return self.root / "hostfile"

    @property
    def discover_script(self) -> Path:
        """POSIX sh that prints the hostfile."""
        return self.root / "discover.sh"

    @property
    def launcher_json(self) -> Path:
        """The ``LauncherStatus``."""
        return self.root / "launcher.json"

    @property
    def launcher_lock(self) -> Path:
        """Held by ``flock`` for the launcher's life."""
        return self.root / "launcher.lock"

    @property
    def launcher_log(self) -> Path:
        """Standard output and error of the launcher."""
        return self.root / "launcher.log"

    @property
    def events(self) -> Path:
        """One JSON object per line, appended in one ``write`` each."""
        return self.root / "events.jsonl"

    @property
    def commits(self) -> Path:
        """Folder of the job's durable commits on this node."""
        return self.root / "commits"

    @property
    def leases(self) -> Path:
        """Parent of the folders of the leases."""
        return self.root / "leases"

    def lease(self, lease_id: str) -> LeaseFolder:
        """Return the folder of one lease.

        Raises:
            InvalidInput: ``HW-JOB-020`` when the id is not safe as a path component.
        """
        return LeaseFolder(self.leases / checked_name(lease_id, "lease id"))
