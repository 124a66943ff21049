# SPDX-License-Identifier: Apache-2.0
"""The controller in virtual time: whole lives of jobs on simulated nodes, decided by the real program."""

from dataclasses import replace

import pytest
from specimens import spec
from virtual_node import T0_S, Script, VirtualCluster, ended

from horowatt.records import LauncherKind, LauncherState, StreamChunk
from horowatt_allocator.decisions import controller, program
from horowatt_allocator.decisions.ledger import summarize
from horowatt_allocator.decisions.problem import Problem
from horowatt_allocator.records.cluster import AgentReported, JobSubmitted, Plan, Policy, State, Tick
from horowatt_allocator.records.jobs import JobPhase

QUICK = Policy(dwell_s=10.0, settle_s=2.0, window_s=5.0, decide_every_s=15.0)
NESTED = '{"kind": "resumed", "x": ' + "[" * 20_000
FOREVER = Script(rate_per_s=100, efficiency=0.95)


def total_energy_adds_up(cluster: VirtualCluster) -> None:
    """Assert rule 2 on what the nodes booked."""
    report = summarize("virtual", cluster.intervals, cluster.state.jobs, T0_S - 1, cluster.now, cluster.now)
    assert report.sum_error is not None
    assert report.sum_error < 0.001
    counters = sum(gpu.energy_j for gpus in cluster.gpus.values() for gpu in gpus)
    assert report.total.energy_j == pytest.approx(counters, rel=1e-9)


def test_three_tenants_on_four_gpus() -> None:
    """One job scales, one is bound by communication, one comes later with a deadline: each gets its due.

    The bound job gives back the GPU that brought too little, the late one gets what its deadline
    needs, the scaling one grows when others end, all finish, and the energy adds up.
    """
    cluster = VirtualCluster({"n1": 4}, policy=QUICK)
    scales = cluster.submit(Script(rate_per_s=1000, efficiency=0.96, total_samples=500_000), name="scales")
    bound = cluster.submit(Script(rate_per_s=1000, efficiency=0.55, total_samples=150_000), name="bound")
    cluster.run(80)
    assert cluster.widths[bound] == [0, 1, 2, 1]
    assert cluster.widths[scales] == [0, 1, 2]
    hasty = Script(rate_per_s=500, efficiency=0.95, total_samples=55_000)
    late = cluster.submit(hasty, name="late", deadline_s=cluster.now + 75)
    cluster.run(25)
    assert cluster.job(late).width == 2
    assert cluster.job(scales).width == 1
    assert "'late'" in cluster.job(scales).reason.sentence
    cluster.run(400, until=lambda: ended(cluster))
    jobs = {name: cluster.job(name) for name in (scales, bound, late)}
    assert {job.phase for job in jobs.values()} == {JobPhase.FINISHED}
    assert {job.exit_code for job in jobs.values()} == {0}
    deadline_s, ended_s = jobs[late].spec.deadline_s, jobs[late].ended_s
    assert deadline_s is not None
    assert ended_s is not None
    assert ended_s <= deadline_s
    assert cluster.widths[scales][-2] == 4
    assert cluster.state.leases == {}
    total_energy_adds_up(cluster)


def test_a_resize_is_two_moves() -> None:
    """The slots of a job that shrinks are leased anew only after its node said that its workers are gone."""
    cluster = VirtualCluster({"n1": 2}, policy=QUICK)
    first = cluster.submit(replace(FOREVER, stop_s=6.0), widths=(1, 2))
    cluster.run(30)
    assert cluster.job(first).width == 2
    second = cluster.submit(FOREVER, widths=(1,))
    cluster.run(4)
    withdrawn = [lease for lease in cluster.state.leases.values() if lease.withdrawn_s is not None]
    assert (cluster.job(first).width, cluster.job(second).width, len(withdrawn)) == (1, 0, 1)
    assert cluster.job(second).column.width == 1
    cluster.run(5)
    assert cluster.job(second).width == 1
    assert max(cluster.live_owners().values()) == 1


