# SPDX-License-Identifier: Apache-2.0
"""The real clock."""

import threading
import time


class SystemClock:
    """Unix time that never runs backwards while the service lives.

    A clock that is set back would give decisions negative durations; it is held until the system
    clock has caught up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest_s = 0.0

    def now_s(self) -> float:
        """Return the Unix time, seconds, never less than what was returned before."""
        with self._lock:
            self._latest_s = max(self._latest_s, time.time())
            return self._latest_s
