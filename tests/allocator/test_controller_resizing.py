# SPDX-License-Identifier: Apache-2.0
"""Suspension, moves, growth that fails and restarts, in virtual time, decided by the real program."""

from dataclasses import replace
from itertools import pairwise

import pytest
from virtual_node import T0_S, Script, VirtualCluster, ended

from horowatt.records import LauncherState
from horowatt_allocator.decisions import controller
from horowatt_allocator.decisions.capacity import free_slots, withheld
from horowatt_allocator.decisions.resizing import with_failed_gpus
from horowatt_allocator.records.cluster import Objective, Policy, State, Tenant, Tick
from horowatt_allocator.records.jobs import JobPhase

QUICK = Policy(
    dwell_s=10.0,
    settle_s=2.0,
    window_s=5.0,
    decide_every_s=15.0,
    limit_steps=(1.0,),
    objective=Objective.THROUGHPUT,
)
FOREVER = Script(rate_per_s=100, efficiency=0.95)
COMMITS = replace(FOREVER, commit_every_s=5.0)


def codes(cluster: VirtualCluster, job_id: str) -> list[str]:
    """Return the codes of what was told of a job."""
    return [told.reason.code for told in cluster.told if told.job_id == job_id]


def sentences(cluster: VirtualCluster, job_id: str, code: str) -> list[str]:
    """Return what was told of a job under a code."""
    return [t.reason.sentence for t in cluster.told if t.job_id == job_id and t.reason.code == code]


# ------------------------------------------------------------------------------------- suspension


def test_a_job_with_commits_is_suspended_for_a_deadline_and_goes_on() -> None:
    """It commits, stops, waits with the reason and since when, starts again, and counts no restart."""
    cluster = VirtualCluster({"n1": 2}, policy=QUICK)
    first = cluster.submit(replace(COMMITS, total_samples=20_000), widths=(2,), name="first")
    cluster.run(40)
    hasty = cluster.submit(
        replace(FOREVER, total_samples=9000), widths=(2,), name="hasty", deadline_s=cluster.now + 90
    )
    cluster.run(8)
    job = cluster.job(first)
    samples = job.samples
    assert samples is not None
    assert samples > 5000
    assert (job.phase, cluster.job(hasty).width) == (JobPhase.QUEUED, 2)
    assert cluster.launches[first].num_suspended == 1
    (told,) = sentences(cluster, first, "suspended")
    assert (
        told == "suspended on 2 GPUs, to go on from its commit: job 'hasty' needs 2 GPUs to meet its deadline"
    )
    cluster.run(20)
    job = cluster.job(first)
    assert job.reason.code == "suspended"
    assert job.reason.sentence.startswith("suspended ")
    assert " s ago, job 'hasty' needs 2 GPUs to meet its deadline; waits: all 2 GPUs are taken" in (
        job.reason.sentence
    )
    cluster.run(400, until=lambda: ended(cluster))
    job = cluster.job(first)
    assert (job.phase, job.attempt, job.restarts, job.suspension) == (JobPhase.FINISHED, 2, 0, None)
    assert (job.samples or 0) == pytest.approx(20_000, rel=0.02)
    assert job.generations[-1].samples_before == pytest.approx(samples, rel=0.05)
    deadline_s, ended_s = cluster.job(hasty).spec.deadline_s, cluster.job(hasty).ended_s
    assert deadline_s is not None
    assert ended_s is not None
    assert ended_s <= deadline_s


def test_a_job_without_commits_is_never_suspended() -> None:
    """Its state lives in its workers only: whoever needs its GPUs waits, whatever the price."""
    cluster = VirtualCluster({"n1": 2}, policy=replace(QUICK, max_wait_s=30.0))
    first = cluster.submit(FOREVER, widths=(2,))
    cluster.run(40)
    hasty = cluster.submit(FOREVER, widths=(2,), deadline_s=cluster.now + 60)
    cluster.run(100)
    assert (cluster.job(first).attempt, cluster.job(first).width) == (1, 2)
    assert cluster.job(hasty).phase is JobPhase.QUEUED


def test_jobs_that_wait_too_long_take_turns_and_do_not_thrash() -> None:
    """Two jobs on one GPU: each waits at most about ``max_wait_s``, and runs as long as it had waited."""
    cluster = VirtualCluster({"n1": 1}, policy=replace(QUICK, max_wait_s=60.0))
    jobs = [cluster.submit(COMMITS, widths=(1,)) for _ in range(2)]
    cluster.run(600)
    attempts = [cluster.job(job_id).attempt for job_id in jobs]
    assert min(attempts) >= 3
    assert sum(attempts) <= 11
    assert {cluster.job(job_id).restarts for job_id in jobs} == {0}
    trained = [cluster.launches[job_id].trained for job_id in jobs]
    assert min(trained) > 0.35 * sum(trained)
    # The pauses of stopping and starting, and no more, are lost.
    assert sum(trained) > 100 * (600 - 10 * sum(attempts))


