# SPDX-License-Identifier: Apache-2.0
"""The energy of one GPU as a chain of intervals, each under one holder.

Purpose: turn looks at a GPU into :class:`~horowatt.records.EnergyInterval` records that add up.

Invariants:
    * Intervals of a GPU follow each other without gap or overlap in time.
    * Both sides of an edge use the same reading, so the energies of a GPU's measured intervals sum
      to the difference of its counter, whatever edges lie between.
    * A reading that could not be had is never a zero, and energy is never negative.

Nothing here does I/O or reads a clock; looks are arguments.

Known limitations:
    * A counter that runs backwards loses what it counted between the last reading and the reset
      (one loop period); that span is reported as missing.
    * Without a counter the integral knows only power at loop rate, so bursts shorter than that are
      seen as the driver averages them.
"""

import math
from dataclasses import dataclass

from horowatt.records import EnergyInterval, EnergyMethod

GAP_LIMIT_S = 600.0
"""Seconds without a counter reading after which the open interval is given up as missing.

Until then the interval stays open, because the counter itself counts through the gap.
"""

POWER_GAP_LIMIT_S = 5.0
"""Longest distance of two power readings that a trapezoid may span, seconds."""

COUNTER_RESET = "counter reset"
POWER_GAP = "power could not be read for a while"
METHOD_CHANGED = "the driver changed between counting energy and not counting it"
UNCOUNTED_ABSENCE = "the agent was away and the GPU has no energy counter"
REBOOT = "the node was started again"
NO_READING = "no reading"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who pays for a GPU."""

    job_id: str
    lease_id: str
    generation: int

    def is_same_lease(self, other: "Holder | None") -> bool:
        """Whether ``other`` is the same right to the GPU, perhaps in another generation."""
        return other is not None and (self.job_id, self.lease_id) == (other.job_id, other.lease_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at a GPU.

    Attributes:
        at_s: Unix seconds; never smaller than that of an earlier look.
        counter_j: Energy counter, or None when it could not be read.
        power_w: Board power, or None when it could not be read.
        has_counter: False when the device has no energy counter at all.
        lost: True when the device fell off the bus or needs a reset.
        why: Why the wanted reading is absent, empty when it is there.
        steady_s: A clock that nobody sets, seconds, for how long something lasted; None takes ``at_s``.
    """

    at_s: float
    counter_j: float | None
    power_w: float | None
    has_counter: bool
    lost: bool = False
    why: str = ""
    steady_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenInterval:
    """The interval that is running: what must survive the agent's death.

    Attributes:
        start_j: Reading at ``start_s``: the counter, or the agent's integral; None when there was
            none, so that the interval can only end as missing.
        integrated: True when ``start_j`` is the agent's integral, which dies with the agent.
    """

    gpu_uuid: str
    gpu_type: str
    simulated: bool
    holder: Holder | None
    start_s: float
    start_j: float | None
    integrated: bool


class _Integral:
    """A counter made of power readings (trapezoids)."""

    def __init__(self) -> None:
        self.total_j = 0.0
        self.breaks = 0
        self._last: tuple[float, float] | None = None

    def reading_j(self, at_s: float, power_w: float | None) -> float | None:
        """Return the integral up to ``at_s`` (of a clock that nobody sets); ``breaks`` counts its breaks."""
        if power_w is None:
            return None
        if self._last is not None:
            last_s, last_w = self._last
            if at_s - last_s > POWER_GAP_LIMIT_S:
                self.breaks += 1
            else:
                self.total_j += (last_w + power_w) / 2 * (at_s - last_s)
        self._last = (at_s, power_w)
        return self.total_j


