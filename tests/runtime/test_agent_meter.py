# SPDX-License-Identifier: Apache-2.0
"""The chain of energy intervals of one GPU, without any GPU: looks in, intervals out."""

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horowatt.agent.clock import SteadyClock
from horowatt.agent.holders import LeaseState, find_holders
from horowatt.agent.meter import COUNTER_RESET, GAP_LIMIT_S, GpuMeter, Holder, Look, OpenInterval
from horowatt.records import EnergyInterval, EnergyMethod, Lease

A1 = Holder(job_id="a", lease_id="a-1", generation=1)
A2 = Holder(job_id="a", lease_id="a-1", generation=2)
B1 = Holder(job_id="b", lease_id="b-1", generation=1)


def meter(**more: object) -> GpuMeter:
    return GpuMeter("GPU-0", "type", simulated=True, close_every_s=10.0, **more)  # type: ignore[arg-type]


def counter(at_s: float, joules: float | None, **more: object) -> Look:
    return Look(at_s=at_s, counter_j=joules, power_w=None, has_counter=True, **more)  # type: ignore[arg-type]


def power(at_s: float, watts: float | None) -> Look:
    return Look(at_s=at_s, counter_j=None, power_w=watts, has_counter=False, why="" if watts else "no power")


def run(gpu: GpuMeter, looks: Sequence[tuple[Look, Holder | None]]) -> list[EnergyInterval]:
    return [closed for look, holder in looks for closed in gpu.advance(look, holder)]


def open_interval(**more: object) -> OpenInterval:
    fields: dict[str, object] = {
        "gpu_uuid": "GPU-0",
        "gpu_type": "type",
        "simulated": True,
        "holder": A1,
        "start_s": 100.0,
        "start_j": 5000.0,
        "integrated": False,
    }
    return OpenInterval(**{**fields, **more})  # type: ignore[arg-type]


def assert_chain(closed: Sequence[EnergyInterval]) -> None:
    for before, after in itertools.pairwise(closed):
        assert after.start_s == before.end_s
        assert after.start_s <= after.end_s
    assert all(one.energy_j is None or one.energy_j >= 0 for one in closed)
    assert all((one.energy_j is None) == (one.method is EnergyMethod.MISSING) for one in closed)
    assert all((one.energy_j is None) == bool(one.unmeasured) for one in closed)


def test_intervals_close_by_age() -> None:
    """An interval without any edge is closed once it is as old as allowed."""
    closed = run(meter(), [(counter(float(t), 100.0 * t), A1) for t in range(26)])
    assert [(one.start_s, one.end_s, one.energy_j) for one in closed] == [(0, 10, 1000), (10, 20, 1000)]
    assert {one.method for one in closed} == {EnergyMethod.COUNTER}


def test_both_sides_of_an_edge_share_one_reading() -> None:
    """A GPU that changes hands is billed to the old holder up to the reading at which the new one starts."""
    closed = run(
        meter(),
        [(counter(0, 0), None), (counter(3, 30), A1), (counter(5, 80), B1), (counter(7, 99), None)],
    )
    assert [(one.job_id, one.energy_j) for one in closed] == [(None, 30), ("a", 50), ("b", 19)]
    assert [one.counter_end_j for one in closed[:-1]] == [one.counter_start_j for one in closed[1:]]
    assert_chain(closed)


def test_a_new_generation_is_an_edge() -> None:
    """Energy of two generations of one job is told apart."""
    closed = run(meter(), [(counter(0, 0), A1), (counter(2, 20), A2), (counter(3, 25), None)])
    assert [(one.generation, one.energy_j) for one in closed] == [(1, 20), (2, 5)]


def test_a_reset_counter_never_makes_energy_negative() -> None:
    """A counter that restarts costs the span since the last reading, which is missing, not negative."""
    looks = [(counter(0, 1000), A1), (counter(1, 1100), A1), (counter(2, 7), A1), (counter(3, 57), None)]
    closed = run(meter(), looks)
    assert [(one.energy_j, one.unmeasured) for one in closed] == [(100, ""), (None, COUNTER_RESET), (50, "")]
    assert_chain(closed)


def test_a_single_zero_is_a_failed_reading() -> None:
    """A counter that reads zero once and then goes on counts through, and books nothing twice."""
    closed = run(
        meter(), [(counter(0, 500), A1), (counter(1, 0), A1), (counter(2, 700), A1), (counter(3, 700), None)]
    )
    assert [one.energy_j for one in closed] == [200]


