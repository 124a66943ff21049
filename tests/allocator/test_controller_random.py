# SPDX-License-Identifier: Apache-2.0
"""Random events in random order: one owner per slot, no illegal width, nothing lost."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from virtual_node import Script, VirtualCluster, ended

from horowatt.records import LauncherState
from horowatt_allocator.decisions.problem import Problem, present_choice
from horowatt_allocator.records.cluster import Plan, PlanStatus, Policy
from horowatt_allocator.records.jobs import ENDED, Column, JobPhase

POLICY = Policy(dwell_s=5.0, settle_s=1.0, window_s=3.0, decide_every_s=10.0, max_restarts=50)


def plan_of(columns: dict[str, Column]) -> Plan:
    """Return a plan of which only the columns mean anything."""
    return Plan(
        columns=columns,
        status=PlanStatus.FEASIBLE,
        value=0.0,
        bound=None,
        violations={},
        binding=(),
        power_w=0.0,
        solve_s=0.0,
        solver="test",
    )


def greedy(problem: Problem, _limit_s: float) -> Plan:
    """Return a plan within capacity: everybody narrow first, then as wide as still fits."""
    free = dict(problem.gpus)
    chosen: dict[str, Column] = {}
    for job, index in zip(problem.jobs, present_choice(problem), strict=True):
        if job.present.width > 0:
            narrowest = min((c.column for c in job.candidates), key=lambda column: column.width)
        else:
            narrowest = job.candidates[index].column
        chosen[job.job_id] = narrowest
        free[narrowest.gpu_type or ""] = free.get(narrowest.gpu_type or "", 0) - narrowest.width
    for job in problem.jobs:
        now = chosen[job.job_id]
        for candidate in job.candidates:
            column = candidate.column
            same_type = now.gpu_type in {None, column.gpu_type}
            more = column.width - now.width
            if same_type and more > 0 and more <= free.get(column.gpu_type or "", 0):
                free[column.gpu_type or ""] -= more
                chosen[job.job_id] = now = column
    return plan_of(chosen)


class Cluster(RuleBasedStateMachine):
    """A cluster of three nodes to which everything happens; the states are checked at every step."""

    chaos = False

    def __init__(self) -> None:
        super().__init__()
        self.draws = 0
        solve = self.chaotic if self.chaos else greedy
        self.cluster = VirtualCluster({"n1": 2, "n2": 3, "n3": 1}, policy=POLICY, solve=solve)

    def chaotic(self, problem: Problem, _limit_s: float) -> Plan:
        """Return any columns at all: the controller must be safe whatever is planned."""
        columns = {}
        for job in problem.jobs:
            self.draws = (self.draws * 1103515245 + 12345) % 2**31
            columns[job.job_id] = job.candidates[self.draws % len(job.candidates)].column
        return plan_of(columns)

    @initialize()
    def begin(self) -> None:
        self.cluster.run(2)

    @rule(
        widths=st.sampled_from([(1,), (1, 2), (1, 2, 4), (2, 3), (1, 2, 3, 4, 5, 6)]),
        work=st.sampled_from([500.0, 3000.0, 20_000.0]),
        stop_s=st.sampled_from([0.5, 3.0]),
        seconds_s=st.integers(0, 20),
    )
    def submit(self, widths: tuple[int, ...], work: float, stop_s: float, seconds_s: int) -> None:
        if len(self.cluster.state.jobs) < 8:
            self.cluster.submit(Script(total_samples=work, stop_s=stop_s), widths=widths)
        self.cluster.run(seconds_s)

    @rule(seconds_s=st.integers(1, 40))
    def run(self, seconds_s: int) -> None:
        self.cluster.run(seconds_s)

    @precondition(lambda self: self.cluster.state.jobs)
    @rule(pick=st.integers(0, 100))
    def cancel(self, pick: int) -> None:
        jobs = list(self.cluster.state.jobs)
        self.cluster.cancel(jobs[pick % len(jobs)])

    @precondition(lambda self: self.living())
    @rule(pick=st.integers(0, 100), state=st.sampled_from([LauncherState.LOST, LauncherState.FAILED]))
    def end_launcher(self, pick: int, state: LauncherState) -> None:
        living = self.living()
        self.cluster.end_launcher(living[pick % len(living)], state, None)

    @precondition(lambda self: self.cluster.live_owners())
    @rule(pick=st.integers(0, 100))
    def kill_worker(self, pick: int) -> None:
        workers = [
            worker.lease_id
            for launch in self.cluster.launches.values()
            for worker in launch.workers.values()
            if worker.alive
        ]
        self.cluster.kill_worker(workers[pick % len(workers)])

    @rule(node=st.sampled_from(["n1", "n2", "n3"]))
    def toggle_silence(self, node: str) -> None:
        self.cluster.silent ^= {node}

    @rule(node=st.sampled_from(["n1", "n2", "n3"]))
    def repeat_report(self, node: str) -> None:
        self.cluster.report(node)
        self.cluster.report(node)

    def living(self) -> list[str]:
        return [job_id for job_id, launch in self.cluster.launches.items() if launch.living]

    def teardown(self) -> None:
        """Let all nodes speak again: every slot has one owner, and (in order) every job ends."""
        self.cluster.silent.clear()
        assert max(self.cluster.live_owners().values(), default=1) == 1
        if self.chaos:
            return
        for job_id, launch in self.cluster.launches.items():
            # Workers that were killed and that the launcher cannot replace: it gives its verdict.
            if launch.living and not launch.world:
                self.cluster.end_launcher(job_id, LauncherState.LOST, None)
        self.cluster.run(3000, dt_s=2.0, until=lambda: ended(self.cluster))
        jobs = self.cluster.state.jobs
        stuck = {job_id: (job.phase, job.reason) for job_id, job in jobs.items() if job.phase not in ENDED}
        assert not stuck
        assert self.cluster.state.leases == {}
        assert not self.cluster.live_owners()
        for job_id, job in jobs.items():
            if job.phase is JobPhase.FINISHED:
                assert self.cluster.launches[job_id].state is LauncherState.FINISHED


class Chaos(Cluster):
    """The same with a planner that plans anything."""

    chaos = True


TestController = Cluster.TestCase
TestController.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
TestChaos = Chaos.TestCase
TestChaos.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
