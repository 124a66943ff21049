# SPDX-License-Identifier: Apache-2.0
"""Random events in random order: one owner per slot, no illegal width, nothing lost.

Some scripts commit and are suspended, standbys take a while and fail on some GPUs, a second GPU type
makes jobs move, nodes withhold GPUs.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from virtual_node import Script, VirtualCluster, ended

from horowatt.records import LauncherKind, LauncherState
from horowatt_allocator.decisions.problem import Problem, present_choice
from horowatt_allocator.decisions.resizing import avoided_gpus, has_joined, published
from horowatt_allocator.records.cluster import Plan, PlanStatus, Policy, State
from horowatt_allocator.records.jobs import ENDED, Column, JobPhase

POLICY = Policy(
    dwell_s=5.0,
    settle_s=1.0,
    window_s=3.0,
    decide_every_s=10.0,
    max_restarts=50,
    max_wait_s=60.0,
    resize_deadline_s=30.0,
    restart_backoff_s=2.0,
)
MOVES_WITH = 3
BAD = frozenset({"GPU-n1-1", "GPU-n2-0", "GPU-m1-1"})


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


def allowed(before: State, after: State) -> None:
    """Assert what no step may do, whatever was planned."""
    for job_id, job in after.jobs.items():
        was = before.jobs.get(job_id)
        new = [lease for lease in published(job, after.leases) if lease.lease_id not in before.leases]
        if was is None:
            continue
        for lease in new:
            gpu = next(gpu for gpu in after.nodes[lease.node].gpus if gpu.uuid == lease.gpu_uuid)
            assert not gpu.busy, "a GPU was granted that its node withholds"
            assert lease.gpu_uuid not in avoided_gpus(was, lease.granted_s), "a GPU again that failed"
        if (
            was.phase is JobPhase.RUNNING
            and job.phase is JobPhase.RUNNING
            and job.generation > was.generation
        ):
            joined = {lease.lease_id for lease in published(job, after.leases) if has_joined(job, lease)}
            assert joined or not was.generation_applied, "no worker is left that trains"
            assert not new or job.generation_applied == was.generation, "added while a resize is in flight"
        if job.suspension is not None and was.suspension is None:
            assert job.last_commit_s is not None, "suspended without a commit to go on from"
            assert was.spec.launcher is LauncherKind.HOROWATT, "an attached job was suspended"


def greedy(problem: Problem, _limit_s: float) -> Plan:
    """Return a plan within capacity: everybody narrow first, then as wide as still fits.

    Who may be suspended is, while somebody waits too long; with three jobs, who may move does.
    """
    free = dict(problem.gpus)
    chosen: dict[str, Column] = {}
    starving = any(job.must_run and job.present.width == 0 for job in problem.jobs)
    for job, index in zip(problem.jobs, present_choice(problem), strict=True):
        narrowest = job.candidates[index].column
        if job.present.width > 0:
            columns = sorted((c.column for c in job.candidates), key=lambda column: column.width)
            running = [column for column in columns if column.width > 0]
            elsewhere = [
                column
                for column in running
                if column.gpu_type != job.present.gpu_type
                and column.width <= free.get(column.gpu_type or "", 0)
            ]
            moves = len(problem.jobs) == MOVES_WITH and elsewhere
            narrowest = columns[0] if starving else elsewhere[0] if moves else running[0]
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
        self.cluster = VirtualCluster(
            {"n1": 2, "n2": 3, "n3": 1, "m1": 3},
            gpu_types={"m1": "W"},
            policy=POLICY,
            solve=solve,
            check=allowed,
        )

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
        standby_s=st.sampled_from([0.0, 4.0, 45.0]),
        commits=st.booleans(),
        bad=st.sampled_from([frozenset(), BAD]),
    )
    def submit(
        self,
        widths: tuple[int, ...],
        work: float,
        stop_s: float,
        seconds_s: int,
        standby_s: float,
        commits: bool,
        bad: frozenset[str],
    ) -> None:
        if len(self.cluster.state.jobs) < 8:
            script = Script(
                total_samples=work,
                stop_s=stop_s,
                standby_s=standby_s,
                commit_every_s=3.0 if commits else None,
                bad_gpus=bad,
                tells=commits,
            )
            self.cluster.submit(script, widths=widths)
        self.cluster.run(seconds_s)

    @rule(node=st.sampled_from(["n1", "m1"]), busy=st.sampled_from(["", "a foreign process"]))
    def withhold(self, node: str, busy: str) -> None:
        self.cluster.gpus[node][0].busy = busy

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
        for gpus in self.cluster.gpus.values():
            for gpu in gpus:
                gpu.busy = ""
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