def test_a_second_zero_is_a_reset() -> None:
    """A counter that stays at zero was reset."""
    closed = run(meter(), [(counter(0, 500), A1), (counter(1, 0), A1), (counter(2, 0), A1)])
    assert [one.unmeasured for one in closed] == [COUNTER_RESET]


@pytest.mark.parametrize("reading", [None, math.nan, math.inf, -1.0])
def test_an_unusable_reading_is_counted_through(reading: float | None) -> None:
    """Without a reading the interval stays open, and the counter itself covers the gap."""
    looks = [(counter(0, 0), A1), *((counter(t, reading), A1) for t in range(1, 40)), (counter(40, 400), A1)]
    closed = run(meter(), looks)
    assert [(one.start_s, one.end_s, one.energy_j) for one in closed] == [(0, 40, 400)]


def test_a_change_of_holder_in_a_gap_is_attributed_to_nobody() -> None:
    """When the GPU changed hands while it could not be read, only the part before the gap has an owner."""
    closed = run(
        meter(),
        [(counter(0, 0), A1), (counter(1, 10), A1), (counter(2, None), B1), (counter(5, 70), B1)],
    )
    assert [(one.job_id, one.energy_j, one.attributable) for one in closed] == [
        ("a", 10, True),
        (None, 60, False),
    ]


def test_a_gap_that_lasts_becomes_missing() -> None:
    """A counter that stays away is reported as missing energy with its reason, not kept waiting for ever."""
    gpu = meter()
    end_s = GAP_LIMIT_S + 15
    looks = [(counter(0, 0), A1), (counter(1, 10), A1)]
    looks += [(counter(float(t), None, why="driver says no"), A1) for t in range(2, int(end_s))]
    closed = run(gpu, looks)
    assert closed[0].energy_j == 10
    assert {one.unmeasured for one in closed[1:]} == {"driver says no"}
    assert closed[1].end_s - closed[1].start_s > GAP_LIMIT_S
    assert_chain(closed)


def test_a_lost_gpu_is_metered_to_its_last_reading() -> None:
    """A GPU that falls off the bus keeps what was measured; from there on its energy is missing."""
    lost = [(counter(float(t), None, lost=True, why="lost"), A1) for t in range(4, 16)]
    back = [(counter(20, 3), A1), (counter(21, 8), None)]
    closed = run(meter(), [(counter(0, 0), A1), (counter(3, 30), A1), *lost, *back])
    assert [one.energy_j for one in closed] == [30, None, None, None, 5]
    assert_chain(closed)


def test_power_is_integrated_where_there_is_no_counter() -> None:
    """Without a counter, trapezoids of power make the energy, and the method says so."""
    watts = [100, 100, 200, 200, 100]
    closed = run(meter(), [(power(float(t), watts[t]), A1 if t < 4 else None) for t in range(5)])
    assert [(one.energy_j, one.method) for one in closed] == [(600, EnergyMethod.INTEGRATED)]
    assert closed[0].counter_start_j is None
    assert closed[0].counter_end_j is None


def test_a_long_gap_of_power_is_missing() -> None:
    """No trapezoid spans a gap in which power may have been anything."""
    closed = run(
        meter(), [(power(0, 100), A1), (power(1, 100), A1), (power(60, 100), A1), (power(61, 50), None)]
    )
    assert [(one.energy_j, one.end_s - one.start_s) for one in closed] == [(100, 1), (None, 59), (75, 1)]


def test_a_bridge_spans_the_agents_absence() -> None:
    """When nothing changed while the agent was away, the counter bills its absence to the holder."""
    gpu = meter(resumed=open_interval())
    closed = gpu.advance(counter(160, 9000), A1)
    assert [(one.method, one.job_id, one.energy_j, one.start_s, one.end_s) for one in closed] == [
        (EnergyMethod.BRIDGED, "a", 4000, 100, 160)
    ]
    assert [one.method for one in gpu.advance(counter(161, 9010), None)] == [EnergyMethod.COUNTER]


def test_a_bridge_waits_for_a_reading() -> None:
    """A reading that fails at first does not break the bridge."""
    gpu = meter(resumed=open_interval())
    assert gpu.advance(counter(160, None), A1) == []
    assert [(one.method, one.energy_j) for one in gpu.advance(counter(161, 9000), A1)] == [
        (EnergyMethod.BRIDGED, 4000)
    ]


