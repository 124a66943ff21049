# SPDX-License-Identifier: Apache-2.0
"""Unix time that never runs backwards."""

import time
from collections.abc import Callable

_SLEW = 0.5
"""Pace at which the clock goes on while it waits for a wall clock that was set back."""
_MOST_AHEAD_S = 3600.0
_TOLERANCE_S = 0.05
"""Disagreement with the wall clock that is only the jitter of reading two clocks, seconds."""


class SteadyClock:
    """Unix seconds for intervals, whose end must never lie before their start.

    A wall clock that is set forward is followed at once. One that is set back is waited for: until
    it has caught up, this clock runs at half pace, so no interval is negative and order is kept.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._now_s = wall()
        self._at = monotonic()

    def not_before(self, at_s: float) -> None:
        """Go on after an instant that an earlier run of this process has used, if it is not far off.

        The wall clock may have been set back in between, by minutes; by more than an hour it was wrong
        before, and what was recorded then keeps its times.
        """
        if self._now_s < at_s <= self._now_s + _MOST_AHEAD_S:
            self._now_s = at_s

    def now_s(self) -> float:
        """Return Unix seconds, never fewer than before."""
        wall_s, at = self._wall(), self._monotonic()
        elapsed_s = max(0.0, at - self._at)
        if wall_s >= self._now_s + elapsed_s - _TOLERANCE_S:
            now_s = max(wall_s, self._now_s)
        else:
            now_s = self._now_s + elapsed_s * _SLEW
        self._now_s, self._at = now_s, at
        return now_s
