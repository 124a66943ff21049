# SPDX-License-Identifier: Apache-2.0
"""Where the time comes from."""

from typing import Protocol


class Clock(Protocol):
    """Tells the time of the head node."""

    def now_s(self) -> float:
        """Return the Unix time, seconds."""
        ...