def test_measured_figures_are_the_true_ones() -> None:
    """Rate, power, pause and samples as the head has them are those of the script."""
    script = Script(rate_per_s=1000, efficiency=0.9, pause_s=4.0)
    cluster = VirtualCluster({"n1": 2}, policy=replace(QUICK, limit_steps=(1.0,)))
    job_id = cluster.submit(script, widths=(1, 2))
    cluster.run(60)
    job = cluster.job(job_id)
    assert job.width == 2
    assert job.rate_per_s == pytest.approx(script.rate(2, 300.0), rel=0.01)
    assert job.power_w == pytest.approx(2 * script.draw_w, rel=0.01)
    assert job.step_s == pytest.approx(0.1, rel=0.01)
    assert job.generations[1].pause_s == pytest.approx(4.0 - 0.1, abs=0.01)
    assert cluster.state.estimates[job_id].pauses_s == (job.generations[1].pause_s,)
    assert job.samples == pytest.approx(cluster.launches[job_id].trained, rel=0.001)
    assert sum(generation.samples or 0 for generation in job.generations) == job.samples
    assert job.epoch_samples == 50_000


def test_noise_does_not_make_jobs_flap() -> None:
    """Rates that move by 5 % resize nobody once every width is known."""
    cluster = VirtualCluster({"n1": 4}, policy=QUICK)
    jobs = [cluster.submit(Script(rate_per_s=1000, efficiency=0.9, wobble=0.05)) for _ in range(2)]
    cluster.run(120)
    before = {job_id: cluster.job(job_id).generation for job_id in jobs}
    cluster.run(600)
    assert {job_id: cluster.job(job_id).generation for job_id in jobs} == before


def test_a_failed_script_fails_the_job_with_its_reason() -> None:
    """The launcher's verdict and the exit code reach the job, and its slots are free again."""
    cluster = VirtualCluster({"n1": 2}, policy=QUICK)
    job_id = cluster.submit(FOREVER)
    cluster.run(10)
    cluster.launches[job_id].message = "ModuleNotFoundError: no module named 'nope'"
    cluster.end_launcher(job_id, LauncherState.FAILED, 3)
    cluster.run(5)
    job = cluster.job(job_id)
    assert (job.phase, job.exit_code, job.reason.code) == (JobPhase.FAILED, 3, "failed")
    assert "nope" in job.reason.sentence
    assert cluster.state.leases == {}


def test_a_lost_job_starts_again_until_it_was_lost_too_often() -> None:
    """Nothing submitted is lost: a job whose launcher died starts again, a stated number of times."""
    cluster = VirtualCluster({"n1": 2}, policy=replace(QUICK, max_restarts=2))
    job_id = cluster.submit(FOREVER)
    for attempt in (1, 2, 3):
        cluster.run(12)
        job = cluster.job(job_id)
        assert (job.phase, job.attempt, job.restarts) == (JobPhase.RUNNING, attempt, attempt - 1)
        samples = job.samples or 0
        cluster.end_launcher(job_id, LauncherState.LOST, None)
    cluster.run(12)
    job = cluster.job(job_id)
    assert (job.phase, job.reason.code) == (JobPhase.FAILED, "lost-too-often")
    assert (job.samples or 0) >= samples > 0
    lease_ids = {worker for launch in cluster.launches.values() for worker in launch.workers}
    assert len(lease_ids) == cluster.state.next_lease - 1


def test_an_attached_job_whose_horovodrun_is_gone_fails() -> None:
    """Nobody but its user can start a user's own horovodrun again."""
    cluster = VirtualCluster({"n1": 1}, policy=QUICK)
    job_id = cluster.submit(FOREVER, widths=(1,), launcher=LauncherKind.ATTACHED)
    cluster.run(10)
    cluster.end_launcher(job_id, LauncherState.LOST, None)
    cluster.run(5)
    assert cluster.job(job_id).reason.code == "launcher-gone"
    assert cluster.job(job_id).phase is JobPhase.FAILED


