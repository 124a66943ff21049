# SPDX-License-Identifier: Apache-2.0
"""Where every joule went: closed intervals in, an energy report out.

Rules:

- An interval without a holder is idle; one whose holder is not known for certain is unattributed.
- An interval without energy is unmeasured: it adds seconds that lower the coverage, never joules.
- Joules that a counter counted between two intervals, or across intervals that could not be measured,
  are a hole: unattributed, never lost and never given to anybody.
- A counter that went back was reset: what it counted since is not known, so the device's sum begins anew.

Every interval belongs to exactly one report of adjacent stretches of time: the one in which it ended. So the
sums of adjacent reports add up, whatever the stretches are. Holes between two reports are in neither, and
neither are they in its sum of the device counters.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from horowatt.records import EnergyInterval, EnergyMethod
from horowatt_allocator.records.energy import (
    DeviceEnergy,
    EnergyLine,
    EnergyReport,
    GenerationEnergy,
    JobEnergy,
    TenantEnergy,
)
from horowatt_allocator.records.jobs import Generation, Job

GPU_SCOPE = "GPU boards; hosts are not measured"
UNKNOWN_TENANT = "(unknown)"
"""Tenant of joules whose job the head has forgotten."""
HOLE_J = 1e-6
"""Differences below this are rounding: counters count millijoules."""
COMPLETE = 0.999
"""Coverage from which samples per joule are worth stating."""


class Booked(Protocol):
    """An interval with its node; :class:`~horowatt_allocator.records.energy.BookedInterval` is one."""

    @property
    def node(self) -> str:
        """Name of the node."""
        ...

    @property
    def interval(self) -> EnergyInterval:
        """What its agent closed."""
        ...


@dataclass(slots=True)
class _Sum:
    energy_j: float = 0.0
    measured_s: float = 0.0
    unmeasured_s: float = 0.0
    integrated_s: float = 0.0
    bridged_s: float = 0.0
    simulated: bool = False

    def add(self, interval: EnergyInterval) -> None:
        seconds_s = max(0.0, interval.end_s - interval.start_s)
        self.simulated = self.simulated or interval.simulated
        if interval.energy_j is None:
            self.unmeasured_s += seconds_s
            return
        self.energy_j += interval.energy_j
        self.measured_s += seconds_s
        if interval.method is EnergyMethod.INTEGRATED:
            self.integrated_s += seconds_s
        elif interval.method is EnergyMethod.BRIDGED:
            self.bridged_s += seconds_s

    def include(self, other: "_Sum") -> None:
        self.energy_j += other.energy_j
        self.measured_s += other.measured_s
        self.unmeasured_s += other.unmeasured_s
        self.integrated_s += other.integrated_s
        self.bridged_s += other.bridged_s
        self.simulated = self.simulated or other.simulated

    def line(self) -> EnergyLine:
        return EnergyLine(
            energy_j=self.energy_j,
            measured_s=self.measured_s,
            unmeasured_s=self.unmeasured_s,
            integrated_s=self.integrated_s,
            bridged_s=self.bridged_s,
            simulated=self.simulated,
        )


@dataclass(slots=True)
class _JobSum:
    total: _Sum = field(default_factory=_Sum)
    generations: dict[int, _Sum] = field(default_factory=dict)
    first: dict[int, EnergyInterval] = field(default_factory=dict)

    def add(self, interval: EnergyInterval) -> None:
        self.total.add(interval)
        self.generations.setdefault(interval.generation, _Sum()).add(interval)
        self.first.setdefault(interval.generation, interval)


@dataclass(slots=True)
class _Device:
    """One GPU, interval by interval in order of time."""

    node: str
    last: EnergyInterval
    jobs_j: float = 0.0
    idle: _Sum = field(default_factory=_Sum)
    unattributed: _Sum = field(default_factory=_Sum)
    counter_j: float = 0.0
    has_counter: bool = False
    counter_at_j: float | None = None
    counter_at_s: float = 0.0
    unread_j: float = 0.0


@dataclass(slots=True)
class _Books:
    jobs: dict[str, _JobSum] = field(default_factory=dict)
    devices: dict[tuple[str, str], _Device] = field(default_factory=dict)

    def book(self, node: str, interval: EnergyInterval) -> None:
        """Add an interval; those of one GPU come in order of time."""
        key = (node, interval.gpu_uuid)
        device = self.devices.get(key)
        if device is None:
            device = self.devices[key] = _Device(node=node, last=interval)
        else:
            _book_gap(device, interval)
        _follow_counter(device, interval)
        device.last = interval
        if not interval.attributable:
            device.unattributed.add(interval)
        elif interval.job_id is None:
            device.idle.add(interval)
        else:
            self.jobs.setdefault(interval.job_id, _JobSum()).add(interval)
            device.jobs_j += interval.energy_j or 0.0


def summarize(
    cluster_name: str,
    intervals: Iterable[Booked],
    jobs: Mapping[str, Job],
    start_s: float,
    end_s: float,
    made_s: float,
    scope: str = GPU_SCOPE,
) -> EnergyReport:
    """Return the energy report of a cluster over ``start_s`` < t <= ``end_s``.

    Args:
        cluster_name: For the title.
        intervals: In any order; those that ended outside the stretch are skipped.
        jobs: By id, for names, tenants, samples and generations; forgotten jobs keep their joules.
        start_s: Unix time.
        end_s: Unix time.
        made_s: When the report is made, Unix time.
        scope: What is counted.
    """
    books = _Books()
    within = [booked for booked in intervals if start_s < booked.interval.end_s <= end_s]
    for booked in sorted(
        within, key=lambda b: (b.node, b.interval.gpu_uuid, b.interval.start_s, b.interval.seq)
    ):
        books.book(booked.node, booked.interval)
    for job_id, job in jobs.items():
        if job.started_s is not None and job.started_s <= end_s and (job.ended_s or end_s) >= start_s:
            books.jobs.setdefault(job_id, _JobSum())
    idle, unattributed, total = _Sum(), _Sum(), _Sum()
    for device in books.devices.values():
        idle.include(device.idle)
        unattributed.include(device.unattributed)
    for part in (idle, unattributed, *(sums.total for sums in books.jobs.values())):
        total.include(part)
    devices = tuple(_device_energy(device) for device in books.devices.values())
    counted = [device for device in devices if device.counter_j is not None]
    return EnergyReport(
        cluster=cluster_name,
        start_s=start_s,
        end_s=end_s,
        made_s=made_s,
        scope=scope,
        simulated=total.simulated,
        jobs=tuple(
            _job_energy(job_id, sums, jobs.get(job_id), start_s)
            for job_id, sums in sorted(books.jobs.items())
        ),
        tenants=_tenants(books.jobs, jobs),
        idle=idle.line(),
        unattributed=unattributed.line(),
        total=total.line(),
        devices=devices,
        devices_j=sum(device.counter_j or 0.0 for device in counted) if counted else None,
        booked_on_counters_j=sum(device.booked_j for device in counted),
    )


def _book_gap(device: _Device, interval: EnergyInterval) -> None:
    """Account for the seconds between two intervals of a GPU that no interval covers."""
    gap_s = interval.start_s - device.last.end_s
    if gap_s <= 0:
        return
    device.unattributed.simulated = device.unattributed.simulated or interval.simulated
    if _continues(device, interval.counter_start_j) and device.counter_at_s >= device.last.end_s:
        device.unattributed.measured_s += gap_s
        device.unattributed.bridged_s += gap_s
    else:
        device.unattributed.unmeasured_s += gap_s


def _follow_counter(device: _Device, interval: EnergyInterval) -> None:
    """Add what the counter counted, and book as unattributed what no interval accounts for."""
    if interval.counter_start_j is not None:
        _read_counter(device, interval.counter_start_j, interval.start_s, interval.simulated)
    device.unread_j += interval.energy_j or 0.0
    if interval.counter_end_j is not None:
        _read_counter(device, interval.counter_end_j, interval.end_s, interval.simulated)


def _read_counter(device: _Device, reading_j: float, at_s: float, simulated: bool) -> None:
    if device.counter_at_j is not None and reading_j >= device.counter_at_j:
        counted_j = reading_j - device.counter_at_j
        hole_j = counted_j - device.unread_j
        device.counter_j += counted_j
        if hole_j > HOLE_J:
            device.unattributed.energy_j += hole_j
            device.unattributed.simulated = device.unattributed.simulated or simulated
    device.has_counter = True
    device.counter_at_j, device.counter_at_s, device.unread_j = reading_j, at_s, 0.0


def _continues(device: _Device, reading_j: float | None) -> bool:
    return device.counter_at_j is not None and reading_j is not None and reading_j >= device.counter_at_j


def _device_energy(device: _Device) -> DeviceEnergy:
    return DeviceEnergy(
        node=device.node,
        gpu_uuid=device.last.gpu_uuid,
        gpu_type=device.last.gpu_type,
        simulated=device.last.simulated,
        counter_j=device.counter_j if device.has_counter else None,
        booked_j=device.jobs_j + device.idle.energy_j + device.unattributed.energy_j,
        idle_j=device.idle.energy_j,
        unattributed_j=device.unattributed.energy_j,
    )


def _job_energy(job_id: str, sums: _JobSum, job: Job | None, start_s: float) -> JobEnergy:
    line = sums.total.line()
    generations = tuple(
        GenerationEnergy(generation=generation, energy=sums.generations.get(number, _Sum()).line())
        for number, generation in sorted(_generations(sums, job).items())
    )
    if job is None:
        return JobEnergy(
            job_id=job_id,
            name=job_id,
            tenant=UNKNOWN_TENANT,
            phase="forgotten",
            energy=line,
            samples=None,
            samples_per_j=None,
            resizes=0,
            pause_s=None,
            generations=generations,
        )
    pauses_s = [g.pause_s for g in job.generations if g.pause_s is not None]
    return JobEnergy(
        job_id=job_id,
        name=job.spec.name,
        tenant=job.spec.tenant,
        phase=job.phase.value,
        energy=line,
        samples=job.samples,
        samples_per_j=_samples_per_j(job, line, start_s),
        resizes=max(0, len(job.generations) - max(1, job.attempt)),
        pause_s=sum(pauses_s) if pauses_s else None,
        generations=generations,
    )


def _generations(sums: _JobSum, job: Job | None) -> dict[int, Generation]:
    """Return the generations that have energy in this report, by number, and those of the job.

    One that the head does not know is described by its first interval; its width is 0, not known.
    """
    known = {generation.number: generation for generation in job.generations} if job is not None else {}
    for number, interval in sums.first.items():
        known.setdefault(
            number,
            Generation(
                number=number,
                width=0,
                gpu_type=interval.gpu_type,
                limit_w=None,
                published_s=interval.start_s,
            ),
        )
    return known


def _samples_per_j(job: Job, line: EnergyLine, start_s: float) -> float | None:
    """Return samples per joule of a job that lies within the report and was measured whole."""
    within = job.started_s is not None and job.started_s >= start_s
    covered = line.coverage is not None and line.coverage >= COMPLETE
    if job.samples is None or not within or not covered or line.energy_j <= 0:
        return None
    return job.samples / line.energy_j


def _tenants(sums: Mapping[str, _JobSum], jobs: Mapping[str, Job]) -> tuple[TenantEnergy, ...]:
    totals: dict[str, _Sum] = {}
    counts: dict[str, int] = {}
    for job_id, job_sum in sums.items():
        name = jobs[job_id].spec.tenant if job_id in jobs else UNKNOWN_TENANT
        totals.setdefault(name, _Sum()).include(job_sum.total)
        counts[name] = counts.get(name, 0) + 1
    return tuple(
        TenantEnergy(tenant=name, num_jobs=counts[name], energy=totals[name].line())
        for name in sorted(totals)
    )
