# SPDX-License-Identifier: Apache-2.0
"""The program as data: candidates, coupling rows, prices of what is elastic, and what a choice is worth.

Every coefficient is an amount over one horizon ``H`` (seconds); nothing here is a rate of value.

    gain_jc   = w_j (H - pause_jc) u(rate_jc / fair_j)            s of training at the fair share
              = -w_j pause_jc u(rate_jc / fair_j)                 of waiting, at the rate that is given up
    joules_jc = H marginal_w_jc                                    J above idle
    u(x)      = x                      throughput
              = log(1 + x)             proportional-fair, balanced

    throughput, proportional-fair:  net_jc = gain_jc
    balanced:  net_jc = (1 - alpha) gain_jc / gain* - alpha joules_jc / joules*

where * is the plan of alpha = 0. A pause is charged as training that does not happen while the GPUs are
held. Worst behaviour: ``throughput`` lets jobs that scale starve jobs that do not, ``proportional-fair``
spends any number of joules on a little rate, ``balanced`` with alpha near 1 makes every job wait
until its wait is over. Waiting is worth 0 in all of them, every other column more, or nobody would start; to
a running job it costs what is lost by stopping and starting again.

Elastic rows and their prices, in units of the best single column: a watt, a GPU or a slot of quota
that is not there, :data:`ROW_PRICE`; a deadline that will be missed, :data:`DEADLINE_PRICE` times between
a half and one by how far; a job that must run and waits, :data:`MUST_RUN_PRICE`. Ties are broken by
terms too small to matter: stay, else narrower, else earlier submitted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from horowatt_allocator.decisions.estimates import same_limit
from horowatt_allocator.records.cluster import Objective
from horowatt_allocator.records.jobs import Column

ROW_PRICE = 1000.0
DEADLINE_PRICE = 50.0
MUST_RUN_PRICE = 20.0
TIE = 1e-4
"""Of the best column: above the tolerances of solvers, below what anybody would notice."""
TOLERANCE = 1e-6
"""Share of a row's right side that rounding may use up."""
ROW_CAP = "power cap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A column with what the program needs beside it.

    Attributes:
        planned_rate_per_s: Rate that may be counted on; the mean, or less beyond what was measured. Of
            waiting: the rate that a running job gives up.
        pause_s: Training lost by taking this column instead of the present one.
    """

    column: Column
    planned_rate_per_s: float
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChoice:
    """A job and its candidates, never empty.

    Attributes:
        weight: Of the job, times that of its tenant.
        fair_rate_per_s: Rate at its fair width, on the scale of its columns.
        needed_rate_per_s: Rate that just meets the deadline; None without one, or if it is not known.
        must_run: True when waiting is not acceptable any more.
        present: The column of the latest plan.
    """

    job_id: str
    tenant: str
    weight: float
    fair_rate_per_s: float
    candidates: tuple[Candidate, ...]
    present: Column
    needed_rate_per_s: float | None = None
    must_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One round of the program. Jobs are in the order of their submission.

    Attributes:
        gpus: GPUs by type, without those that moving jobs are leaving.
        idle_w: Idle power of all of them, and what moving jobs draw beyond their columns.
        cap_w: Power cap of all of them, idle included, or None.
        quotas: Most slots by tenant; tenants without one are not named.
    """

    jobs: tuple[JobChoice, ...]
    gpus: Mapping[str, int]
    idle_w: float = 0.0
    cap_w: float | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)
    objective: Objective = Objective.BALANCED
    alpha: float = 0.3
    horizon_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A coupling row ``sum of use(job, column) <= available``.

    In GPUs of ``gpu_type``, in slots of ``tenant``, or, with neither, in watts above idle.
    """

    name: str
    available: float
    gpu_type: str | None = None
    tenant: str | None = None

    def use(self, job: JobChoice, column: Column) -> float:
        """Return how much of the row a column of a job takes."""
        if self.gpu_type is not None:
            return column.width if column.gpu_type == self.gpu_type else 0
        if self.tenant is not None:
            return column.width if job.tenant == self.tenant else 0
        return column.marginal_w


@dataclass(frozen=True, slots=True)
class Scale:
    """``alpha`` with the gain (s) and joules of the plan of alpha = 0; (0, 1, 1) leaves gains alone."""

    alpha: float = 0.0
    gain_s: float = 1.0
    joules_j: float = 1.0


@dataclass(frozen=True, slots=True)
class Worth:
    """What a choice of one candidate per job is worth, recomputed from its columns."""

    value: float
    violations: dict[str, float]
    binding: tuple[str, ...]
    power_w: float


def rows_of(problem: Problem) -> tuple[Row, ...]:
    """Return the coupling rows: GPUs of each type, quota of each tenant that has one, power."""
    rows = [Row(name=f"gpus {name}", available=count, gpu_type=name) for name, count in problem.gpus.items()]
    rows += [
        Row(name=f"quota {name}", available=quota, tenant=name) for name, quota in problem.quotas.items()
    ]
    if problem.cap_w is not None:
        rows.append(Row(name=ROW_CAP, available=problem.cap_w - problem.idle_w))
    return tuple(rows)


def gain_s(problem: Problem, job: JobChoice, candidate: Candidate) -> float:
    """Return the weighted training that a candidate gives over the horizon, s at the fair share."""
    if job.fair_rate_per_s <= 0:
        return 0.0
    share = candidate.planned_rate_per_s / job.fair_rate_per_s
    worth = share if problem.objective is Objective.THROUGHPUT else math.log1p(share)
    trains_s = max(0.0, problem.horizon_s - candidate.pause_s)
    if candidate.column.width == 0:
        trains_s = -min(problem.horizon_s, candidate.pause_s)
    return job.weight * trains_s * worth


def joules_j(problem: Problem, candidate: Candidate) -> float:
    """Return the joules above idle that a candidate spends over the horizon."""
    return problem.horizon_s * candidate.column.marginal_w


class Coefficients:
    """Objective coefficients of all candidates under one scale, with the prices of what is elastic.

    Attributes:
        net: Per job, per candidate: what the program maximises.
        price: Of one unit of any coupling row that is not there.
    """

    def __init__(self, problem: Problem, scale: Scale) -> None:
        base = [
            [
                (1 - scale.alpha) * gain_s(problem, job, candidate) / scale.gain_s
                - scale.alpha * joules_j(problem, candidate) / scale.joules_j
                for candidate in job.candidates
            ]
            for job in problem.jobs
        ]
        self.unit = max((abs(value) for values in base for value in values), default=0.0) or 1.0
        self.price = ROW_PRICE * self.unit
        self.net = [
            [
                value - self.unit * (elastic_cost(job, c.column) + _tie(job, c.column, position, problem))
                for value, c in zip(values, job.candidates, strict=True)
            ]
            for position, (job, values) in enumerate(zip(problem.jobs, base, strict=True))
        ]


def elastic_cost(job: JobChoice, column: Column) -> float:
    """Return the price of what a column fails to do for its job, in units of the best column."""
    cost = MUST_RUN_PRICE if job.must_run and column.width == 0 else 0.0
    return cost + DEADLINE_PRICE * (0.5 + 0.5 * short) if (short := shortfall(job, column)) > 0 else cost


def shortfall(job: JobChoice, column: Column) -> float:
    """Return the share of the rate needed for the deadline that a column lacks, 0 to 1."""
    if job.needed_rate_per_s is None or job.needed_rate_per_s <= 0:
        return 0.0
    return max(0.0, 1 - column.rate_per_s / job.needed_rate_per_s)


def worth_of(problem: Problem, coefficients: Coefficients, choice: Sequence[int]) -> Worth:
    """Return what a choice (index of a candidate per job) is worth; never trusts a solver."""
    columns = [job.candidates[index].column for job, index in zip(problem.jobs, choice, strict=True)]
    value = math.fsum(values[index] for values, index in zip(coefficients.net, choice, strict=True))
    violations: dict[str, float] = {}
    binding: list[str] = []
    for row in rows_of(problem):
        used = math.fsum(row.use(job, column) for job, column in zip(problem.jobs, columns, strict=True))
        slack = row.available - used
        allowance = TOLERANCE * max(1.0, abs(row.available))
        value -= coefficients.price * max(0.0, -slack)
        if slack < -allowance:
            violations[row.name] = -slack
        smallest = min((use for j in problem.jobs if (use := _smallest_step(row, j)) > 0), default=math.inf)
        if slack < smallest - allowance:
            binding.append(row.name)
    for job, column in zip(problem.jobs, columns, strict=True):
        if job.must_run and column.width == 0:
            violations[f"must run {job.job_id}"] = 1.0
        if (short := shortfall(job, column)) > 0:
            violations[f"deadline {job.job_id}"] = short * (job.needed_rate_per_s or 0.0)
    power_w = problem.idle_w + math.fsum(column.marginal_w for column in columns)
    return Worth(value, violations, tuple(binding), power_w)


def proven_bound(problem: Problem, coefficients: Coefficients, prices: Mapping[str, float]) -> float:
    """Return an upper bound of the program from any prices of its rows (Lagrange), whoever made them."""
    rows = rows_of(problem)
    charged = [(row, min(max(prices.get(row.name, 0.0), 0.0), coefficients.price)) for row in rows]
    charged = [(row, price) for row, price in charged if price > 0]
    best = (
        max(
            value - math.fsum(price * row.use(job, candidate.column) for row, price in charged)
            for value, candidate in zip(values, job.candidates, strict=True)
        )
        for job, values in zip(problem.jobs, coefficients.net, strict=True)
    )
    return math.fsum(best) + math.fsum(price * row.available for row, price in charged)


def same_column(one: Column, other: Column) -> bool:
    """Return whether two columns are the same choice, whatever was predicted of them."""
    return (
        one.gpu_type == other.gpu_type and one.width == other.width and same_limit(one.limit_w, other.limit_w)
    )


def present_choice(problem: Problem) -> list[int]:
    """Return the previous plan as a choice; a column that is not offered any more becomes the narrowest."""
    choice = []
    for job in problem.jobs:
        indices = range(len(job.candidates))
        stays = [i for i in indices if same_column(job.candidates[i].column, job.present)]
        widths = [candidate.column.width for candidate in job.candidates]
        narrowest = widths.index(min(widths))
        choice.append(stays[0] if stays else narrowest)
    return choice


def _smallest_step(row: Row, job: JobChoice) -> float:
    """Return the least amount of the row by which two candidates of a job differ."""
    uses = sorted({row.use(job, candidate.column) for candidate in job.candidates})
    return min((b - a for a, b in pairwise(uses)), default=0.0)


def _tie(job: JobChoice, column: Column, position: int, problem: Problem) -> float:
    moved = 0.0 if same_column(column, job.present) else 1.0
    late = position / len(problem.jobs) if column.width > 0 else 0.0
    widest = max(candidate.column.width for candidate in job.candidates) or 1
    return TIE * (moved + 0.5 * column.width / widest + 0.1 * late)
