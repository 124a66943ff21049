# SPDX-License-Identifier: Apache-2.0
"""The ledger: no joule lost, none invented, none given to somebody whose it is not."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specimens import job

from horowatt.records import EnergyInterval, EnergyMethod
from horowatt_allocator.decisions.ledger import UNKNOWN_TENANT, summarize
from horowatt_allocator.records.energy import BookedInterval, EnergyReport
from horowatt_allocator.records.jobs import Generation, Job, JobPhase


def interval(
    start_s: float,
    end_s: float,
    start_j: float | None,
    end_j: float | None,
    **fields: object,
) -> BookedInterval:
    """Return an idle interval of GPU-0 whose energy is the counter's difference."""
    known = start_j is not None and end_j is not None and end_j >= start_j
    plain = EnergyInterval(
        seq=1,
        gpu_uuid="GPU-0",
        gpu_type="V",
        simulated=False,
        start_s=start_s,
        end_s=end_s,
        counter_start_j=start_j,
        counter_end_j=end_j,
        energy_j=end_j - start_j if known and start_j is not None and end_j is not None else None,
        unmeasured="" if known else "no reading",
        method=EnergyMethod.COUNTER if known else EnergyMethod.MISSING,
        job_id=None,
        lease_id=None,
        generation=0,
        attributable=True,
    )
    node = str(fields.pop("node", "n1"))
    return BookedInterval(node=node, interval=replace(plain, **fields))  # type: ignore[arg-type]  # by name


def report(
    *booked: BookedInterval, jobs: tuple[Job, ...] = (), start_s: float = 0.0, end_s: float = 1000.0
) -> EnergyReport:
    """Return the report over a stretch."""
    return summarize("c", booked, {one.spec.job_id: one for one in jobs}, start_s, end_s, end_s)


def finished(job_id: str, samples: int | None = 1000, **fields: object) -> Job:
    """Return a job that ran from 10 to 30 s in one generation."""
    generation = Generation(number=1, width=1, gpu_type="V", limit_w=None, published_s=10.0)
    return replace(
        job(job_id, **fields),
        phase=JobPhase.FINISHED,
        attempt=1,
        samples=samples,
        started_s=10.0,
        ended_s=30.0,
        generations=(generation,),
    )


def test_jobs_idle_and_unattributed_sum_to_the_counter() -> None:
    """Every joule the counter counted stands in exactly one place."""
    made = report(
        interval(0, 10, 100, 500),
        interval(10, 30, 500, 4500, job_id="j0", generation=1),
        interval(30, 31, 4500, 4600, job_id="j0", attributable=False),
        interval(31, 40, 4600, 5000),
        jobs=(finished("j0"),),
    )
    assert made.idle.energy_j == pytest.approx(800)
    assert made.unattributed.energy_j == pytest.approx(100)
    assert made.jobs[0].energy.energy_j == pytest.approx(4000)
    assert made.jobs[0].samples_per_j == pytest.approx(0.25)
    assert made.total.energy_j == made.devices_j == made.booked_on_counters_j == pytest.approx(4900)
    assert made.sum_error == 0
    assert made.tenants[0].energy.energy_j == pytest.approx(4000)
    assert made.total.coverage == 1.0
    assert made.devices[0].idle_j == pytest.approx(800)


def test_what_was_not_measured_is_never_zero_joules_of_certainty() -> None:
    """An interval without energy adds seconds that lower the coverage, and no samples per joule."""
    made = report(
        interval(0, 10, None, None, job_id="j0", generation=1),
        interval(10, 20, None, 500, energy_j=None, job_id="j0", generation=1),
        interval(20, 30, 500, 1500, job_id="j0", generation=1),
        jobs=(finished("j0"),),
    )
    line = made.jobs[0].energy
    assert (line.energy_j, line.measured_s, line.unmeasured_s) == (1000, 10, 20)
    assert line.coverage == pytest.approx(1 / 3)
    assert made.jobs[0].samples_per_j is None