def test_cancelling_ends_a_job_in_every_phase_and_only_once() -> None:
    """Queued jobs end at once, running ones when their slots are free, ended ones not again."""
    cluster = VirtualCluster({"n1": 1}, policy=QUICK)
    running, queued = cluster.submit(FOREVER, widths=(1,)), cluster.submit(FOREVER, widths=(1,))
    cluster.run(10)
    cluster.cancel(queued)
    assert cluster.job(queued).phase is JobPhase.CANCELLED
    cluster.cancel(running)
    assert cluster.job(running).phase is JobPhase.STOPPING
    told = len(cluster.told)
    cluster.cancel(running)
    cluster.cancel("unknown")
    assert len(cluster.told) == told
    cluster.run(5)
    job = cluster.job(running)
    assert (job.phase, job.reason.sentence) == (JobPhase.CANCELLED, "cancelled by ada")
    cluster.cancel(running)
    assert cluster.job(running) == job


def test_cancelling_a_job_that_would_start_again_cancels_it() -> None:
    """A lost job that is cancelled while its slots are cleared does not come back."""
    cluster = VirtualCluster({"n1": 1}, policy=QUICK)
    job_id = cluster.submit(FOREVER, widths=(1,))
    cluster.run(10)
    cluster.end_launcher(job_id, LauncherState.LOST, None)
    for worker in cluster.launches[job_id].workers.values():
        worker.alive = True
    cluster.run(1)
    assert cluster.job(job_id).ending is JobPhase.QUEUED
    cluster.cancel(job_id)
    cluster.run(10)
    assert cluster.job(job_id).phase is JobPhase.CANCELLED


def test_the_wall_time_limit_ends_a_job() -> None:
    """A job that runs longer than its submitter allowed is stopped and fails with that reason."""
    cluster = VirtualCluster({"n1": 1}, policy=QUICK)
    job_id = cluster.submit(FOREVER, widths=(1,), wall_time_limit_s=20.0)
    cluster.run(15)
    started_s = cluster.job(job_id).started_s
    assert started_s is not None
    assert controller.next_due(cluster.state, cluster.now) <= started_s + 20
    cluster.run(15)
    assert (cluster.job(job_id).phase, cluster.job(job_id).reason.code) == (JobPhase.FAILED, "wall-time")


def test_a_job_goes_on_without_a_dead_worker() -> None:
    """After a grace a generation without the dead worker is published, at a legal width."""
    cluster = VirtualCluster({"n1": 4}, policy=QUICK)
    job_id = cluster.submit(FOREVER, widths=(1, 2, 4))
    cluster.run(60)
    victim = cluster.job(job_id).lease_ids[1]
    cluster.kill_worker(victim)
    cluster.run(controller.DEAD_GRACE_S - 2)
    assert victim in cluster.job(job_id).lease_ids
    cluster.run(4)
    assert victim not in cluster.job(job_id).lease_ids
    assert cluster.job(job_id).width == 2
    assert [told.reason.code for told in cluster.told].count("worker-died") == 1
    cluster.run(60)
    assert cluster.job(job_id).width == 4


def test_a_silent_node_keeps_its_jobs_and_gives_no_slots() -> None:
    """Silence is not death: the job stays as it is, says so, and nobody is put on that node."""
    cluster = VirtualCluster({"n1": 2, "n2": 1}, policy=QUICK)
    job_id = cluster.submit(FOREVER, widths=(1,))
    cluster.run(10)
    cluster.silent |= {"n1", "n2"}
    waiting = cluster.submit(FOREVER, widths=(1,), gpu_types=())
    cluster.run(60)
    assert cluster.job(job_id).phase is JobPhase.RUNNING
    assert cluster.job(job_id).reason.code == "silent-node"
    placed = [lease for lease in cluster.state.leases.values() if lease.granted_s > T0_S + 45]
    assert placed == []
    cluster.silent.clear()
    cluster.run(10)
    assert cluster.job(job_id).reason.code == "running"
    assert cluster.job(waiting).width == 1


