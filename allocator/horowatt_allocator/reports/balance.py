# SPDX-License-Identifier: Apache-2.0
"""The sum check: energy is conserved (tenants + idle + unattributed = device counters)."""

from dataclasses import dataclass

from horowatt_allocator.records.energy import EnergyReport

LIMIT_RATIO = 0.001
"""Largest relative difference that still counts as adding up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Both ways in which a report must add up.

    Attributes:
        counters_j: What the device counters say; None when no device has one.
        booked_j: What was booked on those devices.
        booked_error_ratio: Relative difference of the two; None without counters.
        parts_j: Tenants + idle + unattributed of the report.
        total_j: Total of the report.
        parts_error_ratio: Relative difference of the two; None when nothing was booked.
        adds_up: False when either difference exceeds the limit; None when there is no counter to
            compare with and the parts agree.
        sentence: The result for people.
    """

    counters_j: float | None
    booked_j: float
    booked_error_ratio: float | None
    parts_j: float
    total_j: float
    parts_error_ratio: float | None
    adds_up: bool | None
    sentence: str


def check_balance(report: EnergyReport) -> Balance:
    """Compare the parts of a report with its total and with the device counters."""
    parts_j = sum(tenant.energy.energy_j for tenant in report.tenants)
    parts_j += report.idle.energy_j + report.unattributed.energy_j
    total_j = report.total.energy_j
    scale_j = max(abs(total_j), abs(parts_j))
    parts_error = abs(parts_j - total_j) / scale_j if scale_j > 0 else None
    counters_error = report.sum_error
    adds_up = _verdict(counters_error, parts_error)
    return Balance(
        counters_j=report.devices_j,
        booked_j=report.booked_on_counters_j,
        booked_error_ratio=counters_error,
        parts_j=parts_j,
        total_j=total_j,
        parts_error_ratio=parts_error,
        adds_up=adds_up,
        sentence=_sentence(report, parts_j, parts_error, adds_up),
    )


def _verdict(counters_error: float | None, parts_error: float | None) -> bool | None:
    if parts_error is not None and parts_error > LIMIT_RATIO:
        return False
    if counters_error is None:
        return None
    return counters_error <= LIMIT_RATIO


def _sentence(report: EnergyReport, parts_j: float, parts_error: float | None, adds_up: bool | None) -> str:
    if adds_up is None:
        return "cannot be checked: no device has a readable energy counter"
    if parts_error is not None and parts_error > LIMIT_RATIO:
        return (
            f"does not add up: tenants + idle + unattributed are {parts_j:,.1f} J "
            f"but the total is {report.total.energy_j:,.1f} J"
        )
    verdict = "adds up" if adds_up else "does not add up"
    return (
        f"{verdict}: booked {report.booked_on_counters_j:,.1f} J, device counters "
        f"{report.devices_j or 0.0:,.1f} J, difference {100 * (report.sum_error or 0.0):.4f} % "
        f"(limit {100 * LIMIT_RATIO:.1f} %)"
    )
