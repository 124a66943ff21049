# SPDX-License-Identifier: Apache-2.0
"""What one check says."""

from dataclasses import asdict, dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    """Something stays unavailable; jobs can run."""
    FAIL = "fail"
    """Jobs cannot run on this machine, or not from this Python environment."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    """What is there."""
    consequence: str = ""
    """What stays unavailable because of it; empty when nothing does."""
    fix: str = ""
    """What to do about it; empty when nothing is to be done."""
    code: str = ""
    """Stable code of the problem; empty when there is none."""

    def to_json(self) -> dict[str, str]:
        """Return the record as plain JSON values."""
        return {name: str(value) for name, value in asdict(self).items()}


def good(name: str, found: str, consequence: str = "") -> Check:
    """Return a check with nothing to be done."""
    return Check(name, Status.OK, found, consequence)


def warning(name: str, code: str, found: str, consequence: str, fix: str) -> Check:
    """Return a check after which something stays unavailable."""
    return Check(name, Status.WARN, found, consequence, fix, code)


def failure(name: str, code: str, found: str, consequence: str, fix: str) -> Check:
    """Return a check after which no job can run."""
    return Check(name, Status.FAIL, found, consequence, fix, code)
