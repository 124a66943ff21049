# SPDX-License-Identifier: Apache-2.0
"""What a device said, or why it said nothing.

Absent is not zero: a value that could not be had is an :class:`Unmeasured` with its reason, so that
no sum, plot or bill can take it for a measurement.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measured:
    """A value that a device reported.

    Attributes:
        value: In the unit that the name of the reading function carries.
        source: Call that gave it, such as ``"nvmlDeviceGetPowerUsage"``.
    """

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """A value that could not be had.

    Attributes:
        reason: Why, in words an operator can act on.
    """

    reason: str


Reading = Measured | Unmeasured
"""Either a value with its source, or the reason why there is none."""


def value_or_none(reading: Reading) -> float | None:
    """Return the measured value, or None when there is none."""
    return reading.value if isinstance(reading, Measured) else None