def test_a_hole_between_intervals_is_unattributed_not_lost() -> None:
    """What the counter counted while nobody looked is shown, and belongs to nobody."""
    made = report(interval(0, 10, 0, 1000, job_id="j0"), interval(15, 20, 1300, 1500, job_id="j0"))
    assert made.unattributed.energy_j == pytest.approx(300)
    assert (made.unattributed.measured_s, made.unattributed.bridged_s) == (5, 5)
    assert made.devices_j == pytest.approx(1500)
    assert made.sum_error == 0


def test_energy_across_a_missing_interval_is_unattributed() -> None:
    """An interval that could not be measured keeps its seconds; the counter's joules are a hole."""
    made = report(
        interval(0, 10, 0, 1000, job_id="j0"),
        interval(10, 20, None, None, job_id="j0"),
        interval(20, 30, 2500, 3000, job_id="j0"),
    )
    assert made.unattributed.energy_j == pytest.approx(1500)
    assert made.unattributed.measured_s == 0
    assert made.jobs[0].energy.unmeasured_s == 10
    assert made.sum_error == 0


def test_a_counter_that_was_reset_starts_anew() -> None:
    """A driver that was reloaded is no negative energy: the time between is unmeasured."""
    made = report(interval(0, 10, 5000, 6000), interval(12, 20, 100, 900), interval(20, 30, 900, 50))
    assert made.devices_j == pytest.approx(1800)
    assert made.idle.energy_j == pytest.approx(1800)
    assert (made.unattributed.energy_j, made.unattributed.unmeasured_s) == (0, 2)
    assert made.idle.unmeasured_s == 10
    assert made.sum_error == 0


def test_integrated_energy_is_not_counted_twice() -> None:
    """Joules integrated while a counter was unreadable are part of what it shows afterwards."""
    made = report(
        interval(0, 10, 0, 1000),
        interval(10, 20, None, None, energy_j=900.0, method=EnergyMethod.INTEGRATED),
        interval(20, 30, 2000, 3000),
    )
    assert made.total.energy_j == pytest.approx(3000)
    assert made.unattributed.energy_j == pytest.approx(100)
    assert made.idle.integrated_s == 10


def test_a_device_without_a_counter_has_none() -> None:
    """Absent is not zero: no counter, no sum to check against, but energy and coverage."""
    made = report(interval(0, 10, None, None, energy_j=400.0, method=EnergyMethod.INTEGRATED))
    assert (made.devices_j, made.sum_error, made.booked_on_counters_j) == (None, None, 0)
    assert made.devices[0].counter_j is None
    assert (made.idle.energy_j, made.idle.coverage) == (400, 1.0)


def test_generations_and_bridges_are_kept_apart() -> None:
    """Energy by generation sums to the job's; one the head does not know is shown with width 0."""
    made = report(
        interval(0, 10, 0, 100, job_id="j0", generation=1),
        interval(10, 20, 100, 300, job_id="j0", generation=2, method=EnergyMethod.BRIDGED),
        jobs=(finished("j0"),),
    )
    (entry,) = made.jobs
    energies = {g.generation.number: g.energy.energy_j for g in entry.generations}
    assert energies == {1: 100, 2: 200}
    assert [g.generation.width for g in entry.generations] == [1, 0]
    assert entry.energy.bridged_s == 10


def test_a_forgotten_job_keeps_its_joules() -> None:
    """Energy of a job that retention removed is still in the sum, under an unknown tenant."""
    made = report(interval(0, 10, 0, 100, job_id="gone", simulated=True))
    assert made.jobs[0].tenant == UNKNOWN_TENANT
    assert made.tenants[0].energy.energy_j == 100
    assert made.simulated
    assert made.total.simulated