@pytest.mark.parametrize("holder", [None, B1])
def test_no_bridge_over_a_change_of_hands(holder: Holder | None) -> None:
    """When the holder changed while the agent was away, the energy is known and its owner is not."""
    closed = meter(resumed=open_interval()).advance(counter(160, 9000), holder)
    assert [(one.job_id, one.energy_j, one.attributable) for one in closed] == [(None, 4000, False)]


@pytest.mark.parametrize(
    ("resumed", "same_boot", "reading"),
    [
        (open_interval(), True, 10.0),
        (open_interval(), False, 9000.0),
        (open_interval(integrated=True), True, 9000.0),
        (open_interval(start_j=None), True, 9000.0),
    ],
)
def test_no_bridge_without_a_comparable_counter(
    resumed: OpenInterval, same_boot: bool, reading: float
) -> None:
    """After a reset, a reboot, or without a counter the agent's absence is missing, with its holder."""
    closed = meter(resumed=resumed, same_boot=same_boot).advance(counter(160, reading), A1)
    assert [(one.energy_j, one.job_id, one.start_s, one.end_s) for one in closed] == [(None, "a", 100, 160)]
    assert closed[0].unmeasured


def test_an_orderly_exit_leaves_nothing_unbooked() -> None:
    """Closing ends what is open, and what begins then is where the next run goes on."""
    gpu = meter()
    gpu.advance(counter(0, 0), A1)
    closed = gpu.advance(counter(3, 30), A1, close=True)
    assert [one.energy_j for one in closed] == [30]
    assert gpu.opened is not None
    assert (gpu.opened.start_s, gpu.opened.start_j) == (3, 30)


def test_closing_by_age_can_be_suspended() -> None:
    """While nothing can be stored, only edges close intervals."""
    gpu = meter()
    gpu.advance(counter(0, 0), A1)
    assert gpu.advance(counter(50, 500), A1, timed=False) == []
    assert [one.energy_j for one in gpu.advance(counter(51, 510), B1, timed=False)] == [510]


HOLDERS = st.sampled_from([None, A1, A2, B1])
STEPS = st.lists(
    st.tuples(
        st.integers(1, 4_000),
        st.one_of(st.integers(0, 100_000_000), st.just(None)),
        HOLDERS,
    ),
    max_size=80,
)


@settings(deadline=None)
@given(STEPS)
def test_intervals_sum_to_the_counter(steps: list[tuple[int, int | None, Holder | None]]) -> None:
    """Whatever edges and failed readings there are, the energies sum to the counter's difference."""
    gpu = meter()
    total_mj, now_ms = 7_000, 0
    closed = gpu.advance(counter(0.0, total_mj / 1000), None)
    for milliseconds, millijoules, holder in steps:
        now_ms += milliseconds
        total_mj += millijoules or 0
        reading = None if millijoules is None else total_mj / 1000
        closed += gpu.advance(counter(now_ms / 1000, reading), holder)
    closed += gpu.advance(counter((now_ms + 1) / 1000, total_mj / 1000), None, close=True)
    assert_chain(closed)
    assert math.fsum(one.energy_j or 0.0 for one in closed) == pytest.approx((total_mj - 7_000) / 1000)
    assert all(one.energy_j is not None for one in closed)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 4_000),
            st.one_of(st.integers(0, 10_000_000), st.sampled_from(["fail", "reset", "lost", "restart"])),
            HOLDERS,
        ),
        max_size=80,
    )
)
def test_trouble_never_invents_energy(steps: list[tuple[int, int | str, Holder | None]]) -> None:
    """Resets, losses and restarts leave a chain without holes that never books more than was used."""
    gpu = meter()
    counter_mj, used_mj, now_ms = 5_000, 0, 0
    closed = gpu.advance(counter(0.0, 5.0), None)
    for milliseconds, what, holder in steps:
        now_ms += milliseconds
        at_s = now_ms / 1000
        look = counter(at_s, None, why="fail")
        if isinstance(what, int):
            counter_mj, used_mj = counter_mj + what, used_mj + what
            look = counter(at_s, counter_mj / 1000)
        elif what == "reset":
            counter_mj = 0
        elif what == "lost":
            look = counter(at_s, None, lost=True, why="lost")
        elif what == "restart":
            gpu = meter(resumed=gpu.opened)
        closed += gpu.advance(look, holder)
    assert_chain(closed)
    assert math.fsum(one.energy_j or 0.0 for one in closed) <= used_mj / 1000 + 1e-6


