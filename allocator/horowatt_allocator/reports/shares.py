# SPDX-License-Identifier: Apache-2.0
"""How the joules of a line came about, as shares of its GPU-seconds."""

from dataclasses import dataclass

from horowatt_allocator.records.energy import EnergyLine


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodShares:
    """Shares of the GPU-seconds of a line, each 0 to 1; together 1.

    Attributes:
        counter_ratio: Difference of the device's own energy counter.
        integrated_ratio: Power readings summed over time.
        bridged_ratio: Counter difference across an absence of the agent.
        missing_ratio: Not measured; adds no joules.
    """

    counter_ratio: float
    integrated_ratio: float
    bridged_ratio: float
    missing_ratio: float


def method_shares(line: EnergyLine) -> MethodShares | None:
    """Return the shares of a line, or None when it covers no time."""
    total_s = line.measured_s + line.unmeasured_s
    if total_s <= 0:
        return None
    by_counter_s = max(0.0, line.measured_s - line.integrated_s - line.bridged_s)
    return MethodShares(
        counter_ratio=by_counter_s / total_s,
        integrated_ratio=line.integrated_s / total_s,
        bridged_ratio=line.bridged_s / total_s,
        missing_ratio=line.unmeasured_s / total_s,
    )