def test_what_happens_while_a_job_is_being_suspended() -> None:
    """A script that ended meanwhile has ended; a cancelled job is cancelled; one that hangs is stopped."""

    def suspending() -> tuple[VirtualCluster, str]:
        cluster = VirtualCluster({"n1": 1}, policy=QUICK)
        job_id = cluster.submit(replace(COMMITS, stop_s=30.0), widths=(1,))
        cluster.run(30)
        cluster.submit(FOREVER, widths=(1,), deadline_s=cluster.now + 100)
        for _ in range(20):
            cluster.advance(0.5)
            cluster.step(Tick())
            if cluster.job(job_id).phase is JobPhase.STOPPING:
                return cluster, job_id
            cluster.report("n1")
        raise AssertionError("never suspended")

    def order(cluster: VirtualCluster, now: float) -> tuple[bool, bool]:
        given = controller.orders(cluster.state, "n1", {}, 0, now).jobs[0]
        return given.run, given.suspend

    cluster, job_id = suspending()
    assert order(cluster, cluster.now) == (False, True)
    assert order(cluster, cluster.now + QUICK.resize_deadline_s) == (False, False)
    cluster.end_launcher(job_id, LauncherState.FINISHED, 0)
    cluster.run(3)
    assert (cluster.job(job_id).phase, cluster.job(job_id).exit_code) == (JobPhase.FINISHED, 0)

    cluster, job_id = suspending()
    cluster.end_launcher(job_id, LauncherState.FAILED, 3)
    cluster.run(3)
    assert (cluster.job(job_id).phase, cluster.job(job_id).exit_code) == (JobPhase.FAILED, 3)

    cluster, job_id = suspending()
    cluster.cancel(job_id)
    assert order(cluster, cluster.now) == (False, False)
    cluster.run(40)
    assert (cluster.job(job_id).phase, cluster.job(job_id).suspension) == (JobPhase.CANCELLED, None)


def test_a_cap_that_cannot_be_held_suspends_who_can_be() -> None:
    """Below what the narrowest column draws, jobs with commits stop until the cap leaves room again."""
    cluster = VirtualCluster({"n1": 2}, policy=QUICK)
    job_id = cluster.submit(COMMITS, widths=(1, 2))
    cluster.run(40)
    cluster.state = replace(cluster.state, policy=replace(QUICK, cap_w=150.0))
    cluster.run(40)
    job = cluster.job(job_id)
    assert (job.phase, job.reason.code) == (JobPhase.QUEUED, "suspended")
    assert "the power cap of 150 W binds" in job.reason.sentence
    assert cluster.decisions[-1].power_w <= 150.0
    cluster.state = replace(cluster.state, policy=QUICK)
    cluster.run(60)
    assert (cluster.job(job_id).phase, cluster.job(job_id).attempt) == (JobPhase.RUNNING, 2)


# ------------------------------------------------------------------------------------------ moves


def two_types(check: bool = True, **policy: float) -> VirtualCluster:
    """Return one GPU of type V and four of type W, and check every step of a move."""

    def overlap_is_counted(before: State, after: State) -> None:
        for job_id, job in after.jobs.items():
            types = [
                after.leases[lease_id].gpu_type for lease_id in job.lease_ids if lease_id in after.leases
            ]
            assert len(set(types)) < 2 or job.leaving is not None
            if job.phase is JobPhase.RUNNING and before.jobs[job_id].phase is JobPhase.RUNNING and check:
                assert set(job.lease_ids) & set(before.jobs[job_id].lease_ids), "no old worker is left"

    return VirtualCluster(
        {"n1": 1, "n2": 4},
        gpu_types={"n1": "V", "n2": "W"},
        policy=replace(QUICK, **policy),
        check=overlap_is_counted,
    )