def test_no_slot_of_a_silent_node_is_planned_with() -> None:
    """A job that comes while a node is silent waits and says how many GPUs can be reached."""
    cluster = VirtualCluster({"n1": 2}, policy=QUICK)
    cluster.run(3)
    cluster.silent.add("n1")
    cluster.run(40)
    job_id = cluster.submit(FOREVER, widths=(2,))
    cluster.run(5)
    job = cluster.job(job_id)
    assert (job.phase, job.column.width, job.reason.code) == (JobPhase.QUEUED, 0, "no-gpus")
    assert job.reason.sentence == "waits: needs 2 GPUs, 0 can be reached; position 1"


def test_repeated_and_stale_reports_change_nothing() -> None:
    """Reports are levels: a second copy, or one from before, leaves the jobs as they are."""
    cluster = VirtualCluster({"n1": 2}, policy=QUICK)
    cluster.submit(FOREVER)
    cluster.run(10)
    old = cluster.make_report("n1")
    cluster.run(20)
    latest = cluster.make_report("n1")
    cluster.step(AgentReported(report=latest))
    before = cluster.state
    for report in (latest, old, replace(latest, node="unknown"), latest):
        cluster.step(AgentReported(report=report))
        assert cluster.state.jobs == before.jobs
        assert cluster.state.leases == before.leases
        assert cluster.state.estimates == before.estimates
    cluster.step(Tick())
    assert cluster.state is before or cluster.state == before


def test_a_repeated_submission_changes_nothing() -> None:
    """The same job handed in twice is one job."""
    state = VirtualCluster({"n1": 1}).state
    event = JobSubmitted(spec=spec())
    once, _ = controller.step(state, event, T0_S)
    twice, actions = controller.step(once, event, T0_S + 0.1)
    assert twice is once
    assert actions == ()


def test_what_comes_together_is_decided_together() -> None:
    """Twenty submissions within a second are at most two decisions."""
    cluster = VirtualCluster({"n1": 4}, policy=QUICK)
    cluster.run(5)
    before = len(cluster.decisions)
    for _ in range(20):
        cluster.submit(FOREVER, widths=(1,))
        cluster.now += 0.01
    assert len(cluster.decisions) - before == 1
    assert cluster.state.needs_decision
    assert controller.next_due(cluster.state, cluster.now) == pytest.approx(
        cluster.decisions[-1].at_s + controller.COALESCE_S
    )
    cluster.run(1)
    assert len(cluster.decisions) - before == 2
    assert sum(job.phase is JobPhase.RUNNING for job in cluster.state.jobs.values()) == 4


def test_the_queue_is_honest() -> None:
    """Who waits is told why and in which position, in the order of submission."""
    cluster = VirtualCluster({"n1": 1}, policy=QUICK)
    jobs = [cluster.submit(FOREVER, widths=(1,)) for _ in range(3)]
    cluster.run(10)
    assert [cluster.job(job_id).phase.value for job_id in jobs] == ["running", "queued", "queued"]
    assert cluster.job(jobs[2]).reason.sentence == "waits: the only GPU is taken; position 2"


def test_samples_that_cannot_be_counted_leave_the_rate_unmeasured() -> None:
    """Such a job has no rate, keeps the assumed columns, and says so; it is not measured as zero."""
    cluster = VirtualCluster({"n1": 4}, policy=QUICK)
    job_id = cluster.submit(replace(FOREVER, countable=False))
    cluster.run(60)
    job = cluster.job(job_id)
    assert (job.samples, job.rate_per_s) == (None, None)
    assert job_id not in cluster.state.estimates or not cluster.state.estimates[job_id].observations
    assert job.width == 4
    assert "cannot be counted" in job.reason.sentence