def test_samples_per_joule_only_for_a_job_that_lies_within() -> None:
    """A report that begins after the job did does not set all samples against part of the joules."""
    booked = interval(10, 30, 0, 100, job_id="j0", generation=1)
    assert report(booked, jobs=(finished("j0"),)).jobs[0].samples_per_j == 10
    assert report(booked, jobs=(finished("j0"),), start_s=11).jobs[0].samples_per_j is None
    assert report(booked, jobs=(finished("j0", samples=None),)).jobs[0].samples_per_j is None


def test_a_job_without_energy_yet_is_listed() -> None:
    """A job that runs within the stretch appears, with no coverage rather than a coverage of 0."""
    made = report(jobs=(finished("j0"), replace(job("queued"))))
    assert [entry.job_id for entry in made.jobs] == ["j0"]
    assert made.jobs[0].energy.coverage is None


@st.composite
def histories(draw: st.DrawFn) -> list[BookedInterval]:
    """Draw the intervals of three GPUs with holders, holes, missing readings and resets."""
    booked = []
    for device in range(3):
        at_s, counter_j = 0.0, draw(st.floats(0, 1e6))
        for seq in range(draw(st.integers(0, 8))):
            if draw(st.booleans()):
                gap_s = draw(st.floats(0, 20))
                at_s, counter_j = at_s + gap_s, counter_j + gap_s * 50
            if draw(st.integers(0, 5)) == 0:
                counter_j = draw(st.floats(0, counter_j))
            seconds_s, watts = draw(st.floats(0.1, 60)), draw(st.floats(0, 400))
            readable = draw(st.integers(0, 4)) > 0
            end_j = counter_j + seconds_s * watts
            booked.append(
                interval(
                    at_s,
                    at_s + seconds_s,
                    counter_j if readable else None,
                    end_j if readable else None,
                    gpu_uuid=f"GPU-{device}",
                    seq=seq + 1,
                    job_id=draw(st.sampled_from([None, "j0", "j1"])),
                    attributable=draw(st.integers(0, 3)) > 0,
                    generation=draw(st.integers(0, 2)),
                )
            )
            at_s, counter_j = at_s + seconds_s, end_j
    return booked


@given(histories(), st.randoms(use_true_random=False))
def test_energy_is_conserved(booked: list[BookedInterval], shuffler: object) -> None:
    """Jobs + idle + unattributed = total = counters, in any order of arrival, whatever was missing."""
    shuffled = list(booked)
    shuffler.shuffle(shuffled)  # type: ignore[attr-defined]  # a random.Random by construction
    made = report(*shuffled, jobs=(finished("j0"),))
    parts = [*(entry.energy for entry in made.jobs), made.idle, made.unattributed]
    assert made.total.energy_j == pytest.approx(sum(part.energy_j for part in parts))
    assert made.total.energy_j == pytest.approx(
        sum(tenant.energy.energy_j for tenant in made.tenants)
        + (made.idle.energy_j + made.unattributed.energy_j)
    )
    assert made.total.energy_j == pytest.approx(sum(device.booked_j for device in made.devices))
    assert made.booked_on_counters_j == pytest.approx(made.devices_j or 0.0)
    assert made == report(*booked, jobs=(finished("j0"),))
    for entry in made.jobs:
        total = sum(generation.energy.energy_j for generation in entry.generations)
        assert entry.energy.energy_j == pytest.approx(total)


@given(histories(), st.floats(1, 300))
def test_adjacent_reports_add_up(booked: list[BookedInterval], cut_s: float) -> None:
    """Each interval stands in exactly one of two adjacent reports."""
    first = report(*booked, end_s=cut_s)
    second = report(*booked, start_s=cut_s, end_s=1e9)
    whole = report(*booked, end_s=1e9)
    assert first.idle.energy_j + second.idle.energy_j == pytest.approx(whole.idle.energy_j)
    seconds_s = first.idle.unmeasured_s + second.idle.unmeasured_s
    assert seconds_s == pytest.approx(whole.idle.unmeasured_s)
