# SPDX-License-Identifier: Apache-2.0
"""Power limits that are always given back.

Before a GPU's limit is changed for the first time, the limit that it had goes into a journal on
disk. From then on the journal knows better than the GPU what "before Horowatt" was, also after
``kill -9``: an entry that is there is never replaced, so our own limit is never taken for it.

A journal from an earlier start of the node is void: the driver forgot all limits at its reload.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from horowatt import wire
from horowatt.agent.notes import Notes
from horowatt.devices.nvml import GpuDevice
from horowatt.devices.reading import Measured, value_or_none
from horowatt.errors import HorowattError, InvalidInput, NeedsOperator, NotAllowed
from horowatt.files import write_atomic

_SAME_W = 0.5
"""Two limits closer than this are the same one, watts; drivers round to whole watts or finer."""


class _Journal(msgspec.Struct, frozen=True):
    boot_id: str
    previous_w: dict[str, float]


class LimitKeeper:
    """Sets power limits on this node's GPUs and gives the previous ones back."""

    def __init__(self, journal: Path, boot_id: str, notes: Notes) -> None:
        self._path = journal
        self._boot_id = boot_id
        self._notes = notes
        self._previous_w = self._read()
        self._refused: set[str] = set()

    @property
    def previous_w(self) -> Mapping[str, float]:
        """The limit before Horowatt's first change, by UUID of every GPU that has ours now."""
        return dict(self._previous_w)

    def apply(self, wanted_w: Mapping[str, float], devices: Mapping[str, GpuDevice]) -> None:
        """Make the limits so; a GPU that is not named gets its previous limit back."""
        for uuid in [uuid for uuid in self._previous_w if uuid not in wanted_w]:
            self._restore(uuid, devices)
        for uuid, limit_w in wanted_w.items():
            device = devices.get(uuid)
            if device is not None and uuid not in self._refused:
                self._set(device, limit_w)

    def restore_all(self, devices: Mapping[str, GpuDevice]) -> None:
        """Give every previous limit back, as at start and at an orderly exit."""
        for uuid in list(self._previous_w):
            self._restore(uuid, devices)

    def _set(self, device: GpuDevice, wanted_w: float) -> None:
        if device.lost:
            return
        limit_w = _clamped(device, wanted_w)
        requested = device.requested_limit_w()
        if not isinstance(requested, Measured):
            # Without knowing the limit before ours there would be no way back to it.
            self._notes.set("HW-AGENT-012", f"limits of {device.uuid} are left alone: {requested.reason}")
            return
        if abs(requested.value - limit_w) < _SAME_W:
            return
        first = device.uuid not in self._previous_w
        if first and not self._remember(device.uuid, requested.value):
            return
        try:
            enforced = device.set_limit_w(limit_w)
        except HorowattError as error:
            self._notes.set(error.code, f"{error.message}: {error.because}")
            if isinstance(error, NotAllowed):
                self._refused.add(device.uuid)
            if first:
                self._forget(device.uuid)
            return
        in_force_w = value_or_none(enforced)
        if in_force_w is not None and abs(in_force_w - limit_w) >= _SAME_W:
            self._notes.set(
                "HW-AGENT-013",
                f"{device.uuid} was set to {limit_w:g} W, but something else holds it at {in_force_w:g} W",
            )

    def _restore(self, uuid: str, devices: Mapping[str, GpuDevice]) -> None:
        device = devices.get(uuid)
        if device is None or device.lost:
            # Its entry stays, so the limit is given back should the GPU come back.
            return
        try:
            device.set_limit_w(self._previous_w[uuid])
        except InvalidInput:
            self._set_default(device)
        except HorowattError as error:
            self._notes.set(error.code, f"{error.message}: {error.because}")
            return
        self._forget(uuid)

    def _set_default(self, device: GpuDevice) -> None:
        """Fall back to the driver's default when the previous limit is not possible any more."""
        default_w = value_or_none(device.default_limit_w())
        if default_w is None:
            return
        try:
            device.set_limit_w(default_w)
        except HorowattError as error:
            self._notes.set(error.code, f"{error.message}: {error.because}")

    def _remember(self, uuid: str, previous_w: float) -> bool:
        self._previous_w[uuid] = previous_w
        if self._write():
            return True
        del self._previous_w[uuid]
        return False

    def _forget(self, uuid: str) -> None:
        entry = self._previous_w.pop(uuid)
        if not self._write():
            self._previous_w[uuid] = entry

    def _write(self) -> bool:
        try:
            write_atomic(self._path, wire.encode(_Journal(self._boot_id, self._previous_w)))
        except (NeedsOperator, OSError) as error:
            self._notes.set("HW-AGENT-014", f"the journal of power limits cannot be written: {error}")
            return False
        self._notes.clear("HW-AGENT-014")
        return True

    def _read(self) -> dict[str, float]:
        try:
            journal = wire.decode(self._path.read_bytes(), _Journal)
        except FileNotFoundError:
            return {}
        except InvalidInput as error:
            # Written whole or not at all, so somebody else did this; no limit can be guessed from it.
            self._notes.set("HW-AGENT-020", f"{self._path} is not a journal of power limits: {error.because}")
            return {}
        return dict(journal.previous_w) if journal.boot_id == self._boot_id else {}


def _clamped(device: GpuDevice, limit_w: float) -> float:
    low, high = value_or_none(device.min_limit_w()), value_or_none(device.max_limit_w())
    limit_w = limit_w if high is None else min(limit_w, high)
    return limit_w if low is None else max(limit_w, low)