def test_a_job_moves_by_way_of_both_types() -> None:
    """Old and new slots first, the new ones once their workers train, then growth: never without workers."""
    cluster = two_types()
    blocker = cluster.submit(replace(FOREVER, total_samples=25_000), widths=(4,), gpu_types=("W",))
    mover = cluster.submit(replace(FOREVER, standby_s=5.0), widths=(1, 2, 4))
    cluster.run(40)
    assert {cluster.state.leases[lease_id].gpu_type for lease_id in cluster.job(mover).lease_ids} == {"V"}
    cluster.run(300, until=lambda: cluster.job(mover).width == 4 and cluster.job(mover).leaving is None)
    job = cluster.job(mover)
    assert cluster.job(blocker).phase is JobPhase.FINISHED
    assert cluster.widths[mover][:4] == [0, 1, 2, 1]
    assert job.attempt == 1
    assert {cluster.state.leases[lease_id].gpu_type for lease_id in job.lease_ids} == {"W"}
    (told,) = {sentence.partition(":")[0] for sentence in sentences(cluster, mover, "moves")}
    assert told == "moves from 1 V to 4 W"
    assert all(o.width < 2 or o.gpu_type == "W" for o in cluster.state.estimates[mover].observations)


def test_a_move_is_given_up_when_its_new_worker_fails() -> None:
    """The old worker trains on as if nothing had been tried, on the slots and the column that it had."""
    cluster = two_types()
    bad = frozenset(f"GPU-n2-{n}" for n in range(4))
    cluster.submit(replace(FOREVER, total_samples=16_000), widths=(4,), gpu_types=("W",))
    mover = cluster.submit(replace(FOREVER, standby_s=5.0, bad_gpus=bad), widths=(1, 2))
    cluster.run(120, until=lambda: "growth-failed" in codes(cluster, mover))
    job = cluster.job(mover)
    assert codes(cluster, mover)[-2:] == ["moves", "growth-failed"]
    assert (job.width, job.column.gpu_type, job.column.width, job.leaving) == (1, "V", 1, None)
    trained = cluster.launches[mover].trained
    cluster.run(4)
    assert cluster.launches[mover].trained == pytest.approx(trained + 400, abs=101)


def test_where_no_union_is_legal_the_job_is_suspended_and_starts_on_the_new_type() -> None:
    """Width 1 only: two slots at a time are illegal, so the job commits, stops and starts elsewhere."""
    cluster = two_types(check=False)
    mover = cluster.submit(COMMITS, widths=(1,))
    cluster.run(30)
    (lease_id,) = cluster.job(mover).lease_ids
    assert cluster.state.leases[lease_id].gpu_type == "V"
    cluster.submit(FOREVER, widths=(1,), gpu_types=("V",), deadline_s=cluster.now + 100)
    cluster.run(20)
    job = cluster.job(mover)
    assert (job.phase, job.attempt, job.column.gpu_type) == (JobPhase.RUNNING, 2, "W")
    assert codes(cluster, mover)[-2:] == ["suspended", "started"]
    assert "to move to 1 GPU of type W" in sentences(cluster, mover, "suspended")[0]


def test_old_and_new_slots_stay_within_quota_and_cap() -> None:
    """A job that may not hold both at once, and has no commits, stays where it is."""
    for policy, tenants in (
        ({}, {"t": Tenant(name="t", users=("*",), gpu_quota=2), "u": Tenant(name="u", users=("*",))}),
        ({"cap_w": 5 * 40.0 + 2 * 190.0 + 50}, None),
    ):
        cluster = two_types(**policy)
        if tenants is not None:
            cluster.state = replace(cluster.state, tenants=tenants)
        cluster.submit(replace(FOREVER, total_samples=16_000), widths=(4,), gpu_types=("W",), tenant="u")
        held = cluster.submit(FOREVER, widths=(1, 2, 3))
        for _ in range(300):
            cluster.run(1)
            job = cluster.job(held)
            if tenants is not None:
                assert job.width <= 2
            else:
                power_w = sum(gpu.power_w for gpus in cluster.gpus.values() for gpu in gpus)
                assert power_w <= policy["cap_w"] * 1.02


# ------------------------------------------------------------------------------ growth that fails


