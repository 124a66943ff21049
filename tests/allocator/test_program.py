# SPDX-License-Identifier: Apache-2.0
"""The program: right on small instances, never infeasible, never fooled by its solver."""

import itertools
import math

import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horowatt_allocator.decisions import program
from horowatt_allocator.decisions.problem import (
    ROW_CAP,
    Candidate,
    Coefficients,
    JobChoice,
    Problem,
    Scale,
    present_choice,
    proven_bound,
    rows_of,
    worth_of,
)
from horowatt_allocator.records.cluster import Objective, Plan, PlanStatus
from horowatt_allocator.records.jobs import WAITING, Column

LIMIT_S = 20.0


def column(
    width: int, rate: float, watts: float, gpu_type: str = "V", limit_w: float | None = None
) -> Column:
    """Return a column with ``watts`` above idle."""
    return Column(
        gpu_type=gpu_type,
        width=width,
        limit_w=limit_w,
        rate_per_s=rate,
        low_rate_per_s=rate,
        high_rate_per_s=rate,
        marginal_w=watts,
        held_idle_w=40.0 * width,
    )


def choice(
    name: str,
    *columns: Column,
    waits: bool = True,
    present: Column = WAITING,
    pause_s: float = 0.0,
    **more: object,
) -> JobChoice:
    """Return a job with these columns; ``pause_s`` on all that differ from the present one."""
    offered = (WAITING, *columns) if waits else columns
    fields: dict[str, object] = {"tenant": "t", "weight": 1.0, "fair_rate_per_s": 1.0, **more}
    return JobChoice(
        job_id=name,
        candidates=tuple(
            Candidate(
                column=c,
                planned_rate_per_s=c.rate_per_s,
                pause_s=0.0 if c == present or present.width == 0 else pause_s,
            )
            for c in offered
        ),
        present=present,
        **fields,  # type: ignore[arg-type]  # fields of the record by name
    )


def widths(plan: Plan) -> dict[str, int]:
    """Return the width of each job."""
    return {job_id: chosen.width for job_id, chosen in plan.columns.items()}


def index_of(problem: Problem, plan: Plan) -> list[int]:
    """Return the plan as indices of candidates."""
    return [
        [candidate.column for candidate in job.candidates].index(plan.columns[job.job_id])
        for job in problem.jobs
    ]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw a small problem with every kind of row."""
    types = draw(st.sampled_from([("V",), ("V", "A")]))
    jobs = []
    for number in range(draw(st.integers(1, 4))):
        offered = [
            column(
                width,
                draw(st.floats(0.1, 4.0)),
                draw(st.floats(10.0, 250.0)) * width,
                draw(st.sampled_from(types)),
            )
            for width in draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
        ]
        waits = draw(st.booleans())
        jobs.append(
            choice(
                f"j{number}",
                *offered,
                waits=waits,
                present=draw(st.sampled_from(offered)) if not waits else WAITING,
                pause_s=draw(st.floats(0, 30)),
                tenant=draw(st.sampled_from(["t", "u"])),
                weight=draw(st.sampled_from([0.5, 1.0, 2.0])),
                fair_rate_per_s=draw(st.floats(0.5, 2.0)),
                needed_rate_per_s=draw(st.none() | st.floats(0.1, 3.0)),
                must_run=waits and draw(st.booleans()),
            )
        )
    return Problem(
        jobs=tuple(jobs),
        gpus={name: draw(st.integers(0, 6)) for name in types},
        idle_w=draw(st.floats(0, 200)),
        cap_w=draw(st.none() | st.floats(100, 1500)),
        quotas=draw(st.sampled_from([{}, {"t": 2}, {"t": 3, "u": 1}])),
        objective=draw(st.sampled_from(list(Objective))),
        alpha=draw(st.sampled_from([0.0, 0.3, 0.8])),
    )


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from([Scale(), Scale(0.3, 200.0, 60_000.0)]))
def test_program_equals_brute_force(problem: Problem, scale: Scale) -> None:
    """On tiny instances the plan is worth exactly the best of all choices, and no bound is below it."""
    coefficients = Coefficients(problem, scale)
    best = max(
        worth_of(problem, coefficients, picked).value
        for picked in itertools.product(*(range(len(job.candidates)) for job in problem.jobs))
    )
    found = program._best(problem, scale, LIMIT_S)
    assert found.worth.value == pytest.approx(best, rel=1e-6, abs=1e-6 * coefficients.unit)
    for guess in (0.0, 0.01, 1.0, 1e9):
        prices = {row.name: guess for row in rows_of(problem)}
        assert proven_bound(problem, coefficients, prices) >= best - 1e-6 * abs(best) - 1e-9


@settings(max_examples=60, deadline=None)
@given(problems())
def test_plans_hold_their_rows(problem: Problem) -> None:
    """Each job gets one of its columns, and a row is exceeded only if the report of violations says so."""
    plan = program.solve(problem, LIMIT_S)
    index_of(problem, plan)
    chosen = [(job, plan.columns[job.job_id]) for job in problem.jobs]
    for row in rows_of(problem):
        used = sum(row.use(job, c) for job, c in chosen)
        assert used <= row.available + plan.violations.get(row.name, 0.0) + 1e-5 * max(1, abs(row.available))
    assert plan.bound is None or plan.bound >= plan.value - 1e-6 * max(1.0, abs(plan.value))
    assert plan.power_w == pytest.approx(problem.idle_w + sum(c.marginal_w for _, c in chosen))


def exact_sum_of_speedups(speedups: list[list[float]], num_gpus: int) -> float:
    """Return FfDL's optimum: every job at least one GPU, the largest sum of speedups."""
    best = [0.0] + [-math.inf] * num_gpus
    for speedup in speedups:
        best = [
            max(
                (best[k - g] + speedup[g - 1] for g in range(1, min(k, len(speedup)) + 1)),
                default=-math.inf,
            )
            for k in range(num_gpus + 1)
        ]
    return max(best)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.1, 8), min_size=1, max_size=4), min_size=1, max_size=5), st.integers(5, 12)
)
def test_throughput_equals_the_ffdl_dynamic_program(speedups: list[list[float]], num_gpus: int) -> None:
    """With one type, no energy and unit weights the optimum is that of FfDL's exact dynamic program."""
    problem = Problem(
        jobs=tuple(
            choice(f"j{n}", *(column(g + 1, s, 0.0) for g, s in enumerate(speedup)), waits=False)
            for n, speedup in enumerate(speedups)
        ),
        gpus={"V": num_gpus},
        objective=Objective.THROUGHPUT,
        horizon_s=1.0,
    )
    plan = program.solve(problem, LIMIT_S)
    total = sum(c.rate_per_s for c in plan.columns.values())
    assert total == pytest.approx(exact_sum_of_speedups(speedups, num_gpus), rel=1e-3)