def test_one_tenant_is_not_told_about_anothers_jobs() -> None:
    """Why a job shrank names another user's job to nobody else."""
    cluster = VirtualCluster({"n1": 2}, policy=QUICK)
    first = cluster.submit(FOREVER, widths=(1, 2))
    cluster.run(40)
    cluster.submit(FOREVER, widths=(1,), name="secret", uid=2000)
    cluster.run(10)
    assert cluster.job(first).reason.code == "shrank"
    assert "secret" not in cluster.job(first).reason.sentence
    assert "another user's job" in cluster.job(first).reason.sentence


def test_events_may_be_cut_anywhere() -> None:
    """A pause is measured although the line that tells it arrives in two reports, one of them twice."""
    cluster = VirtualCluster({"n1": 1}, policy=QUICK)
    job_id = cluster.submit(FOREVER, widths=(1,))
    cluster.run(10)
    report = cluster.make_report("n1")
    offset = cluster.job(job_id).events["n1"].next_offset
    first_s = cluster.now + 3
    text = (
        f'{{"kind": "resumed", "world_size": 1, "last_step_end_s": {first_s - 2.5}, "lease_id": "é", '
        f'"first_step_end_s": {first_s}}}\nnot json\n[]\n{NESTED}\n'
    )
    head, tail = text[:70], text[70:]
    middle = offset + len(head.encode())
    end = middle + len(tail.encode())

    def chunk(at: int, after: int, piece: str) -> None:
        streams = (StreamChunk(stream="events", offset=at, next_offset=after, text=piece),)
        jobs = tuple(replace(job, streams=streams) for job in report.jobs)
        cluster.step(AgentReported(report=replace(report, jobs=jobs)))

    generation = cluster.job(job_id).generations[-1]
    cleared = replace(generation, resumed_s=None, stopped_s=None, pause_s=None)
    job = replace(cluster.job(job_id), generations=(cleared,), resizes=())
    cluster.state = replace(cluster.state, jobs={job_id: job})
    chunk(offset, middle, head)
    assert cluster.job(job_id).generations[-1].resumed_s is None
    chunk(offset, middle, head)
    chunk(offset, end, text)
    chunk(middle, end, tail)
    pause_s = cluster.job(job_id).generations[-1].pause_s
    assert pause_s == pytest.approx(2.5 - (job.step_s or 0))


def test_orders_follow_from_the_state() -> None:
    """Leases, launcher, attempt, limits and offsets as the state has them; forgotten once drained."""
    cluster = VirtualCluster({"n1": 1, "n2": 1}, policy=QUICK)
    job_id = cluster.submit(replace(FOREVER, total_samples=3000), widths=(2,))
    cluster.run(10)
    held = {job_id: {"events": 17}}
    both = {node: controller.orders(cluster.state, node, held, 5, cluster.now) for node in ("n1", "n2")}
    orders = {node: both[node].jobs[0] for node in both}
    assert sum(order.launcher_here for order in orders.values()) == 1
    assert orders["n1"].slots == orders["n2"].slots
    assert {lease.address for lease in orders["n1"].slots.leases} == {"n1.test", "n2.test"}
    assert (both["n1"].acked_seq, orders["n1"].attempt, orders["n1"].run) == (5, 1, True)
    assert orders["n1"].streams == {"events": 17}
    assert both["n1"].limits_w == {"GPU-n1-0": cluster.job(job_id).column.limit_w}
    assert (orders["n1"].spec.min_width, orders["n1"].spec.max_width) == (2, 2)
    cluster.run(60, until=lambda: ended(cluster))
    assert controller.orders(cluster.state, "n1", {}, 0, cluster.now).limits_w == {}
    cluster.run(5)
    assert cluster.held == {"n1": {}, "n2": {}}
    assert controller.orders(cluster.state, "n1", {}, 0, cluster.now).jobs == ()
    assert controller.orders(cluster.state, "nowhere", {}, 3, cluster.now).jobs == ()


