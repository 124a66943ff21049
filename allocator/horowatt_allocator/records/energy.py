# SPDX-License-Identifier: Apache-2.0
"""Energy reports: where every joule went."""

from dataclasses import dataclass

from horowatt.records import EnergyInterval
from horowatt_allocator.records.jobs import Generation

J_PER_KWH = 3.6e6
"""Joules in a kilowatt-hour, exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookedInterval:
    """An interval in the ledger, with the node whose agent closed it."""

    node: str
    interval: EnergyInterval


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyLine:
    """Joules of one thing and how well they are known.

    Attributes:
        energy_j: Measured joules (counter, integrated, bridged); absent intervals add nothing.
        measured_s: GPU-seconds whose energy was measured.
        unmeasured_s: GPU-seconds whose energy is missing.
        integrated_s: Part of ``measured_s`` that was integrated from power readings.
        bridged_s: Part of ``measured_s`` bridged across an absence of the agent.
        simulated: True when any of it comes from a simulated device.
    """

    energy_j: float
    measured_s: float
    unmeasured_s: float
    integrated_s: float
    bridged_s: float
    simulated: bool

    @property
    def kwh(self) -> float:
        """The same energy in kilowatt-hours."""
        return self.energy_j / J_PER_KWH

    @property
    def coverage(self) -> float | None:
        """Share of the GPU-seconds whose energy was measured; None when there are none."""
        total = self.measured_s + self.unmeasured_s
        return self.measured_s / total if total > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnergy:
    """One generation of a job with its energy."""

    generation: Generation
    energy: EnergyLine


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnergy:
    """One job with its energy.

    Attributes:
        samples_per_j: Samples trained per joule; None when either is not known.
    """

    job_id: str
    name: str
    tenant: str
    phase: str
    energy: EnergyLine
    samples: int | None
    samples_per_j: float | None
    resizes: int
    pause_s: float | None
    generations: tuple[GenerationEnergy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantEnergy:
    """One tenant's jobs together."""

    tenant: str
    num_jobs: int
    energy: EnergyLine


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEnergy:
    """One GPU: what its counter says and what the ledger booked.

    Attributes:
        counter_j: Last counter reading minus the first, resets taken out; None when the device has
            no counter.
        booked_j: Jobs + idle + unattributed of this GPU.
    """

    node: str
    gpu_uuid: str
    gpu_type: str
    simulated: bool
    counter_j: float | None
    booked_j: float
    idle_j: float
    unattributed_j: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyReport:
    """Energy of a cluster over a stretch of time.

    Attributes:
        devices_j: Sum of the counters of the devices that have one; None when none has.
        booked_on_counters_j: What was booked on those same devices.
        scope: What is counted, e.g. "GPU boards; hosts are not measured".
    """

    cluster: str
    start_s: float
    end_s: float
    made_s: float
    scope: str
    simulated: bool
    jobs: tuple[JobEnergy, ...]
    tenants: tuple[TenantEnergy, ...]
    idle: EnergyLine
    unattributed: EnergyLine
    total: EnergyLine
    devices: tuple[DeviceEnergy, ...]
    devices_j: float | None
    booked_on_counters_j: float

    @property
    def sum_error(self) -> float | None:
        """Relative difference of booked energy and device counters (rule: within 0.001)."""
        if self.devices_j is None or self.devices_j <= 0:
            return None
        return abs(self.booked_on_counters_j - self.devices_j) / self.devices_j