@pytest.mark.parametrize("tells", [True, False])
def test_a_standby_that_fails_is_withdrawn_and_another_gpu_taken(tells: bool) -> None:
    """The old world trains on without a pause; the GPU is remembered, the job grows again on another."""
    cluster = VirtualCluster({"n1": 4}, policy=QUICK)
    script = replace(FOREVER, standby_s=5.0, bad_gpus=frozenset({"GPU-n1-1"}), tells=tells)
    first = cluster.submit(script, widths=(1, 2))
    cluster.run(60, until=lambda: "growth-failed" in codes(cluster, first))
    job = cluster.job(first)
    assert (job.width, job.column.width, job.generation) == (1, 1, 3)
    (sentence,) = sentences(cluster, first, "growth-failed")
    why = "the script ended with exit code 1" if tells else "it ended with exit code 1 before it joined"
    assert sentence == (
        f"stays on 1 GPU: the new worker on GPU GPU-n1-1 of node 'n1' failed: {why}; "
        "grows again in 5 s at the earliest"
    )
    trained = cluster.launches[first].trained
    cluster.run(5)
    assert cluster.launches[first].trained == pytest.approx(trained + 500, abs=101)
    cluster.run(60)
    job = cluster.job(first)
    assert [cluster.state.leases[lease_id].gpu_uuid for lease_id in job.lease_ids] == ["GPU-n1-0", "GPU-n1-2"]
    assert (job.growth_failures, list(job.failed_gpus), job.attempt) == (0, ["GPU-n1-1"], 1)
    assert withheld(cluster.state, cluster.now) == {}


def test_a_gpu_that_several_jobs_blame_is_given_to_nobody_and_says_why() -> None:
    """Two jobs whose workers failed there are enough; one that fails everywhere blames no GPU."""
    cluster = VirtualCluster({"n1": 3}, policy=QUICK)
    cluster.run(2)
    jobs = [cluster.submit(FOREVER, widths=(1,)) for _ in range(3)]
    cluster.run(1)
    blame = cluster.job(jobs[0])

    def blamed(count_by_job: dict[str, tuple[str, ...]]) -> dict[tuple[str, str], str]:
        changed = {
            job_id: with_failed_gpus(replace(blame, spec=cluster.job(job_id).spec), uuids, cluster.now)
            for job_id, uuids in count_by_job.items()
        }
        state = replace(cluster.state, jobs={**cluster.state.jobs, **changed}, leases={})
        assert len(free_slots(state, cluster.now)) == 3 - len(withheld(state, cluster.now))
        assert withheld(state, cluster.now + 301) == {}
        return withheld(state, cluster.now)

    assert blamed({jobs[0]: ("GPU-n1-0",)}) == {}
    assert blamed({jobs[0]: ("GPU-n1-0",), jobs[1]: ("GPU-n1-0",)}) == {
        ("n1", "GPU-n1-0"): "workers of 2 jobs failed on it; avoided for 5 min"
    }
    everywhere = ("GPU-n1-0", "GPU-n1-1", "GPU-n1-2")
    assert blamed({jobs[0]: ("GPU-n1-0",), jobs[1]: everywhere}) == {}


def test_new_workers_that_never_join_are_withdrawn_and_tried_ever_less_often() -> None:
    """After the deadline the grant is taken back and said, and the waits between tries double."""
    cluster = VirtualCluster({"n1": 2}, policy=replace(QUICK, resize_deadline_s=20.0, restart_backoff_s=40.0))
    job_id = cluster.submit(replace(FOREVER, standby_s=1e9), widths=(1, 2))
    cluster.run(400)
    told = [t.at_s for t in cluster.told if t.job_id == job_id and t.reason.code == "growth-failed"]
    gaps = [round(after - before) for before, after in pairwise(told)]
    assert len(gaps) >= 2
    assert all(20 + 40 * 2**n <= gap <= 40 + 40 * 2**n for n, gap in enumerate(gaps))
    assert "new workers did not join within 20 s" in sentences(cluster, job_id, "growth-failed")[0]
    # All the while the old worker trained.
    assert cluster.launches[job_id].trained == pytest.approx(100 * (400 - 5), abs=300)
    assert cluster.job(job_id).attempt == 1


def test_a_grant_that_nobody_joined_yet_is_taken_back_at_once_when_others_need_it() -> None:
    """Within the dwell time and before the resize is through, and without a pause of the old world."""
    cluster = VirtualCluster({"n1": 2}, policy=replace(QUICK, dwell_s=60.0))
    growing = cluster.submit(replace(FOREVER, standby_s=100.0), widths=(1, 2))
    cluster.run(60, until=lambda: cluster.job(growing).width == 2)
    assert cluster.job(growing).width == 2
    cluster.run(3)
    hasty = cluster.submit(FOREVER, widths=(1,), deadline_s=cluster.now + 300)
    cluster.run(6)
    assert cluster.widths[growing] == [0, 1, 2, 1]
    assert cluster.job(hasty).width == 1
    assert all(generation.pause_s is None for generation in cluster.job(growing).generations)