def test_columns_that_were_not_offered_are_not_taken() -> None:
    """A solver that invents columns, or forgets jobs, changes nothing."""

    def inventive(problem: Problem, limit_s: float) -> Plan:
        plan = program.solve(problem, limit_s)
        wild = {job_id: replace(column, width=64) for job_id, column in plan.columns.items()}
        return replace(plan, columns=dict(list(wild.items())[:1]))

    cluster = VirtualCluster({"n1": 4}, policy=QUICK, solve=inventive)
    jobs = [cluster.submit(FOREVER) for _ in range(2)]
    cluster.run(20)
    assert [cluster.job(job_id).phase for job_id in jobs] == [JobPhase.QUEUED, JobPhase.QUEUED]


def test_idle_power_is_learnt_from_free_gpus_only() -> None:
    """The idle power of a GPU is the lowest seen while nobody held it."""
    cluster = VirtualCluster({"n1": 1}, policy=QUICK)
    cluster.gpus["n1"][0].power_w = 55.0
    cluster.report("n1")
    assert cluster.state.nodes["n1"].gpus[0].idle_w == 55.0
    cluster.run(2)
    assert cluster.state.nodes["n1"].gpus[0].idle_w == 40.0
    cluster.submit(FOREVER, widths=(1,))
    cluster.run(20)
    gpu = cluster.state.nodes["n1"].gpus[0]
    assert gpu.power_w is not None
    assert gpu.power_w > 100
    assert gpu.idle_w == 40.0


def test_a_lost_gpu_is_left_and_not_used() -> None:
    """A GPU that fell off the bus is no slot; its job goes on elsewhere."""
    cluster = VirtualCluster({"n1": 3}, policy=QUICK)
    job_id = cluster.submit(FOREVER, widths=(1, 2))
    cluster.run(40)
    lost = cluster.state.leases[cluster.job(job_id).lease_ids[1]]
    next(gpu for gpu in cluster.gpus["n1"] if gpu.uuid == lost.gpu_uuid).lost = True
    cluster.kill_worker(lost.lease_id)
    cluster.run(60)
    held = {cluster.state.leases[lease_id].gpu_uuid for lease_id in cluster.job(job_id).lease_ids}
    assert len(held) == 2
    assert lost.gpu_uuid not in held


def test_a_cap_below_idle_stops_nobody_and_is_reported() -> None:
    """Trap: a cap that cannot be held starves waiting jobs, not running ones, and is said."""
    cluster = VirtualCluster({"n1": 2}, policy=QUICK)
    job_id = cluster.submit(FOREVER, widths=(1, 2))
    cluster.run(40)
    cluster.state = replace(cluster.state, policy=replace(QUICK, cap_w=60.0))
    cluster.run(40)
    assert cluster.job(job_id).width == 1
    assert cluster.job(job_id).column.limit_w == 180.0
    assert cluster.decisions[-1].violations["power cap"] > 0
    waiting = cluster.submit(FOREVER, widths=(1,))
    cluster.run(10)
    assert cluster.job(waiting).reason.code == "power-cap"


def test_two_owners_or_an_illegal_width_are_noticed() -> None:
    """The invariants can fail."""
    cluster = VirtualCluster({"n1": 4}, policy=QUICK)
    job_id = cluster.submit(FOREVER, widths=(2, 4))
    cluster.run(10)
    job, (lease_id, lease) = cluster.job(job_id), next(iter(cluster.state.leases.items()))
    twin = {**cluster.state.leases, "l00000000": replace(lease, lease_id="l00000000")}
    narrow = {job_id: replace(job, lease_ids=(lease_id,))}
    broken: list[tuple[State, str]] = [
        (replace(cluster.state, leases=twin), "two owners"),
        (replace(cluster.state, jobs=narrow), "illegal width"),
        (replace(cluster.state, leases={}), "do not exist"),
        (replace(cluster.state, next_lease=1), "counter"),
    ]
    for state, words in broken:
        with pytest.raises(AssertionError, match=words):
            controller.check_invariants(state)


