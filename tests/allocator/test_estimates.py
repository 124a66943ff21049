# SPDX-License-Identifier: Apache-2.0
"""Estimates: measured points exactly, the rest from a prior or a fit, with honest intervals."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specimens import gpu, job

from horowatt_allocator.decisions.estimates import (
    KEPT_PAUSES,
    Predictor,
    expected_pause_s,
    highest_limit_w,
    idle_w,
    observe,
    observe_pause,
    observed,
    predict,
    reach_width,
)
from horowatt_allocator.records.cluster import Policy
from horowatt_allocator.records.jobs import JobEstimate, Observation

POLICY = Policy(prior_efficiency=0.9)
NOTHING = JobEstimate()


def seen(
    width: int,
    rate_per_s: float,
    limit_w: float | None = 300.0,
    *,
    power_w: float | None = None,
    at_s: float = 0.0,
    seconds_s: float = 20.0,
    gpu_type: str = "V",
) -> Observation:
    """Return an observation."""
    return Observation(
        gpu_type=gpu_type,
        width=width,
        limit_w=limit_w,
        rate_per_s=rate_per_s,
        power_w=power_w,
        seconds_s=seconds_s,
        at_s=at_s,
    )


def estimate(*observations: Observation) -> JobEstimate:
    """Return what is known after these observations."""
    known = NOTHING
    for observation in observations:
        known = observe(known, observation)
    return known


def rate(known: JobEstimate, width: int, limit_w: float | None = 300.0) -> float:
    """Return the predicted rate."""
    return predict(job(), known, gpu(), width, limit_w, POLICY).rate_per_s


def test_an_unmeasured_job_has_nominal_rates_by_the_prior() -> None:
    """Without a measurement rates are relative to one GPU, marked as such, and fall off by the prior."""
    column = predict(job(), NOTHING, gpu(), 4, None, POLICY)
    assert column.nominal
    assert column.rate_per_s == pytest.approx(4 * 0.9**2)
    assert column.low_rate_per_s < column.rate_per_s < column.high_rate_per_s
    assert column.held_idle_w == pytest.approx(4 * 40.0)
    assert column.marginal_w == pytest.approx(4 * (0.75 * 300 - 40))


def test_a_measured_point_is_used_exactly() -> None:
    """Rate and power of a measured column are what was measured, with the noise as interval."""
    column = predict(job(), estimate(seen(2, 1234.0, power_w=480.0)), gpu(), 2, 300.0, POLICY)
    assert (column.rate_per_s, column.held_w, column.nominal) == (1234.0, 480.0, False)
    assert column.high_rate_per_s / column.rate_per_s == pytest.approx(1.05)


def test_one_measured_width_is_extended_by_the_prior() -> None:
    """From one width the others follow with the prior efficiency, in both directions."""
    known = estimate(seen(2, 180.0))
    assert rate(known, 4) == pytest.approx(180 * 2 * 0.9)
    assert rate(known, 1) == pytest.approx(180 / (2 * 0.9))


def test_two_measured_widths_give_the_efficiency() -> None:
    """Two widths fix the efficiency per doubling; between them the rate is interpolated in log space."""
    known = estimate(seen(1, 100.0), seen(4, 100.0 * 4 * 0.6**2))
    assert rate(known, 2) == pytest.approx(100 * 2 * 0.6)
    assert rate(known, 8) == pytest.approx(100 * 8 * 0.6**3)


def test_a_job_that_runs_slower_when_wider_is_believed() -> None:
    """Curves that fall with width are real: growth is not predicted to help any more."""
    known = estimate(seen(1, 100.0), seen(2, 80.0))
    assert rate(known, 4) < 80.0


@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(1e-3, 1e6)), min_size=1, max_size=6), st.integers(1, 512)
)
def test_predictions_are_positive_and_finite(points: list[tuple[int, float]], width: int) -> None:
    """Whatever was measured, every column has a finite positive rate within its own interval."""
    known = estimate(*(seen(w, r, power_w=100.0 * w, at_s=float(n)) for n, (w, r) in enumerate(points)))
    for limit_w in (None, 300.0, 120.0):
        column = predict(job(), known, gpu(), width, limit_w, POLICY)
        assert 0 < column.low_rate_per_s <= column.rate_per_s <= column.high_rate_per_s < math.inf
        assert 0 <= column.marginal_w < math.inf


def test_limits_below_the_draw_slow_a_job_and_limits_above_do_not() -> None:
    """A limit that does not bind costs nothing; one that binds costs less rate than power."""
    known = estimate(seen(1, 100.0, 300.0, power_w=220.0))
    free = predict(job(), known, gpu(), 1, 240.0, POLICY)
    bound = predict(job(), known, gpu(), 1, 160.0, POLICY)
    assert (free.rate_per_s, free.held_w) == (100.0, 220.0)
    assert bound.held_w == 160.0
    assert 160 / 220 < bound.rate_per_s / 100 < 1


def test_own_limit_measurements_bend_the_curve() -> None:
    """A job that a limit hits harder than the generic curve says is predicted so at other widths too."""
    generic = estimate(seen(1, 100.0, 300.0, power_w=220.0))
    hit = estimate(seen(1, 100.0, 300.0, power_w=220.0), seen(1, 60.0, 160.0, power_w=160.0))
    assert rate(hit, 2, 160.0) < 0.85 * rate(generic, 2, 160.0)


def test_windows_merge_by_seconds_and_fade_with_age() -> None:
    """Two windows average by their length; an hour later the old one hardly counts."""
    close = observed(
        estimate(seen(1, 100.0, seconds_s=10), seen(1, 110.0, at_s=10, seconds_s=30)), "V", 1, 300.0
    )
    late = observed(estimate(seen(1, 100.0), seen(1, 110.0, at_s=3600)), "V", 1, 300.0)
    assert close is not None
    assert late is not None
    assert close.rate_per_s == pytest.approx(107.5, abs=0.1)
    assert late.rate_per_s > 109.8


def test_a_job_that_changed_is_not_averaged_with_what_it_was() -> None:
    """A rate that moved by a quarter or more replaces the old one at once."""
    changed = observed(estimate(seen(1, 100.0, seconds_s=900), seen(1, 60.0, at_s=1)), "V", 1, 300.0)
    assert changed is not None
    assert changed.rate_per_s == 60.0


def test_new_jobs_start_narrow_and_grow_one_step_beyond_what_was_measured() -> None:
    """Growth is trusted for one step: the next legal width or twice the widest measured one."""
    spec = job(widths=(1, 2, 3, 4, 8, 16))
    assert reach_width(spec, NOTHING) == 1
    assert reach_width(spec, estimate(seen(1, 1.0))) == 2
    assert reach_width(spec, estimate(seen(4, 1.0))) == 8
    assert reach_width(job(widths=(3, 9)), estimate(seen(3, 1.0))) == 9
    assert reach_width(spec, estimate(seen(16, 1.0))) == 16


def test_jobs_that_cannot_learn_or_have_no_time_trust_the_prior() -> None:
    """Uncountable samples, or a deadline before the first measurement, allow every width at once."""
    assert reach_width(replace(job(), attempt=1, samples=None), NOTHING) == 4
    assert reach_width(job(deadline_s=5.0), NOTHING) == 4


def test_growth_beyond_the_reach_counts_with_its_lower_bound() -> None:
    """Beyond one step the program may not count on the mean, and never on less than the step gives."""
    predictor = Predictor(job(widths=(1, 2, 4, 8)), estimate(seen(1, 100.0)), gpu(), POLICY)
    within, beyond = predictor.column(2, 300.0), predictor.column(8, 300.0)
    assert predictor.planned_rate_per_s(within) == within.rate_per_s
    assert within.rate_per_s <= predictor.planned_rate_per_s(beyond) == beyond.low_rate_per_s
    new = Predictor(job(widths=(1, 2, 4)), NOTHING, gpu(), POLICY)
    assert new.planned_rate_per_s(new.column(4, None)) == new.column(1, None).rate_per_s


def test_another_type_starts_from_what_was_measured_elsewhere() -> None:
    """A job measured on one type keeps its scale on another, with a wide interval."""
    column = predict(job(), estimate(seen(1, 100.0, gpu_type="A")), gpu(), 1, 300.0, POLICY)
    assert (column.rate_per_s, column.nominal) == (100.0, False)
    assert column.high_rate_per_s > 1.4 * column.rate_per_s


def test_pauses_are_the_median_of_the_latest() -> None:
    """One slow resize does not set the pause that is expected; without any it is the prior."""
    known = NOTHING
    assert expected_pause_s(known, POLICY) == POLICY.prior_pause_s
    for pause_s in (1.0, 60.0, 2.0):
        known = observe_pause(known, pause_s)
    assert expected_pause_s(known, POLICY) == 2.0
    for _ in range(20):
        known = observe_pause(known, 9.0)
    assert known.pauses_s == (9.0,) * KEPT_PAUSES


def test_absent_device_figures_become_stated_priors_not_zeros() -> None:
    """A GPU that tells neither limits nor idle power gets the documented priors."""
    mute = gpu(idle_w=None, max_limit_w=None, default_limit_w=None, min_limit_w=None)
    assert highest_limit_w(mute) == 300.0
    assert idle_w(mute) == pytest.approx(45.0)
    assert highest_limit_w(gpu(max_limit_w=350.0, default_limit_w=300.0)) == 300.0


def test_a_job_without_measured_power_has_prior_watts() -> None:
    """A rate without a power reading leaves the watts to the prior, never to zero."""
    column = predict(job(), estimate(seen(1, 100.0, power_w=None)), gpu(), 1, 300.0, POLICY)
    assert column.held_w == pytest.approx(225.0)


def test_one_window_is_believed_by_half() -> None:
    """A width measured in a bad moment is tried again: one window counts half, two count whole."""
    base = estimate(seen(1, 1000.0))
    low = seen(2, 1000.0, seconds_s=10.0)
    once = predict(job(), observe(base, low), gpu(), 2, 300.0, POLICY)
    assert once.rate_per_s == pytest.approx(1000.0 * math.sqrt(1.8))
    assert once.low_rate_per_s > 1000.0
    lucky = predict(job(), observe(base, replace(low, rate_per_s=1900.0)), gpu(), 2, 300.0, POLICY)
    assert lucky.rate_per_s == pytest.approx(1900.0)
    twice = predict(job(), observe(observe(base, low), low), gpu(), 2, 300.0, POLICY)
    assert twice.rate_per_s == 1000.0
