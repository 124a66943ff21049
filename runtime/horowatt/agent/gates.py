# SPDX-License-Identifier: Apache-2.0
"""Looks at each GPU for what speaks against granting it: whose processes are there, and its health.

Known limitation: a process of a job's worker that has closed the lease's lock and left the process
tree (a daemon) is taken for a foreign one, rightly so once the lease has ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from horowatt.agent.gate import ForeignProcess, Gate, Glance
from horowatt.agent.notes import Notes, say
from horowatt.agent.processes import ProcessId, belongs_to, identify, real_uid
from horowatt.devices.gpu import GpuDevice, GpuProcess
from horowatt.devices.reading import Unmeasured, value_or_none

NOTE_AFTER_S = 60.0
"""How long a GPU must not have been grantable before the operator is told beside the GPU, seconds."""
_HEALTH_EVERY_S = 10.0
"""Pause between looks at the health of a GPU that has a lease, seconds; each look without one."""
_NOT_SUPPORTED = "Not Supported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A lease on a GPU, and how processes of its job are known.

    Attributes:
        uid: User of the job.
        held: True while some process of the lease's worker lives.
        locks: Files of which every process of the job on this node, or one it descends from, holds one.
    """

    lease_id: str
    uid: int
    held: bool
    locks: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a GPU may be granted.

    Attributes:
        busy: Why not, or empty.
        unmeasured: What could not be read for that, by ``"processes"`` and ``"memory_used"``.
    """

    busy: str
    unmeasured: Mapping[str, str]


@dataclass(slots=True)
class _Watched:
    gate: Gate = field(default_factory=Gate)
    own: set[ProcessId] = field(default_factory=set)
    leases: frozenset[str] = frozenset()
    health_at_s: float = 0.0
    fault: str = ""
    busy_since_s: float = 0.0


class Gates:
    """The gates of all GPUs of the node."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._watched: dict[str, _Watched] = {}

    def judge(
        self, devices: Mapping[str, GpuDevice], claims: Mapping[str, Sequence[Claim]], at_s: float
    ) -> dict[str, Verdict]:
        """Look at every GPU and return the verdicts by UUID.

        Args:
            devices: GPUs whose readings of this moment were just taken.
            claims: Leases by GPU UUID, as seen before the GPUs were looked at.
            at_s: Monotonic clock, seconds.
        """
        verdicts = {uuid: self._judge(device, claims.get(uuid, ()), at_s) for uuid, device in devices.items()}
        waiting = [
            f"{uuid}: {verdict.busy}"
            for uuid, verdict in verdicts.items()
            if verdict.busy and at_s - self._watched[uuid].busy_since_s >= NOTE_AFTER_S
        ]
        if waiting:
            self._notes.set("HW-AGENT-021", f"GPUs that are not granted: {'; '.join(sorted(waiting))}")
        else:
            self._notes.clear("HW-AGENT-021")
        return verdicts

    def _judge(self, device: GpuDevice, claims: Sequence[Claim], at_s: float) -> Verdict:
        watched = self._watched.setdefault(device.uuid, _Watched())
        before = watched.gate.busy
        unmeasured: dict[str, str] = {}
        if device.lost:
            glance = _lost(device, claims, at_s)
        else:
            glance, unmeasured = _look(device, claims, at_s, watched)
        busy = watched.gate.judge(glance)
        if watched.gate.accepted:
            self._notes.set("HW-AGENT-022", f"{device.uuid} is granted all the same: {watched.gate.accepted}")
        if busy and not before:
            watched.busy_since_s = at_s
            say(f"{device.uuid} is not granted now: {busy}")
        elif before and not busy:
            say(f"{device.uuid} may be granted again")
        return Verdict(busy=busy, unmeasured=unmeasured)


def _lost(device: GpuDevice, claims: Sequence[Claim], at_s: float) -> Glance:
    return Glance(
        at_s=at_s,
        uids=frozenset(claim.uid for claim in claims),
        held=any(claim.held for claim in claims),
        fault=device.loss or "is lost",
        sick="",
        foreign=(),
        named_bytes=0,
        used_bytes=None,
        total_bytes=None,
    )


def _look(
    device: GpuDevice, claims: Sequence[Claim], at_s: float, watched: _Watched
) -> tuple[Glance, dict[str, str]]:
    unmeasured: dict[str, str] = {}
    leases = frozenset(claim.lease_id for claim in claims)
    if leases != watched.leases:
        watched.own.clear()
        watched.leases = leases
    listed = device.processes()
    if isinstance(listed, Unmeasured):
        unmeasured["processes"] = listed.reason
        listed = ()
    drawing = device.graphics_processes()
    named = [*listed, *(() if isinstance(drawing, Unmeasured) else drawing)]
    used = device.memory_used_bytes()
    if isinstance(used, Unmeasured):
        unmeasured["memory_used"] = used.reason
    sick = ""
    if not claims or at_s - watched.health_at_s >= _HEALTH_EVERY_S:
        watched.health_at_s = at_s
        watched.fault = device.fault()
    clock = device.sm_clock_mhz()
    if isinstance(clock, Unmeasured) and not _says_little(clock.reason):
        sick = f"has a clock that cannot be read: {clock.reason}"
    used_bytes, total_bytes = value_or_none(used), value_or_none(device.memory_total_bytes())
    held = any(claim.held for claim in claims)
    glance = Glance(
        at_s=at_s,
        uids=frozenset(claim.uid for claim in claims),
        held=held,
        fault=watched.fault,
        sick=sick,
        foreign=_foreign(listed, claims, watched, held=held),
        named_bytes=sum(one.memory_bytes or 0 for one in {one.pid: one for one in named}.values()),
        used_bytes=None if used_bytes is None else int(used_bytes),
        total_bytes=None if total_bytes is None else int(total_bytes),
    )
    return glance, unmeasured


def _says_little(reason: str) -> bool:
    """Tell whether a reading is absent for a reason that says nothing about the GPU's health."""
    return any(text in reason for text in (_NOT_SUPPORTED, "Insufficient Permissions", "Function Not Found"))


def _foreign(
    listed: Sequence[GpuProcess], claims: Sequence[Claim], watched: _Watched, *, held: bool
) -> tuple[ForeignProcess, ...]:
    """Return the processes that belong to no claim's job."""
    found: list[ForeignProcess] = []
    own: set[ProcessId] = set()
    for process in listed:
        identity = identify(process.pid)
        uid = real_uid(process.pid)
        if identity is not None and (
            identity in watched.own
            or any(claim.uid == uid and belongs_to(process.pid, claim.locks, claim.uid) for claim in claims)
        ):
            own.add(identity)
        elif uid is not None or not held:
            # In a container the driver may name the worker by a number that means nothing here.
            found.append(ForeignProcess(pid=process.pid, uid=uid, memory_bytes=process.memory_bytes))
    watched.own = own
    return tuple(found)