def lease_state(lease_id: str, *, published: bool, held: bool, gpu: str = "GPU-0") -> LeaseState:
    lease = Lease(
        lease_id=lease_id,
        job_id=lease_id[0],
        node="n",
        address="n",
        gpu_uuid=gpu,
        gpu_type="type",
        slot_index=0,
        simulated=True,
    )
    return LeaseState(lease=lease, generation=3, published=published, held=held)


def test_a_withdrawn_lease_pays_while_it_lives() -> None:
    """Out of the slots file is not enough: the holder pays until no process of its worker lives."""
    alive = find_holders([lease_state("a-1", published=False, held=True)])
    assert alive.by_gpu["GPU-0"] == Holder(job_id="a", lease_id="a-1", generation=3)
    assert not find_holders([lease_state("a-1", published=False, held=False)]).by_gpu
    assert find_holders([lease_state("a-1", published=True, held=False)]).by_gpu


def test_the_living_pays_for_a_contested_gpu() -> None:
    """Should two leases claim one GPU, the one whose processes live there pays, and it is said."""
    found = find_holders(
        [lease_state("b-1", published=True, held=False), lease_state("a-1", published=False, held=True)]
    )
    assert found.by_gpu["GPU-0"].lease_id == "a-1"
    assert found.contested == {"GPU-0": ("a-1", "b-1")}


def test_time_never_runs_backwards() -> None:
    """A wall clock that is set back is waited for; one that is set forward is followed."""
    wall, monotonic = [1000.0], [0.0]
    clock = SteadyClock(lambda: wall[0], lambda: monotonic[0])
    seen = [clock.now_s()]
    for wall_s, monotonic_s in [(1001, 1), (901, 2), (903, 4), (1003.5, 5), (1004.5, 6), (2000, 7)]:
        wall[0], monotonic[0] = wall_s, monotonic_s
        seen.append(clock.now_s())
    assert seen == sorted(seen)
    assert seen[2] == pytest.approx(1001.5)
    assert seen[-3:] == [1003.5, 1004.5, 2000]


@given(
    steps=st.lists(
        st.tuples(st.floats(0.1, 2.0), st.sampled_from([0.0, 0.0, 0.0, -420.0, 300.0, -1.0, 3.0])),
        max_size=80,
    ),
    has_counter=st.booleans(),
)
@settings(deadline=None)
def test_a_wall_clock_that_jumps_costs_no_joule(
    steps: list[tuple[float, float]], *, has_counter: bool
) -> None:
    """Set forward or back by minutes, it changes neither the energy nor the order of the intervals."""
    wall, steady = [1000.0], [50.0]
    clock = SteadyClock(wall=lambda: wall[0], monotonic=lambda: steady[0])
    gpu = meter()
    closed: list[EnergyInterval] = []

    def look(*, close: bool = False) -> None:
        joules = 100.0 * (steady[0] - 50.0) if has_counter else None
        seen = Look(
            at_s=clock.now_s(),
            counter_j=joules,
            power_w=100.0,
            has_counter=has_counter,
            steady_s=steady[0],
        )
        closed.extend(gpu.advance(seen, A1, close=close))

    look()
    for elapsed_s, jump_s in steps:
        steady[0] += elapsed_s
        wall[0] += elapsed_s + jump_s
        look()
    look(close=True)
    assert_chain(closed)
    assert EnergyMethod.MISSING not in {one.method for one in closed}
    assert math.fsum(one.energy_j or 0.0 for one in closed) == pytest.approx(100.0 * (steady[0] - 50.0))


def test_an_agent_that_starts_after_the_clock_was_set_back_goes_on_where_it_was() -> None:
    """The chain of intervals does not overlap; a clock that was wrong by far is not kept up."""
    wall, steady = [1000.0], [0.0]
    clock = SteadyClock(wall=lambda: wall[0], monotonic=lambda: steady[0])
    clock.not_before(1300.0)
    gpu = meter(resumed=open_interval(start_s=1300.0))
    closed = run(gpu, [(counter(clock.now_s(), 5100.0), A1)])
    wall[0], steady[0] = 1010.0, 10.0
    closed += run(gpu, [(counter(clock.now_s(), 5200.0), B1)])
    assert_chain(closed)
    assert math.fsum(one.energy_j or 0.0 for one in closed) == 200.0
    clock.not_before(1e9)
    assert clock.now_s() < 1400.0