def test_a_slot_whose_worker_may_still_be_started_is_not_given_away() -> None:
    """While the launcher of a cancelled job lives it may start workers, so no slot of it is free."""
    cluster = VirtualCluster({"n1": 1}, policy=QUICK)
    job_id = cluster.submit(FOREVER, widths=(1,))
    cluster.run(3)
    report = cluster.make_report("n1")
    idle = replace(report.jobs[0].leases[0], held=False, started=False)
    launcher = report.jobs[0].launcher
    assert launcher is not None
    cluster.cancel(job_id)

    def say(state: LauncherState) -> int:
        jobs = (replace(report.jobs[0], leases=(idle,), launcher=replace(launcher, state=state)),)
        cluster.step(AgentReported(report=replace(report, jobs=jobs)))
        return len(cluster.state.leases)

    assert say(LauncherState.STARTING) == 1
    assert say(LauncherState.STOPPED) == 0


def test_a_withdrawn_slot_waits_for_the_launcher_to_know() -> None:
    """A worker that was never seen may be about to start until the launcher applied the newer slots."""
    cluster = VirtualCluster({"n1": 2}, policy=QUICK)
    job_id = cluster.submit(FOREVER, widths=(1, 2))
    cluster.run(30)
    assert cluster.job(job_id).width == 2
    newest = cluster.job(job_id).lease_ids[-1]
    unseen = {**cluster.state.leases, newest: replace(cluster.state.leases[newest], started=False)}
    cluster.state = replace(cluster.state, leases=unseen)
    cluster.submit(FOREVER, widths=(1,))
    cluster.step(Tick())
    job = cluster.job(job_id)
    assert (job.width, newest in cluster.state.leases) == (1, True)
    report = cluster.make_report("n1")
    ours = next(entry for entry in report.jobs if entry.job_id == job_id)
    launcher = ours.launcher
    assert launcher is not None
    leases = tuple(
        replace(entry, held=False, started=False) if entry.lease_id == newest else entry
        for entry in ours.leases
    )

    def say(published: int, applied: int) -> bool:
        told = replace(
            ours,
            generation_published=published,
            launcher=replace(launcher, generation_applied=applied),
            leases=leases,
        )
        cluster.step(AgentReported(report=replace(report, jobs=(told,))))
        return newest in cluster.state.leases

    assert say(job.generation, job.generation - 1)
    assert say(job.generation - 1, job.generation)
    assert not say(job.generation, job.generation)


def test_a_pause_is_not_taken_for_a_slow_step() -> None:
    """The first step of a new world ends after the pause; it says nothing of how long steps take."""
    cluster = VirtualCluster({"n1": 1}, policy=QUICK)
    job_id = cluster.submit(FOREVER, widths=(1,))
    cluster.run(20)
    step_s = cluster.job(job_id).step_s
    report = cluster.make_report("n1")
    lease = report.jobs[0].leases[0]
    assert lease.last_step_end_s is not None
    waiting = replace(lease, first_step_end_s=None)
    resumed_s = lease.last_step_end_s + 9.0
    stepped = replace(waiting, steps=lease.steps + 1, first_step_end_s=resumed_s, last_step_end_s=resumed_s)
    for seen in (lease, waiting, stepped):
        jobs = (replace(report.jobs[0], leases=(seen,)),)
        cluster.step(
            AgentReported(report=replace(report, jobs=jobs, sent_at_s=report.sent_at_s + seen.steps))
        )
    assert cluster.job(job_id).step_s == step_s