class GpuMeter:
    """The chain of intervals of one GPU.

    Args:
        close_every_s: Longest life of an interval while readings can be had.
        resumed: The interval that an earlier run of the agent left open.
        same_boot: False when the node was started again since then, which resets counters.
    """

    def __init__(
        self,
        gpu_uuid: str,
        gpu_type: str,
        *,
        simulated: bool,
        close_every_s: float,
        resumed: OpenInterval | None = None,
        same_boot: bool = True,
    ) -> None:
        self.gpu_uuid = gpu_uuid
        self.gpu_type = gpu_type
        self.simulated = simulated
        self._close_every_s = close_every_s
        self._open = resumed
        self._bridging = resumed is not None
        self._same_boot = same_boot
        self._last_s = resumed.start_s if resumed else 0.0
        self._last_steady_s: float | None = None
        self._last_j = resumed.start_j if resumed else None
        self._holder_moved = False
        self._zero_seen = False
        self._why = ""
        self._integral = _Integral()
        self._breaks_seen = 0

    @property
    def opened(self) -> OpenInterval | None:
        """The running interval; None before the first look."""
        return self._open

    @property
    def integral_j(self) -> float:
        """The agent's own integral of power, joules since the agent's start."""
        return self._integral.total_j

    def advance(
        self, look: Look, holder: Holder | None, *, timed: bool = True, close: bool = False
    ) -> list[EnergyInterval]:
        """Take one look and return the intervals that it closed, with ``seq`` 0.

        Args:
            holder: Who pays for the GPU from now on.
            timed: False suspends closing by age, so that only edges close intervals.
            close: True closes whatever is open, as at an orderly exit.
        """
        opened = self._open
        self._why = look.why or self._why
        value_j, broken = self._reading(look, opened)
        if opened is None:
            self._start(look, value_j, holder)
            return []
        if self._bridging and (not self._same_boot or opened.integrated):
            return self._lost_while_away(opened, look, value_j, holder)
        if opened.start_j is None:
            return self._advance_dark(
                opened, look, value_j, holder, ended=close or (timed and self._due(look))
            )
        if broken:
            return self._give_up(opened, look, value_j, holder, broken)
        if value_j is None:
            return self._advance_blind(opened, look, holder, close=close)
        return self._advance_measured(
            opened, look, value_j, holder, ended=close or (timed and self._due(look))
        )

    def _due(self, look: Look) -> bool:
        return self._open is not None and look.at_s - self._open.start_s >= self._close_every_s

    def _reading(self, look: Look, opened: OpenInterval | None) -> tuple[float | None, str]:
        """Return the cumulative reading, and why it cannot be compared with the one before."""
        steady_s = look.at_s if look.steady_s is None else look.steady_s
        integral_j = self._integral.reading_j(steady_s, _usable(look.power_w))
        broke, self._breaks_seen = self._integral.breaks != self._breaks_seen, self._integral.breaks
        counter_j = None if look.lost else _usable(look.counter_j)
        value_j = counter_j if look.has_counter else integral_j
        if value_j is None or opened is None or self._last_j is None:
            return value_j, ""
        if opened.integrated == look.has_counter:
            return value_j, METHOD_CHANGED
        if opened.integrated:
            return value_j, POWER_GAP if broke else ""
        if value_j >= self._last_j:
            self._zero_seen = False
            return value_j, ""
        if value_j == 0.0 and not self._zero_seen:
            # Some drivers answer zero once and then go on counting; a true reset says so twice.
            self._zero_seen = True
            return None, ""
        return value_j, COUNTER_RESET

    def _advance_measured(
        self, opened: OpenInterval, look: Look, value_j: float, holder: Holder | None, *, ended: bool
    ) -> list[EnergyInterval]:
        if self._bridging:
            self._note_holder(opened, holder)
        if self._holder_moved:
            closed = self._measured_until_last(opened)
            closed += self._closed(
                opened, (self._last_s, self._last_j), (look.at_s, value_j), None, attributable=False
            )
        elif ended or self._bridging or holder != opened.holder:
            closed = self._closed(
                opened, (opened.start_s, opened.start_j), (look.at_s, value_j), opened.holder
            )
        else:
            self._note_reading(look, value_j)
            return []
        self._start(look, value_j, holder)
        return closed

    def _advance_blind(
        self, opened: OpenInterval, look: Look, holder: Holder | None, *, close: bool
    ) -> list[EnergyInterval]:
        self._note_holder(opened, holder)
        if look.lost or close or self._since_reading_s(look) > GAP_LIMIT_S:
            return self._give_up(opened, look, None, holder, self._why or NO_READING)
        return []

    def _advance_dark(
        self, opened: OpenInterval, look: Look, value_j: float | None, holder: Holder | None, *, ended: bool
    ) -> list[EnergyInterval]:
        """Advance an interval that began without a reading: it can only end as missing."""
        if value_j is None and holder == opened.holder and not ended:
            return []
        if self._bridging:
            self._note_holder(opened, holder)
        closed = self._missing(opened, opened.start_s, look, self._why or NO_READING, end_j=value_j)
        self._start(look, value_j, holder)
        return closed

    def _lost_while_away(
        self, opened: OpenInterval, look: Look, value_j: float | None, holder: Holder | None
    ) -> list[EnergyInterval]:
        self._note_holder(opened, holder)
        reason = UNCOUNTED_ABSENCE if self._same_boot else REBOOT
        closed = self._missing(opened, opened.start_s, look, reason, start_j=opened.start_j, end_j=value_j)
        self._start(look, value_j, holder)
        return closed

    def _give_up(
        self, opened: OpenInterval, look: Look, value_j: float | None, holder: Holder | None, reason: str
    ) -> list[EnergyInterval]:
        """Book what is known up to the last reading; what came after it is missing."""
        if self._bridging:
            self._note_holder(opened, holder)
        closed = self._measured_until_last(opened)
        closed += self._missing(opened, self._last_s, look, reason, start_j=self._last_j, end_j=value_j)
        self._start(look, value_j, holder)
        return closed

    def _note_reading(self, look: Look, value_j: float | None) -> None:
        self._last_s, self._last_steady_s, self._last_j = look.at_s, look.steady_s, value_j

    def _since_reading_s(self, look: Look) -> float:
        """Return how long ago the last reading was, whatever was done to the wall clock since."""
        if look.steady_s is None or self._last_steady_s is None:
            return look.at_s - self._last_s
        return look.steady_s - self._last_steady_s

    def _note_holder(self, opened: OpenInterval, holder: Holder | None) -> None:
        """Remember that the GPU changed hands while no reading could tell when."""
        before = opened.holder
        same = holder is None if before is None else before.is_same_lease(holder)
        self._holder_moved = self._holder_moved or not same

    def _measured_until_last(self, opened: OpenInterval) -> list[EnergyInterval]:
        return self._closed(
            opened, (opened.start_s, opened.start_j), (self._last_s, self._last_j), opened.holder
        )

    def _missing(
        self,
        opened: OpenInterval,
        start_s: float,
        look: Look,
        reason: str,
        *,
        start_j: float | None = None,
        end_j: float | None = None,
    ) -> list[EnergyInterval]:
        # After a change of method the reading is no end of what was begun with the other.
        comparable = opened.integrated != look.has_counter
        return self._closed(
            opened,
            (start_s, start_j),
            (look.at_s, end_j if comparable else None),
            None if self._holder_moved else opened.holder,
            attributable=not self._holder_moved,
            missing=reason,
        )

    def _closed(
        self,
        opened: OpenInterval,
        start: tuple[float, float | None],
        end: tuple[float, float | None],
        holder: Holder | None,
        *,
        attributable: bool = True,
        missing: str = "",
    ) -> list[EnergyInterval]:
        """Return the interval from ``start`` to ``end`` (seconds, joules), or nothing if it is empty."""
        (start_s, start_j), (end_s, end_j) = start, end
        energy_j = None
        method = EnergyMethod.MISSING
        if not missing and start_j is not None and end_j is not None:
            energy_j = end_j - start_j
            method = EnergyMethod.INTEGRATED if opened.integrated else EnergyMethod.COUNTER
            method = EnergyMethod.BRIDGED if self._bridging else method
        if end_s <= start_s and not energy_j:
            return []
        return [
            EnergyInterval(
                seq=0,
                gpu_uuid=self.gpu_uuid,
                gpu_type=opened.gpu_type,
                simulated=opened.simulated,
                start_s=start_s,
                end_s=max(start_s, end_s),
                counter_start_j=None if opened.integrated else start_j,
                counter_end_j=None if opened.integrated else end_j,
                energy_j=energy_j,
                unmeasured=missing,
                method=method,
                job_id=holder.job_id if holder else None,
                lease_id=holder.lease_id if holder else None,
                generation=holder.generation if holder else 0,
                attributable=attributable,
            )
        ]

    def _start(self, look: Look, value_j: float | None, holder: Holder | None) -> None:
        self._open = OpenInterval(
            gpu_uuid=self.gpu_uuid,
            gpu_type=self.gpu_type,
            simulated=self.simulated,
            holder=holder,
            start_s=look.at_s,
            start_j=value_j,
            integrated=not look.has_counter,
        )
        self._note_reading(look, value_j)
        self._bridging = self._holder_moved = self._zero_seen = False
        self._same_boot = True


def _usable(value: float | None) -> float | None:
    """Return a reading that can be reckoned with; NaN, infinities and negatives are none."""
    if value is None or not math.isfinite(value) or value < 0:
        return None
    return value
