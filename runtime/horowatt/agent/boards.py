# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this node: read through NVML, metered one by one.

A GPU without a counter, one that is lost, and a driver that is gone change nothing for the others.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from horowatt.agent.clock import SteadyClock
from horowatt.agent.gates import Verdict
from horowatt.agent.meter import GpuMeter, Holder, Look, OpenInterval
from horowatt.agent.notes import Notes
from horowatt.agent.spool import Spool
from horowatt.devices.nvml import GpuDevice, Nvml, open_nvml
from horowatt.errors import HorowattError, NeedsOperator
from horowatt.records import EnergyInterval, GpuReport

_LIST_EVERY_S = 10.0
"""Seconds between looks at which GPUs there are; at once while one is lost."""
_OPEN_EVERY_S = 30.0
"""Seconds between attempts to open NVML while there is none."""
_TRIES_WITHOUT_COUNTER = 3
"""Looks without a counter after which a GPU counts as having none."""
_TRIES_AFTER_COUNTER = 30
"""The same for a GPU that had one in an earlier run of the agent."""
_MISCONFIGURED = frozenset({"HW-NVML-101", "HW-NVML-102", "HW-NVML-103"})
"""Failures that no waiting mends: the installation or the environment is wrong."""
_GONE = "the GPU is not there any more"


@dataclass(slots=True)
class _Board:
    """One GPU with its meter."""

    meter: GpuMeter
    has_counter: bool
    tries_left: int
    report: GpuReport | None = None

    def see(self, report: GpuReport, steady_s: float) -> Look:
        """Return the look that a report amounts to."""
        self.report = report
        if report.energy_j is not None:
            self.has_counter, self.tries_left = True, -1
        elif not report.lost and self.tries_left > 0:
            self.tries_left -= 1
            self.has_counter = self.tries_left > 0
        wanted = "energy_j" if self.has_counter else "power_w"
        return Look(
            at_s=report.sampled_at_s,
            counter_j=report.energy_j,
            power_w=report.power_w,
            has_counter=self.has_counter,
            lost=report.lost,
            why=report.unmeasured.get(wanted, "the GPU is lost" if report.lost else ""),
            steady_s=steady_s,
        )