def test_growth_that_comes_faster_than_a_resize_is_put_together() -> None:
    """While new workers warm up no more are added; then one growth takes all there is to take."""
    added: list[tuple[float, int]] = []

    def never_while_in_flight(before: State, after: State) -> None:
        for job_id, job in before.jobs.items():
            grown = set(after.jobs[job_id].lease_ids) - set(job.lease_ids)
            if grown and job.phase is JobPhase.RUNNING:
                assert after.jobs[job_id].generation_applied == job.generation
                added.append((after.jobs[job_id].changed_s, len(grown)))

    policy = replace(QUICK, dwell_s=0.0)
    cluster = VirtualCluster({"n1": 4}, policy=policy, check=never_while_in_flight)
    cluster.submit(replace(FOREVER, standby_s=7.0), widths=(1, 2, 3, 4))
    for _ in range(3):
        cluster.submit(replace(FOREVER, total_samples=1500), widths=(1,))
    cluster.run(120)
    assert [count for _, count in added][-1] >= 1
    assert sum(count for _, count in added) == 3


# ----------------------------------------------------------------------------------------- restarts


def test_restarts_are_counted_within_a_window_and_wait_ever_longer() -> None:
    """Losses long ago are forgiven; recent ones double the wait, which is said with its reason."""
    policy = replace(QUICK, max_restarts=2, restart_window_s=600.0, restart_backoff_s=10.0)
    cluster = VirtualCluster({"n1": 1}, policy=policy)
    job_id = cluster.submit(FOREVER, widths=(1,))
    waits = []
    for _ in range(2):
        cluster.run(30)
        cluster.end_launcher(job_id, LauncherState.LOST, None)
        lost_s = cluster.now
        cluster.run(5)
        assert cluster.job(job_id).phase is JobPhase.QUEUED
        assert lost_s < controller.next_due(cluster.state, cluster.now) <= cluster.job(job_id).not_before_s
        cluster.run(60, until=lambda: cluster.job(job_id).phase is JobPhase.RUNNING)
        waits.append(round(cluster.now - lost_s))
    assert 10 <= waits[0] <= 13
    assert 20 <= waits[1] <= 23
    said = sentences(cluster, job_id, "restart-backoff")
    assert said[0].startswith("waits ")
    assert said[1].endswith(" s before start 3: lost twice in the last 600 s; position 1")
    cluster.run(700)
    cluster.end_launcher(job_id, LauncherState.LOST, None)
    cluster.run(30)
    assert (cluster.job(job_id).phase, cluster.job(job_id).restarts) == (JobPhase.RUNNING, 3)
    for _ in range(2):
        cluster.end_launcher(job_id, LauncherState.LOST, None)
        cluster.run(30)
    assert cluster.job(job_id).reason.code == "lost-too-often"
    assert cluster.job(job_id).reason.sentence.startswith("lost 3 times in the last 600 s, last: ")


@pytest.mark.parametrize("shared", [False, True])
def test_a_restart_prefers_the_node_with_its_commits(shared: bool) -> None:
    """The commits lie on the node where the launcher was, unless the job's folder for them is shared."""
    cluster = VirtualCluster({"n1": 2, "n2": 2}, policy=QUICK)
    blocker = cluster.submit(FOREVER, widths=(2,))
    environment = {"HOROWATT_COMMIT_DIR": "/shared/commits"} if shared else {}
    job_id = cluster.submit(COMMITS, widths=(1,), environment=environment)
    cluster.run(10)
    assert cluster.job(job_id).home_node == "n2"
    cluster.cancel(blocker)
    cluster.run(5)
    cluster.end_launcher(job_id, LauncherState.LOST, None)
    cluster.run(20)
    assert cluster.job(job_id).attempt == 2
    assert cluster.job(job_id).home_node == ("n1" if shared else "n2")


# ------------------------------------------------------------------------------- slots not granted


def test_a_busy_gpu_is_not_granted_and_the_job_says_why() -> None:
    """A foreign process on a GPU keeps jobs from it; once it is gone the job starts at once."""
    cluster = VirtualCluster({"n1": 1}, policy=QUICK)
    cluster.gpus["n1"][0].busy = "process 4242 of another user uses it"
    job_id = cluster.submit(FOREVER, widths=(1,))
    cluster.run(80)
    job = cluster.job(job_id)
    assert (job.phase, job.reason.code) == (JobPhase.QUEUED, "no-gpus")
    assert "(GPU GPU-n1-0 of node 'n1': process 4242 of another user uses it)" in job.reason.sentence
    cluster.gpus["n1"][0].busy = ""
    cluster.run(3)
    assert cluster.job(job_id).phase is JobPhase.RUNNING
    assert cluster.now < T0_S + 90