def equal_job(name: str, **more: object) -> JobChoice:
    """Return a job that scales perfectly; its fair share is one GPU."""
    return choice(name, *(column(w, float(w), 200.0 * w) for w in (1, 2, 4)), **more)


@pytest.mark.parametrize("objective", [Objective.PROPORTIONAL_FAIR, Objective.BALANCED])
def test_equal_jobs_all_run(objective: Objective) -> None:
    """Trap: a logarithm that makes waiting worth the fair share starves half of 8 equal jobs on 8 GPUs."""
    problem = Problem(jobs=tuple(equal_job(f"j{n}") for n in range(8)), gpus={"V": 8}, objective=objective)
    assert set(widths(program.solve(problem, LIMIT_S)).values()) == {1}


def test_a_cap_below_idle_is_reported_and_does_not_stop_running_jobs() -> None:
    """Trap: a cap that cannot be held gives the plan of least power and the missing watts, not a failure."""
    running = choice("r", column(1, 1, 150), column(2, 2, 300), waits=False, present=column(2, 2, 300))
    problem = Problem(jobs=(running, equal_job("q")), gpus={"V": 4}, idle_w=160.0, cap_w=100.0)
    plan = program.solve(problem, LIMIT_S)
    assert widths(plan) == {"r": 1, "q": 0}
    assert plan.violations[ROW_CAP] == pytest.approx(210.0)


def test_a_cap_lowers_limits_before_it_stops_jobs() -> None:
    """Under a cap both jobs run at a lower limit rather than one of them at the full one."""
    columns = [
        column(1, rate, watts, limit_w=limit) for rate, watts, limit in ((1, 250, 300), (0.9, 140, 180))
    ]
    problem = Problem(
        jobs=(choice("a", *columns), choice("b", *columns)),
        gpus={"V": 2},
        cap_w=300.0,
        objective=Objective.PROPORTIONAL_FAIR,
    )
    plan = program.solve(problem, LIMIT_S)
    assert {c.limit_w for c in plan.columns.values()} == {180}
    assert plan.violations == {}


def test_all_energy_makes_everyone_wait_only_until_they_must_run() -> None:
    """Trap: with alpha 1 and no deadline every job waits; one whose wait is over starts all the same."""
    patient, impatient = equal_job("patient"), equal_job("impatient", must_run=True)
    problem = Problem(jobs=(patient, impatient), gpus={"V": 4}, alpha=1.0)
    assert widths(program.solve(problem, LIMIT_S)) == {"patient": 0, "impatient": 1}


def test_a_deadline_gets_the_width_that_meets_it() -> None:
    """A job that needs 2 GPUs for its deadline gets them, from a job that would gain more from them."""
    needy = choice("needy", column(1, 1, 200), column(2, 1.5, 400), weight=0.1, needed_rate_per_s=1.4)
    greedy = choice("greedy", *(column(w, 3.0 * w, 200.0 * w) for w in (1, 2, 3)), waits=False)
    problem = Problem(jobs=(needy, greedy), gpus={"V": 3}, objective=Objective.THROUGHPUT)
    plan = program.solve(problem, LIMIT_S)
    assert widths(plan) == {"needy": 2, "greedy": 1}
    assert plan.violations == {}