class Boards:
    """All GPUs of the node.

    Args:
        gpu_type: Type as the inventory knows it; None takes each GPU's product name.
        same_boot: False when open intervals were stored in an earlier start of the node.
    """

    def __init__(
        self,
        spool: Spool,
        notes: Notes,
        clock: SteadyClock,
        *,
        gpu_type: str | None,
        close_every_s: float,
        same_boot: bool,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spool = spool
        self._notes = notes
        self._clock = clock
        self._gpu_type = gpu_type
        self._close_every_s = close_every_s
        self._same_boot = same_boot
        self._monotonic_s = monotonic_s
        self._resumed = spool.opened()
        self._boards: dict[str, _Board] = {}
        self._nvml: Nvml | None = None
        self._devices: dict[str, GpuDevice] = {}
        self._list_at_s = self._open_at_s = monotonic_s()

    @property
    def devices(self) -> Mapping[str, GpuDevice]:
        """The GPUs by UUID, lost ones included."""
        return self._devices

    def open(self) -> None:
        """Open NVML.

        Raises:
            NeedsOperator: ``HW-NVML-101`` to ``-103`` when the installation is wrong. Without a
                driver the agent goes on and tries again from time to time.
        """
        self._open_at_s = self._monotonic_s() + _OPEN_EVERY_S
        try:
            self._nvml = open_nvml()
        except NeedsOperator as error:
            if error.code in _MISCONFIGURED:
                raise
            self._notes.error(error)
            return
        self._list()

    def close(self) -> None:
        """Give NVML back."""
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None

    def meter(self, holders: Mapping[str, Holder], *, close: bool = False) -> None:
        """Read every GPU once, and store the intervals that this look closes.

        Args:
            holders: Who pays for each GPU from now on; a GPU that is not named is free.
            close: True ends every interval, as at an orderly exit.
        """
        self._refresh()
        closed: list[EnergyInterval] = []
        opened: list[OpenInterval] = []
        for uuid, device in self._devices.items():
            report = device.report(self._gpu_type, self._clock.now_s())
            board = self._board(report)
            look = board.see(report, self._monotonic_s())
            before = board.meter.opened
            closed += board.meter.advance(
                look, holders.get(uuid), timed=self._spool.degraded is None, close=close
            )
            if board.meter.opened is not before and board.meter.opened is not None:
                opened.append(board.meter.opened)
        gone = self._end_vanished(closed)
        if closed or opened or gone:
            self._spool.store(closed, opened, gone)
        else:
            self._spool.flush()

    def mark(self, verdicts: Mapping[str, Verdict]) -> None:
        """Say in the reports which GPUs must not be granted, by UUID."""
        for uuid, verdict in verdicts.items():
            board = self._boards.get(uuid)
            if board is not None and board.report is not None:
                board.report = dataclasses.replace(
                    board.report,
                    busy=verdict.busy,
                    unmeasured={**board.report.unmeasured, **verdict.unmeasured},
                )

    def reports(self) -> tuple[GpuReport, ...]:
        """Return the GPUs as the last :meth:`meter` saw them."""
        return tuple(
            _with_integral(board.report, board) for board in self._boards.values() if board.report is not None
        )

    def _refresh(self) -> None:
        now_s = self._monotonic_s()
        if self._nvml is None:
            if now_s >= self._open_at_s:
                try:
                    self.open()
                except NeedsOperator as error:
                    self._notes.error(error)
            return
        if now_s >= self._list_at_s or any(device.lost for device in self._devices.values()):
            self._list()

    def _list(self) -> None:
        self._list_at_s = self._monotonic_s() + _LIST_EVERY_S
        if self._nvml is None:
            return
        try:
            self._devices = {device.uuid: device for device in self._nvml.gpus()}
        except HorowattError as error:
            self._notes.error(error)
            return
        for index, reason in self._nvml.unreachable.items():
            self._notes.set("HW-AGENT-018", f"GPU {index} of this node cannot be opened: {reason}")

    def _board(self, report: GpuReport) -> _Board:
        board = self._boards.get(report.uuid)
        if board is None:
            resumed = self._resumed.pop(report.uuid, None)
            counted = resumed is not None and not resumed.integrated
            meter = GpuMeter(
                report.uuid,
                report.gpu_type,
                simulated=report.simulated,
                close_every_s=self._close_every_s,
                resumed=resumed,
                same_boot=self._same_boot,
            )
            tries = _TRIES_AFTER_COUNTER if counted else _TRIES_WITHOUT_COUNTER
            board = self._boards[report.uuid] = _Board(meter, has_counter=True, tries_left=tries)
        return board

    def _end_vanished(self, closed: list[EnergyInterval]) -> list[str]:
        """Close what an earlier run left open on GPUs that this node does not have any more."""
        if self._nvml is None or self._nvml.unreachable or not self._devices:
            return []
        gone = list(self._resumed)
        for uuid in gone:
            resumed = self._resumed.pop(uuid)
            meter = GpuMeter(
                uuid,
                resumed.gpu_type,
                simulated=resumed.simulated,
                close_every_s=self._close_every_s,
                resumed=resumed,
            )
            look = Look(
                at_s=self._clock.now_s(),
                counter_j=None,
                power_w=None,
                has_counter=not resumed.integrated,
                lost=True,
                why=_GONE,
            )
            closed += meter.advance(look, resumed.holder, close=True)
        return gone


def _with_integral(report: GpuReport, board: _Board) -> GpuReport:
    """Return a GPU's report with the agent's own integral where the GPU has no counter."""
    if board.has_counter:
        return report
    unmeasured = {name: reason for name, reason in report.unmeasured.items() if name != "energy_j"}
    return dataclasses.replace(report, energy_j=board.meter.integral_j, unmeasured=unmeasured)
