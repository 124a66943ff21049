# SPDX-License-Identifier: Apache-2.0
"""The program, in PuLP: the readable truth, and the solver for small clusters.

    max   sum_jc net_jc x_jc - price sum_r over_r          (coefficients: see ``problem``)
    s.t.  sum_c x_jc = 1                                    every job j has a column; waiting is one
          sum_jc: type(c)=t width_c x_jc <= gpus_t + over_t           GPUs of each type t
          sum_jc: tenant(j)=n width_c x_jc <= quota_n + over_n        slots of each tenant n
          sum_jc marginal_w_jc x_jc <= cap - idle + over_cap          W, idle of all GPUs taken off
          x_jc in {0, 1},  over_r >= 0

Never infeasible: what cannot be held is exceeded by as little as possible and reported. A solver's
status is not believed: the plan is recomputed from its columns, and it must beat the previous one.

Known limitations: the solver may overrun its time limit by a few seconds, and a program of thousands of
jobs takes it seconds; see the time limit of the policy.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import pulp

from horowatt_allocator.decisions.problem import (
    Coefficients,
    Problem,
    Scale,
    Worth,
    gain_s,
    joules_j,
    present_choice,
    proven_bound,
    rows_of,
    worth_of,
)
from horowatt_allocator.records.cluster import Objective, Plan, PlanStatus

Solve = Callable[[Problem, float], Plan]
"""A solver: a problem and a time limit in seconds give a plan, never an exception."""

PREVIOUS = "previous plan"
EXACT_UP_TO_JOBS = 20
"""Above it the solver may stop at :data:`LARGE_GAP`: the gap of a large program is small anyway."""
LARGE_GAP = 1e-3
UNIT = 1000.0


@dataclass(frozen=True, slots=True)
class _Found:
    """A choice, what it is worth, and an upper bound of what any choice is worth."""

    choice: list[int]
    worth: Worth
    bound: float | None
    proven: bool
    kept: bool


def solve(problem: Problem, time_limit_s: float) -> Plan:
    """Return the best plan found within the time limit (s), or the previous one where nothing is better."""
    began_s = time.monotonic()
    balanced = problem.objective is Objective.BALANCED and problem.alpha > 0
    found = _best(problem, Scale(), time_limit_s / 2 if balanced else time_limit_s)
    if balanced:
        found = _best(problem, _scale(problem, found.choice), time_limit_s / 2)
    columns = {
        job.job_id: job.candidates[index].column
        for job, index in zip(problem.jobs, found.choice, strict=True)
    }
    status = PlanStatus.OPTIMAL if found.proven else PlanStatus.FEASIBLE
    return Plan(
        columns=columns,
        status=PlanStatus.PREVIOUS_KEPT if found.kept else status,
        value=found.worth.value,
        bound=found.bound,
        violations=found.worth.violations,
        binding=found.worth.binding,
        power_w=found.worth.power_w,
        solve_s=time.monotonic() - began_s,
        solver=PREVIOUS if found.kept else f"PuLP {pulp.__version__}, CBC",
    )


def _scale(problem: Problem, choice: list[int]) -> Scale:
    """Return the scale of ``balanced`` from the plan of alpha = 0; a sum of 0 leaves its term out."""
    chosen = [(job, job.candidates[index]) for job, index in zip(problem.jobs, choice, strict=True)]
    gain = sum(gain_s(problem, job, candidate) for job, candidate in chosen)
    joules = sum(joules_j(problem, candidate) for _, candidate in chosen)
    return Scale(problem.alpha, gain if gain > 0 else float("inf"), joules or float("inf"))


def _best(problem: Problem, scale: Scale, time_limit_s: float) -> _Found:
    coefficients = Coefficients(problem, scale)
    previous = present_choice(problem)
    kept = _Found(previous, worth_of(problem, coefficients, previous), None, proven=False, kept=True)
    if not problem.jobs:
        return _Found([], kept.worth, kept.worth.value, proven=True, kept=False)
    tolerance = 1e-7 * coefficients.unit * len(problem.jobs)
    model = _Model(problem, coefficients)
    claimed = model.run(time_limit_s, relaxed=False)
    choice = model.choice()
    worth = worth_of(problem, coefficients, choice)
    if not model.ran or worth.value < kept.worth.value - tolerance:
        choice, worth, claimed, is_kept = previous, kept.worth, False, True
    else:
        is_kept = False
    # A claim of optimality stands only if the solver's own value is what its columns are worth.
    proven = claimed and abs(model.value() - worth.value) <= 1e-6 * max(1.0, abs(worth.value))
    if proven:
        return _Found(choice, worth, worth.value, proven=True, kept=is_kept)
    relaxed = _Model(problem, coefficients)
    relaxed.run(time_limit_s, relaxed=True)
    bound = proven_bound(problem, coefficients, relaxed.prices())
    return _Found(choice, worth, bound, proven=worth.value >= bound - tolerance, kept=is_kept)


class _Model:
    """The formula at the head of this module, as PuLP objects."""

    def __init__(self, problem: Problem, coefficients: Coefficients) -> None:
        self.ran = False
        self._exact = len(problem.jobs) <= EXACT_UP_TO_JOBS
        self._rows = rows_of(problem)
        self._model = model = pulp.LpProblem("horowatt", pulp.LpMaximize)
        self._x = x = [
            [model.add_variable(f"x_{j}_{c}", 0, 1, cat=pulp.LpBinary) for c in range(len(job.candidates))]
            for j, job in enumerate(problem.jobs)
        ]
        over = [model.add_variable(f"over_{r}", 0) for r in range(len(self._rows))]
        terms = [
            (x_jc, net_jc)
            for x_j, net_j in zip(x, coefficients.net, strict=True)
            for x_jc, net_jc in zip(x_j, net_j, strict=True)
        ]
        terms += [(over_r, -coefficients.price) for over_r in over]
        # The best column is worth UNIT to the solver, so that its absolute tolerances mean the same always.
        self._scale = UNIT / coefficients.unit
        model += pulp.LpAffineExpression([(variable, self._scale * worth) for variable, worth in terms])
        for j, x_j in enumerate(x):
            model += pulp.lpSum(x_j) == 1, f"one_{j}"
        for r, row in enumerate(self._rows):
            used = [
                (x_jc, use)
                for x_j, job in zip(x, problem.jobs, strict=True)
                for x_jc, candidate in zip(x_j, job.candidates, strict=True)
                if (use := row.use(job, candidate.column)) != 0
            ]
            model += pulp.LpAffineExpression([*used, (over[r], -1)]) <= row.available, f"row_{r}"

    def run(self, time_limit_s: float, *, relaxed: bool) -> bool:
        """Solve; return whether the solver claims an exact optimum. Its failure is no exception here."""
        solver = pulp.COIN_CMD(
            path=pulp.PULP_CBC_CMD.pulp_cbc_path,
            mip=not relaxed,
            msg=False,
            timeLimit=max(0.1, time_limit_s),
            gapRel=None if self._exact else LARGE_GAP,
            # No ``threads``: even 1 makes the bundled CBC wait 10 s for its own thread now and then.
        )
        try:
            self._model.solve(solver)
        except (pulp.PulpError, OSError, ValueError, IndexError):
            # A missing or crashing binary, a full disk or a garbled answer: the caller has the previous plan.
            return False
        self.ran = True
        return self._exact and bool(self._model.sol_status == pulp.LpSolutionOptimal)

    def choice(self) -> list[int]:
        """Return the candidate with the largest variable for each job."""
        values = [[x_jc.varValue or 0.0 for x_jc in x_j] for x_j in self._x]
        return [values_j.index(max(values_j)) for values_j in values]

    def value(self) -> float:
        """Return the solver's own objective value."""
        return float(pulp.value(self._model.objective) or 0.0) / self._scale

    def prices(self) -> dict[str, float]:
        """Return what one more unit of each row would be worth, as the solver says; 0 if unknown."""
        found = {}
        for r, row in enumerate(self._rows):
            constraint = self._model.get_constraint_by_name(f"row_{r}")
            found[row.name] = abs(float(getattr(constraint, "pi", None) or 0.0)) / self._scale
        return found
