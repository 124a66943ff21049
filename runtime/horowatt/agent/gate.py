# SPDX-License-Identifier: Apache-2.0
"""Whether a GPU may be granted. Pure decisions, no I/O; clock readings are arguments.

A slot changes hands in this order, each step seen by the agent before the next counts: the owner is gone
(its lock is free), no process that is not the owner's uses the GPU, its memory is free, its health is good.

What speaks against a GPU must have been measured; what cannot be read never blocks it. So where the
driver names no processes, memory alone tells; where it tells no memory either, the lock alone does. On
the other hand, what was measured is never overruled by the passing of time, because a GPU that waits for
a person costs less than a job that dies of it. One exception is bounded: a little memory that nobody
seems to use (below a tenth of the GPU's) is taken for the driver's own after a while.
"""

from dataclasses import dataclass

SPARE_BYTES = 512 << 20
"""Memory in use beyond what is usual for the free GPU above which it is not free, bytes."""
_CALM_BYTES = 256 << 20
"""The same below which it is free again, bytes."""
_LITTLE_SHARE = 0.1
"""Share of a GPU's memory below which memory that nobody seems to use does not block it for good."""
LITTLE_AFTER_S = 60.0
"""How long it does block it, seconds."""
CLEAR_AFTER_S = 10.0
"""How long nothing must have spoken against a GPU before it is free again, seconds.

Not so after a leaving worker's rest, which only ever gets less.
"""
LEAVING_S = 60.0
"""How long after the end of a lease what is on the GPU counts as its worker's rest, seconds."""
_SICK_LOOKS = 3
"""Looks in a row without a readable clock after which a GPU is sick."""
_GIB = float(1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignProcess:
    """A process on a GPU that belongs to none of the jobs that have a lease on it.

    Attributes:
        uid: Its user; None when this node does not see the process, as in another container.
        memory_bytes: None when the driver does not tell.
    """

    pid: int
    uid: int | None
    memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """One look at a GPU for whether it may be granted.

    Attributes:
        at_s: Monotonic clock, seconds.
        uids: Users of the jobs that have a lease on the GPU now.
        held: True while a process of one of those jobs' workers lives.
        fault: Why a person must look after it, or empty.
        sick: Why its clock could not be read, or empty.
        foreign: Processes of others.
        named_bytes: Memory of all processes that the driver names.
        used_bytes: Memory in use, or None when it cannot be read.
        total_bytes: Memory there is, or None when it cannot be read.
    """

    at_s: float
    uids: frozenset[int]
    held: bool
    fault: str
    sick: str
    foreign: tuple[ForeignProcess, ...]
    named_bytes: int
    used_bytes: int | None
    total_bytes: int | None


class Gate:
    """The verdict on one GPU, from look to look.

    Attributes:
        busy: Why the GPU must not be granted now; empty when it may be.
        accepted: What was taken for the driver's own memory at the last look, in words, or empty.
    """

    def __init__(self) -> None:
        self.busy = ""
        self.accepted = ""
        self._usual_bytes: int | None = None
        self._little_since_s: float | None = None
        self._clean_since_s: float | None = None
        self._quick = False
        self._sick_looks = 0
        self._uids: frozenset[int] = frozenset()
        self._left_uids: frozenset[int] = frozenset()
        self._left_at_s = -float("inf")

    def judge(self, glance: Glance) -> str:
        """Take one look and return :attr:`busy`."""
        self.accepted = ""
        if self._uids - glance.uids:
            self._left_uids, self._left_at_s = self._uids - glance.uids, glance.at_s
        self._uids = glance.uids
        leaving = glance.at_s - self._left_at_s < LEAVING_S
        reason = self._health(glance) or self._others(glance)
        if reason:
            self._quick = False
            if glance.foreign and leaving:
                self._quick = all(process.uid in self._left_uids for process in glance.foreign)
        elif memory := self._memory(glance, leaving=leaving):
            reason, self._quick = memory, leaving
        if reason:
            self.busy, self._clean_since_s = reason, None
        elif self.busy:
            if self._clean_since_s is None:
                self._clean_since_s = glance.at_s
            if self._quick or glance.at_s - self._clean_since_s >= CLEAR_AFTER_S:
                self.busy = ""
        return self.busy

    def _health(self, glance: Glance) -> str:
        self._sick_looks = self._sick_looks + 1 if glance.sick else 0
        if glance.fault:
            return glance.fault
        return glance.sick if self._sick_looks >= _SICK_LOOKS else ""

    def _others(self, glance: Glance) -> str:
        if not glance.foreign:
            return ""
        largest = max(glance.foreign, key=lambda process: (process.memory_bytes or 0, -process.pid))
        # Whose it is, is not said: other tenants read this.
        whose = "" if largest.uid is not None else " that this node does not see"
        verb = "still uses" if largest.uid in self._left_uids else "uses"
        amount = "it" if largest.memory_bytes is None else f"{largest.memory_bytes / _GIB:.1f} GiB"
        more = f", and {len(glance.foreign) - 1} more" if len(glance.foreign) > 1 else ""
        return f"process {largest.pid}{whose} {verb} {amount}{more}"

    def _memory(self, glance: Glance, *, leaving: bool) -> str:
        """Return what memory that belongs to no named process says against a GPU whose lock is free."""
        if glance.held or glance.used_bytes is None:
            self._little_since_s = None
            return ""
        ownerless = max(0, glance.used_bytes - glance.named_bytes)
        little = (glance.total_bytes or 0) * _LITTLE_SHARE
        if self._usual_bytes is None:
            # What a display server or the driver had before the first job; a large part is not theirs.
            before_jobs = not self._uids and not leaving
            self._usual_bytes = ownerless if before_jobs and ownerless <= little else 0
        self._usual_bytes = min(self._usual_bytes, ownerless)
        beyond = ownerless - self._usual_bytes
        if beyond <= (_CALM_BYTES if self.busy else SPARE_BYTES):
            self._little_since_s = None
            return ""
        said = f"{beyond / _GIB:.1f} GiB of its memory are in use by no process that the driver names"
        if beyond > little:
            self._little_since_s = None
            return said
        if self._little_since_s is None:
            self._little_since_s = glance.at_s
        if glance.at_s - self._little_since_s < LITTLE_AFTER_S:
            return said
        self.accepted, self._usual_bytes, self._little_since_s = said, ownerless, None
        return ""