def test_an_impossible_deadline_is_reported_and_does_not_drop_the_others() -> None:
    """One deadline that nothing meets is a reported violation; another one is still met."""
    hopeless = choice("hopeless", column(1, 1, 200), column(2, 1.8, 400), needed_rate_per_s=50.0)
    possible = choice("possible", column(1, 1, 200), column(2, 1.8, 400), needed_rate_per_s=1.5)
    problem = Problem(jobs=(hopeless, possible), gpus={"V": 4})
    plan = program.solve(problem, LIMIT_S)
    assert widths(plan) == {"hopeless": 2, "possible": 2}
    assert set(plan.violations) == {"deadline hopeless"}


def test_quotas_bind_and_are_named() -> None:
    """A tenant's jobs together stay within its quota, and the plan names the row that held them."""
    problem = Problem(
        jobs=tuple(equal_job(f"j{n}") for n in range(3)),
        gpus={"V": 8},
        quotas={"t": 2},
        objective=Objective.PROPORTIONAL_FAIR,
    )
    plan = program.solve(problem, LIMIT_S)
    assert sum(widths(plan).values()) == 2
    assert plan.binding == ("quota t",)


def test_a_pause_outweighs_a_gain_that_is_too_small() -> None:
    """A job stays at its width for a gain of 1 % and leaves it for one of 50 %: a pause of 10 s costs 3 %."""
    now = column(2, 2.0, 400)
    for rate, stays in ((2.02, True), (3.0, False)):
        job = choice("j", now, column(4, rate, 400), waits=False, present=now, pause_s=10.0)
        plan = program.solve(Problem(jobs=(job,), gpus={"V": 4}, alpha=0.0), LIMIT_S)
        assert (widths(plan)["j"] == 2) is stays


def test_ties_go_to_the_present_column_then_to_the_narrower_one_then_to_the_older_job() -> None:
    """What is worth the same changes nothing, holds fewer GPUs, and goes in order of submission."""
    flat = [column(w, 1.0, 0.0) for w in (1, 2, 4)]
    stays = choice("stays", *flat, waits=False, present=flat[2])
    starts = choice("starts", *flat)
    plan = program.solve(Problem(jobs=(stays, starts), gpus={"V": 8}), LIMIT_S)
    assert widths(plan) == {"stays": 4, "starts": 1}
    queue = Problem(jobs=tuple(equal_job(f"j{n}") for n in range(4)), gpus={"V": 2})
    assert widths(program.solve(queue, LIMIT_S)) == {"j0": 1, "j1": 1, "j2": 0, "j3": 0}


def test_the_previous_plan_stands_when_the_solver_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that crashes costs nothing: the columns of before, where they are still offered."""

    def fail(*_: object, **__: object) -> None:
        raise pulp.PulpSolverError("cannot execute cbc")

    monkeypatch.setattr(pulp.LpProblem, "solve", fail)
    present = column(2, 2.0, 400)
    gone = column(3, 3.0, 600)
    problem = Problem(
        jobs=(
            choice("kept", column(1, 1, 200), present, waits=False, present=present),
            choice("narrowest", column(1, 1, 200), column(2, 2, 400), waits=False, present=gone),
            equal_job("waits"),
        ),
        gpus={"V": 8},
    )
    plan = program.solve(problem, LIMIT_S)
    assert plan.status is PlanStatus.PREVIOUS_KEPT
    assert widths(plan) == {"kept": 2, "narrowest": 1, "waits": 0}
    assert plan.bound is not None
    assert plan.bound >= plan.value
    assert plan.solver == program.PREVIOUS


def test_a_lying_solver_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that calls rubbish optimal changes nothing: value and bound are recomputed."""

    def lie(self: pulp.LpProblem, *_: object, **__: object) -> int:
        for variable in self.variables():
            variable.varValue = 1.0 if variable.name.endswith("_0") else float("nan")
        self.sol_status = pulp.LpSolutionOptimal
        return 1

    monkeypatch.setattr(pulp.LpProblem, "solve", lie)
    present = column(2, 2.0, 100)
    problem = Problem(
        jobs=(choice("j", column(8, 16, 100), present, waits=False, present=present),), gpus={"V": 2}
    )
    plan = program.solve(problem, LIMIT_S)
    assert widths(plan) == {"j": 2}
    assert plan.status is not PlanStatus.OPTIMAL
    assert plan.violations == {}


def test_nothing_to_decide_is_a_plan() -> None:
    """A cluster without jobs has a plan that draws its idle power."""
    plan = program.solve(Problem(jobs=(), gpus={"V": 4}, idle_w=160.0), LIMIT_S)
    assert (plan.columns, plan.power_w, plan.status) == ({}, 160.0, PlanStatus.OPTIMAL)


def test_previous_choice_prefers_what_is_offered() -> None:
    """The previous plan is expressed in today's columns, with today's figures."""
    old = column(2, 2.0, 400)
    new = column(2, 1.9, 390)
    problem = Problem(jobs=(choice("j", column(1, 1, 200), new, present=old),), gpus={"V": 2})
    assert present_choice(problem) == [2]
