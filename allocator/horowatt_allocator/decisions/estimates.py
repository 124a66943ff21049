# SPDX-License-Identifier: Apache-2.0
"""What a column of a job would give: rate and watts, from what was measured of it and a prior.

Rate. Within one GPU type the rate is ``r1 * width * e ** log2(width)``: each doubling of the width keeps
the share ``e`` (efficiency) of twice the rate. ``e`` is the policy's prior until two widths were measured,
then their least squares in log space. Between measured widths the rate is interpolated in log space,
beyond them it goes on from the nearest one with ``e``. A point measured for two windows is used exactly.
One window that is slower than the best-known width lets expect is believed by half: other work on the
hosts only ever slows a job, and a burst of it must not make one look for ever as if it did not scale.

Power limit. Below the job's own draw ``P`` a limit ``L`` slows it by ``((L - Pf) / (P - Pf)) ** beta``.
``Pf = 0.2`` of the highest limit and ``beta = 0.4`` lie between fits of public measurements on V100
(50.6 W of 250 W, 0.37) and A40 (88 W of 300 W, 0.46); the two trade off, so only the curve means
anything. The job's own measurements at several limits bend it: see :func:`_bend`.

Scale. A job that was never measured has no rate in samples per second. Its columns are ``nominal``: one
GPU gives 1. They order the job's own columns and are compared with its fair share on the same scale.

Known limitations: widths spread over nodes are not told apart from widths on one node; nothing is
learnt from other jobs; all GPU types are equally fast until measured.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from horowatt_allocator.records.cluster import Gpu, Policy
from horowatt_allocator.records.jobs import Column, Job, JobEstimate, Observation, PauseKind

PRIOR_HIGHEST_LIMIT_W = 300.0
"""Highest limit assumed of a GPU that tells none, W."""
PRIOR_IDLE_SHARE = 0.15
"""Idle draw as a share of the highest limit, until a free GPU of the type was seen."""
PRIOR_DRAW_SHARE = 0.75
"""Draw of a training job as a share of the highest limit; public averages run from 0.15 to 0.97."""
FLOOR_SHARE = 0.2
"""``Pf`` of the limit curve as a share of the highest limit."""
LIMIT_EXPONENT = 0.4
"""``beta`` of the limit curve."""
NOISE = 0.05
"""Half width of the interval of a measured rate; limits that do not bind move it by as much."""
NOISE_BRIEF = 0.10
"""The same of a rate that was measured for less than :data:`TRUSTED_WINDOWS`."""
NOISE_PER_DOUBLING = 0.15
NOISE_OTHER_LIMIT = 0.10
NOISE_OTHER_TYPE = 0.40
NOISE_NOMINAL = 0.50
LIMIT_TOLERANCE_W = 1.0
"""Limits closer than this are the same: drivers round to a watt."""
HALF_LIFE_S = 600.0
"""Age at which an observation counts half against a new one."""
MEMORY_S = 120.0
"""Most seconds of weight that old windows keep against a new one."""
CHANGED = 0.25
"""Relative difference from which a new rate means that the job changed and the old one is dropped."""
TRUSTED_WINDOWS = 2.0
"""Windows after which a measured rate stands for itself."""
KEPT_PAUSES = 8
_MIN_EFFICIENCY, _MAX_EFFICIENCY = 0.25, 1.0
_MAX_BEND = 4.0
_POINTS_FOR_A_FIT = 2
_BEND_PRIOR = 0.05**2
"""Weight of the generic limit curve against measured pairs, in squared log units."""


@dataclass(frozen=True, slots=True)
class _Point:
    """A measured width at full limit: ``rate_per_s`` is corrected for the limit it was measured at."""

    width: int
    rate_per_s: float
    seconds_s: float


def observe(estimate: JobEstimate, observation: Observation) -> JobEstimate:
    """Return the estimate with a new window merged in.

    Windows of one (type, width, limit) are averaged by their seconds. Old ones fade with their age and
    never weigh more than two minutes; a rate that moved by a quarter replaces them.
    """
    others = tuple(o for o in estimate.observations if not _same_point(o, observation))
    old = next((o for o in estimate.observations if _same_point(o, observation)), None)
    merged = observation if old is None else _merge(old, observation)
    return replace(estimate, observations=(*others, merged))


def observe_pause(estimate: JobEstimate, pause_s: float, kind: PauseKind | None = None) -> JobEstimate:
    """Return the estimate with a measured pause (seconds) added; the latest few are kept."""
    kinds = dict(estimate.kind_pauses_s)
    if kind is not None:
        kinds[kind] = (*kinds.get(kind, ()), pause_s)[-KEPT_PAUSES:]
    return replace(estimate, pauses_s=(*estimate.pauses_s, pause_s)[-KEPT_PAUSES:], kind_pauses_s=kinds)


def expected_pause_s(estimate: JobEstimate, policy: Policy, kind: PauseKind | None = None) -> float:
    """Return the pause to expect of a resize, seconds.

    The median of those measured of its kind, else of all, else the prior.
    """
    pauses_s = (() if kind is None else estimate.kind_pauses_s.get(kind, ())) or estimate.pauses_s
    if not pauses_s:
        return policy.prior_pause_s
    ordered = sorted(pauses_s)
    return ordered[len(ordered) // 2]


def pause_kind(job: Job, width: int) -> PauseKind:
    """Return the kind of the resize that would bring a running job to ``width``."""
    if width < job.width:
        return PauseKind.SHRINK
    return PauseKind.GROW_COLD if job.cold else PauseKind.GROW_WARM


def observed(estimate: JobEstimate, gpu_type: str, width: int, limit_w: float | None) -> Observation | None:
    """Return what was measured at exactly this point, or None."""
    for observation in reversed(estimate.observations):
        if (
            observation.gpu_type == gpu_type
            and observation.width == width
            and same_limit(observation.limit_w, limit_w)
        ):
            return observation
    return None


def same_limit(one_w: float | None, other_w: float | None) -> bool:
    """Return whether two power limits (W; None is the default) are the same to a driver."""
    if one_w is None or other_w is None:
        return one_w is other_w
    return abs(one_w - other_w) <= LIMIT_TOLERANCE_W


def highest_limit_w(gpu: Gpu) -> float:
    """Return the highest power limit that Horowatt would set, W.

    It is the default where that lies below the maximum: who ships a card so means it.
    """
    known = [limit for limit in (gpu.max_limit_w, gpu.default_limit_w) if limit is not None]
    return min(known, default=PRIOR_HIGHEST_LIMIT_W)


def idle_w(gpu: Gpu) -> float:
    """Return what the GPU draws when free, W: the lowest seen, else the prior share."""
    return gpu.idle_w if gpu.idle_w is not None else PRIOR_IDLE_SHARE * highest_limit_w(gpu)


def countable(job: Job) -> bool:
    """Return False once the job has trained and its samples turned out not to be countable."""
    return job.samples is not None or job.attempt == 0


def reach_width(job: Job, estimate: JobEstimate) -> int:
    """Return the widest width whose predicted mean is trusted for growth.

    The narrowest legal width before the first measurement; after it the next legal width or twice
    the widest measured one, whichever is more. So a job tries one step of growth at a time, and a job
    that does not scale is found out on the way up. The prior is trusted at every width for a job whose
    samples cannot be counted, which would learn nothing on the way, and for the start of a job with a
    deadline, which has no time to learn.
    """
    legal = job.spec.legal_widths
    measured = max((o.width for o in estimate.observations), default=0)
    if not countable(job) or (measured == 0 and job.spec.deadline_s is not None):
        return legal[-1]
    if measured == 0:
        return legal[0]
    above = [width for width in legal if width > measured]
    doubled = [width for width in above if width <= 2 * measured]
    return max([measured, *above[:1], *doubled])


def predict(
    job: Job, estimate: JobEstimate, gpu: Gpu, width: int, limit_w: float | None, policy: Policy
) -> Column:
    """Return the column (type of ``gpu``, ``width``, ``limit_w``) of a job with its rate and watts.

    Args:
        job: Whose column; of it only what may be measured is used.
        estimate: What was measured of the job.
        gpu: A GPU of the type, for its idle power and its range of limits.
        width: Number of GPUs, at least 1.
        limit_w: Power limit of each, W, or None for the default.
        policy: For the prior efficiency.
    """
    return Predictor(job, estimate, gpu, policy).column(width, limit_w)


class Predictor:
    """Columns of one job on one GPU type; fits once, then each column is cheap."""

    def __init__(self, job: Job, estimate: JobEstimate, gpu: Gpu, policy: Policy) -> None:
        own = tuple(o for o in estimate.observations if o.gpu_type == gpu.gpu_type and o.rate_per_s > 0)
        self.nominal = not any(o.rate_per_s > 0 for o in estimate.observations)
        self._gpu = gpu
        self._estimate = estimate
        self._idle_w = idle_w(gpu)
        self._highest_w = highest_limit_w(gpu)
        self._foreign = not own and not self.nominal
        self._sources = own or tuple(o for o in estimate.observations if o.rate_per_s > 0)
        self._draws = _full_draws(self._sources, self._highest_w) if own else {}
        self._bend = _bend(own, self._draws, self._highest_w)
        self._trusted_s = TRUSTED_WINDOWS * policy.window_s
        self._points = _tempered(
            _points(self._sources, self._factor if own else _no_factor),
            policy.prior_efficiency,
            self._trusted_s,
        )
        self._efficiency = _efficiency(self._points, policy.prior_efficiency)
        self._reach = reach_width(job, estimate)

    def column(self, width: int, limit_w: float | None) -> Column:
        """Return the column at a width and a limit (W)."""
        exact = observed(self._estimate, self._gpu.gpu_type, width, limit_w)
        if exact is not None and exact.rate_per_s > 0 and self._stands(exact):
            rate, noise = exact.rate_per_s, NOISE
        elif exact is not None and exact.rate_per_s > 0:
            rate, noise = self.full_rate_per_s(width) * self._factor(width, limit_w), NOISE_BRIEF
        else:
            rate = self.full_rate_per_s(width) * self._factor(width, limit_w)
            noise = self._noise(width, limit_w)
        power_w = self._power_w(width, limit_w, exact)
        held_idle_w = width * self._idle_w
        return Column(
            gpu_type=self._gpu.gpu_type,
            width=width,
            limit_w=limit_w,
            rate_per_s=rate,
            low_rate_per_s=rate / (1 + noise),
            high_rate_per_s=rate * (1 + noise),
            marginal_w=max(0.0, power_w - held_idle_w),
            held_idle_w=held_idle_w,
            nominal=self.nominal,
        )

    def planned_rate_per_s(self, column: Column) -> float:
        """Return the rate the program may count on, samples per second.

        The mean up to the reach of the job (see :func:`reach_width`). Beyond it the lower bound, and at
        least what the reach gives: nobody knows yet that more GPUs help, and never that they hurt.
        """
        if column.width <= self._reach or self._measured(column):
            return column.rate_per_s
        at_reach = self.column(self._reach, column.limit_w).rate_per_s
        if self.nominal:
            return at_reach
        return max(at_reach, column.low_rate_per_s)

    def full_rate_per_s(self, width: int) -> float:
        """Return the rate at the highest limit, samples per second (nominal if never measured)."""
        slope = 1 + math.log2(self._efficiency)
        if not self._points:
            return float(width**slope)
        below = [p for p in self._points if p.width <= width]
        above = [p for p in self._points if p.width >= width]
        if below and above:
            return _between(below[-1], above[0], width)
        near = below[-1] if below else above[0]
        return float(near.rate_per_s * (width / near.width) ** slope)

    def _stands(self, exact: Observation) -> bool:
        """Return whether a point is known well enough, or better than any other width."""
        return exact.seconds_s >= self._trusted_s or len(self._points) == 1

    def _measured(self, column: Column) -> bool:
        return observed(self._estimate, self._gpu.gpu_type, column.width, column.limit_w) is not None

    def _noise(self, width: int, limit_w: float | None) -> float:
        if self.nominal:
            return NOISE_NOMINAL
        doublings = min(abs(math.log2(width / p.width)) for p in self._points)
        known_limit = any(same_limit(o.limit_w, limit_w) for o in self._sources)
        return (
            NOISE
            + NOISE_PER_DOUBLING * doublings
            + (0.0 if known_limit else NOISE_OTHER_LIMIT)
            + (NOISE_OTHER_TYPE if self._foreign else 0.0)
        )

    def _factor(self, width: int, limit_w: float | None) -> float:
        """Return the share of the full rate that a limit leaves."""
        generic = _limit_factor(limit_w, self._draw_w(width), self._highest_w)
        return float(generic**self._bend)

    def _draw_w(self, width: int) -> float:
        """Return what one GPU would draw at the highest limit, W: of the nearest measured width."""
        if not self._draws:
            return PRIOR_DRAW_SHARE * self._highest_w
        near = min(self._draws, key=lambda measured: (abs(math.log2(measured / width)), measured))
        return self._draws[near]

    def _power_w(self, width: int, limit_w: float | None, exact: Observation | None) -> float:
        if exact is not None and exact.power_w is not None:
            return exact.power_w
        draw_w = self._draw_w(width)
        return width * (draw_w if limit_w is None else min(draw_w, limit_w))


def _no_factor(_width: int, _limit_w: float | None) -> float:
    return 1.0


def _same_point(one: Observation, other: Observation) -> bool:
    return (
        one.gpu_type == other.gpu_type and one.width == other.width and same_limit(one.limit_w, other.limit_w)
    )


def _merge(old: Observation, new: Observation) -> Observation:
    if old.rate_per_s <= 0 or abs(new.rate_per_s / old.rate_per_s - 1) > CHANGED:
        return new
    age_s = max(0.0, new.at_s - old.at_s)
    kept_s = min(old.seconds_s, MEMORY_S) * 0.5 ** (age_s / HALF_LIFE_S)
    total_s = kept_s + new.seconds_s
    if total_s <= 0:
        return new
    share = new.seconds_s / total_s
    power_w = new.power_w
    if old.power_w is not None and new.power_w is not None:
        power_w = old.power_w + share * (new.power_w - old.power_w)
    return replace(
        new,
        rate_per_s=old.rate_per_s + share * (new.rate_per_s - old.rate_per_s),
        power_w=power_w if power_w is not None else old.power_w,
        seconds_s=total_s,
    )


def _limit_factor(limit_w: float | None, draw_w: float, highest_w: float) -> float:
    """Return the generic share of the full rate that a limit (W) leaves to a job drawing ``draw_w``."""
    if limit_w is None or limit_w >= draw_w:
        return 1.0
    floor_w = min(FLOOR_SHARE * highest_w, 0.9 * limit_w)
    return float(((limit_w - floor_w) / (draw_w - floor_w)) ** LIMIT_EXPONENT)


def _full_draws(observations: Iterable[Observation], highest_w: float) -> dict[int, float]:
    """Return what one GPU draws at the highest limit (W) by measured width.

    A job that draws clearly less than its limit shows its own draw; one at its limit only shows that
    it wants more, so the larger of the limit and the prior is taken.
    """
    draws: dict[int, float] = {}
    binding: dict[int, float] = {}
    for observation in observations:
        if observation.power_w is None:
            continue
        each_w = observation.power_w / observation.width
        limit_w = observation.limit_w if observation.limit_w is not None else highest_w
        if each_w < 0.9 * limit_w or limit_w >= highest_w - LIMIT_TOLERANCE_W:
            draws[observation.width] = max(draws.get(observation.width, 0.0), each_w)
        else:
            wanted_w = max(each_w, PRIOR_DRAW_SHARE * highest_w)
            binding[observation.width] = max(binding.get(observation.width, 0.0), wanted_w)
    return {**binding, **draws}


def _bend(observations: tuple[Observation, ...], draws: dict[int, float], highest_w: float) -> float:
    """Return the exponent that bends the generic limit curve to the job's own measurements.

    Least squares through the origin of measured against generic log ratios, over pairs of limits at
    one width, with a weak pull towards 1.
    """
    cross = square = _BEND_PRIOR
    for index, one in enumerate(observations):
        for other in observations[index + 1 :]:
            if one.width != other.width or same_limit(one.limit_w, other.limit_w):
                continue
            draw_w = draws.get(one.width, PRIOR_DRAW_SHARE * highest_w)
            one_share = _limit_factor(one.limit_w, draw_w, highest_w)
            other_share = _limit_factor(other.limit_w, draw_w, highest_w)
            generic = math.log(one_share / other_share)
            cross += generic * math.log(one.rate_per_s / other.rate_per_s)
            square += generic * generic
    return min(_MAX_BEND, max(0.0, cross / square))


def _points(
    observations: Iterable[Observation], factor: Callable[[int, float | None], float]
) -> tuple[_Point, ...]:
    """Return the measured widths, ascending, with rates at the highest limit weighted by seconds."""
    sums: dict[int, tuple[float, float]] = {}
    for observation in observations:
        seconds_s = max(observation.seconds_s, 1e-9)
        share = max(factor(observation.width, observation.limit_w), 1e-3)
        rate, weight = sums.get(observation.width, (0.0, 0.0))
        sums[observation.width] = (
            rate + seconds_s * observation.rate_per_s / share,
            weight + seconds_s,
        )
    return tuple(
        _Point(width, rate / seconds_s, seconds_s) for width, (rate, seconds_s) in sorted(sums.items())
    )


def _tempered(points: tuple[_Point, ...], efficiency: float, trusted_s: float) -> tuple[_Point, ...]:
    """Return the points, brief and slow ones drawn to what the longest-measured one says of their width."""
    if len(points) < _POINTS_FOR_A_FIT or trusted_s <= 0:
        return points
    anchor = max(points, key=lambda p: (min(p.seconds_s, trusted_s), -p.width))
    slope = 1 + math.log2(efficiency)

    def tempered(point: _Point) -> _Point:
        share = min(1.0, point.seconds_s / trusted_s)
        expected = anchor.rate_per_s * (point.width / anchor.width) ** slope
        if point.rate_per_s >= expected:
            return point
        return replace(point, rate_per_s=expected * (point.rate_per_s / expected) ** share)

    return tuple(point if point is anchor else tempered(point) for point in points)


def _efficiency(points: tuple[_Point, ...], prior: float) -> float:
    """Return the efficiency per doubling: least squares in log space, or the prior for one point."""
    if len(points) >= _POINTS_FOR_A_FIT:
        xs = [math.log2(p.width) for p in points]
        ys = [math.log2(p.rate_per_s) for p in points]
        mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum(
            (x - mean_x) ** 2 for x in xs
        )
        prior = 2 ** (slope - 1)
    return min(_MAX_EFFICIENCY, max(_MIN_EFFICIENCY, prior))


def _between(low: _Point, high: _Point, width: int) -> float:
    if low.width == high.width:
        return low.rate_per_s
    share = math.log(width / low.width) / math.log(high.width / low.width)
    return float(low.rate_per_s * (high.rate_per_s / low.rate_per_s) ** share)
