# SPDX-License-Identifier: Apache-2.0
"""Columns: what a job may be given, and never an illegal width."""

from dataclasses import replace

import pytest
from specimens import NOW_S, gpu, job, lease, node, state

from horowatt.records import LauncherKind
from horowatt_allocator.decisions.capacity import free_slots, gpu_types, limit_steps_w
from horowatt_allocator.decisions.columns import columns_for, fair_rate_per_s
from horowatt_allocator.decisions.estimates import Predictor
from horowatt_allocator.decisions.resizing import with_failed_gpus
from horowatt_allocator.records.cluster import Policy, State, Tenant
from horowatt_allocator.records.jobs import WAITING, Generation, Job, JobEstimate, JobPhase, Observation

SEEN = Observation(
    gpu_type="V", width=2, limit_w=300.0, rate_per_s=190.0, power_w=400.0, seconds_s=60.0, at_s=NOW_S - 20
)


def shapes(one: Job, where: State, now: float = NOW_S) -> set[tuple[str | None, int]]:
    """Return (type, width) of what a job is offered."""
    return {(column.gpu_type, column.width) for column in columns_for(one, where, now)}


def running(width: int, *, changed_s: float = 0.0, trained: bool = True, target: int | None = None) -> Job:
    """Return a running job of that width on node n1."""
    one = job(widths=(1, 2, 4))
    predictor = Predictor(one, JobEstimate(), gpu(), Policy())
    return replace(
        one,
        phase=JobPhase.RUNNING,
        column=predictor.column(target or width, 300.0),
        generation=1,
        lease_ids=tuple(f"l{n}" for n in range(width)),
        home_node="n1",
        attempt=1,
        samples=0,
        changed_s=changed_s,
        generations=(
            Generation(
                number=1,
                width=width,
                gpu_type="V",
                limit_w=300.0,
                published_s=NOW_S - 100,
                first_step_end_s=NOW_S - 90 if trained else None,
            ),
        ),
    )


def cluster(one: Job, num_gpus: int = 4, **fields: object) -> State:
    """Return node n1 of type V and n2 of type A, with the job's leases on n1."""
    leases = {lease_id: lease(lease_id, "j0", "n1", n) for n, lease_id in enumerate(one.lease_ids)}
    return state(node("n1", num_gpus), node("n2", 8, "A"), jobs=(one,), leases=leases, **fields)


def test_a_queued_job_may_wait_or_start_at_what_exists() -> None:
    """Waiting, and every legal width on every type that has as many GPUs."""
    one = job(widths=(2, 4, 8, 16))
    assert shapes(one, cluster(one)) == {(None, 0), ("V", 2), ("V", 4), ("A", 2), ("A", 4), ("A", 8)}


def test_types_and_quota_limit_a_queued_job() -> None:
    """Only accepted types, and no width above the tenant's quota."""
    one = job(widths=(1, 2, 4), gpu_types=("A",))
    tenants = {"t": Tenant(name="t", users=("*",), gpu_quota=2)}
    assert shapes(one, cluster(one, tenants=tenants)) == {(None, 0), ("A", 1), ("A", 2)}


def test_a_running_job_is_suspended_or_moved_only_where_its_state_survives() -> None:
    """Waiting needs a durable commit; another type a commit, or old workers beside the new ones."""
    here = {("V", 1), ("V", 2), ("V", 4)}
    one = running(2)
    assert shapes(one, cluster(one)) == here
    measured = {"j0": JobEstimate(observations=(SEEN,))}
    there = cluster(one, estimates=measured)
    assert shapes(one, there) == {*here, ("A", 2), ("A", 4)}
    wide = running(4)
    assert shapes(wide, cluster(wide, estimates=measured)) == here
    durable = replace(wide, last_commit_s=NOW_S - 3)
    elsewhere = {("A", 1), ("A", 2), ("A", 4)}
    assert shapes(durable, cluster(durable, estimates=measured)) == {*here, *elsewhere, (None, 0)}
    for fixed in (
        replace(durable, attempt_s=NOW_S - 5),
        replace(durable, spec=replace(durable.spec, launcher=LauncherKind.ATTACHED)),
        replace(durable, generations=running(4, trained=False).generations),
    ):
        assert not shapes(fixed, cluster(fixed, estimates=measured)) & {*elsewhere, (None, 0)}


def test_a_moving_job_is_offered_both_its_types_until_it_holds_both() -> None:
    """What is planned may be called off; with slots of both types there is no choice left."""
    one = running(2)
    column = replace(one.column, gpu_type="A", width=4)
    moving = replace(one, column=column, leaving=one.column)
    assert shapes(moving, cluster(moving)) == {("V", 2), ("A", 4)}
    both = cluster(moving)
    both = replace(both, leases={**both.leases, "l1": lease("l1", "j0", "n2", 0, gpu_type="A")})
    assert columns_for(moving, both, NOW_S) == (column,)


def test_what_failed_is_not_offered_again_for_a_while() -> None:
    """No growth within the back-off of growth, no width that needs a GPU that failed, no early restart."""
    one = running(1)
    assert shapes(replace(one, grow_not_before_s=NOW_S + 1), cluster(one)) == {("V", 1)}
    failed = with_failed_gpus(one, ["GPU-n1-3"], NOW_S)
    assert shapes(failed, cluster(one)) == {("V", 1), ("V", 2)}
    assert shapes(failed, cluster(one), NOW_S + 301) >= {("V", 1)}
    waiting = replace(job(), not_before_s=NOW_S + 1)
    assert columns_for(waiting, cluster(waiting), NOW_S) == (WAITING,)
    assert len(columns_for(waiting, cluster(waiting), NOW_S + 1)) > 1


def test_grants_that_nobody_joined_may_be_taken_back_while_they_are_in_flight() -> None:
    """Down to the workers that train, in any legal step, whatever the dwell time."""
    one = replace(running(4, changed_s=NOW_S - 1, trained=False), generation=2, generation_applied=1)
    where = cluster(one)
    for lease_id in ("l1", "l2", "l3"):
        where.leases[lease_id] = replace(where.leases[lease_id], generation=2)  # type: ignore[index]
    assert shapes(one, where) == {("V", 1), ("V", 2), ("V", 4)}


def test_dwell_and_a_resize_in_flight_pin_the_width_but_not_the_limit() -> None:
    """Within the dwell time, and until the new width trains, only the limit may change."""
    for one in (running(2, changed_s=NOW_S - 5), running(2, trained=False)):
        offered = columns_for(one, cluster(one), NOW_S)
        assert {column.width for column in offered} == {2}
        assert {column.limit_w for column in offered} == {300.0, 240.0, 180.0}
    assert len(shapes(running(2, changed_s=NOW_S - 31), cluster(running(2)))) == 3


def test_what_is_not_published_may_be_withdrawn() -> None:
    """A growth that waits for slots may go on waiting or be called off, nothing else."""
    one = running(1, target=4)
    assert shapes(one, cluster(one)) == {("V", 1), ("V", 4)}


def test_a_job_on_a_silent_node_keeps_exactly_what_it_has() -> None:
    """Nobody knows what such a job does, so it is offered its present column only."""
    one = running(2)
    where = cluster(one)
    silent = replace(where, nodes={**where.nodes, "n1": replace(where.nodes["n1"], silent=True)})
    assert columns_for(one, silent, NOW_S) == (one.column,)


@pytest.mark.parametrize("phase", [JobPhase.STOPPING, JobPhase.FINISHED, JobPhase.FAILED])
def test_a_job_that_ends_has_no_columns(phase: JobPhase) -> None:
    """A job that stops or has ended is not part of the program."""
    one = replace(job(), phase=phase)
    assert columns_for(one, cluster(one), NOW_S) == ()


def test_without_settable_limits_there_is_only_the_default() -> None:
    """Where one GPU of a type cannot be limited, no limit is offered on the type."""
    stubborn = node("n1", 2)
    stubborn = replace(stubborn, gpus=(stubborn.gpus[0], replace(stubborn.gpus[1], can_set_limit=False)))
    offered = columns_for(job(), state(stubborn), NOW_S)
    assert {column.limit_w for column in offered if column != WAITING} == {None}


def test_limits_stay_within_the_range_of_the_device() -> None:
    """Shares of the highest limit, rounded to watts, never outside of what the driver takes."""
    types = gpu_types(state(node("n1", 1)), NOW_S)
    assert limit_steps_w(types["V"], Policy(limit_steps=(1.0, 0.5, 0.1, 2.0))) == (300.0, 150.0, 100.0)


def test_capacity_counts_what_is_alive_or_held() -> None:
    """Silent nodes and lost GPUs give no capacity, unless a running job holds them; nor do stuck slots."""
    one = running(2)
    where = cluster(one)
    later_s = NOW_S + 31
    assert gpu_types(where, NOW_S)["V"].num_gpus == 4
    assert gpu_types(where, later_s)["V"].num_gpus == 2
    assert free_slots(where, later_s) == []
    stuck = {**where.leases, "l1": replace(where.leases["l1"], withdrawn_s=NOW_S - 61)}
    assert gpu_types(replace(where, leases=stuck), NOW_S)["V"].num_gpus == 3
    assert len(free_slots(replace(where, leases=stuck), NOW_S)) == 2 + 8


def test_the_fair_rate_is_interpolated_at_the_fair_width() -> None:
    """Half a GPU is worth half of one, three between two and four, and ten no more than the widest."""
    one = job(widths=(1, 2, 4))
    where = cluster(one)
    types = gpu_types(where, NOW_S)

    def fair(width: float) -> float:
        return fair_rate_per_s(one, where, types, ("V",), width)

    assert fair(0.5) == pytest.approx(0.5)
    assert fair(3) == pytest.approx((1.8 + 3.24) / 2)
    assert fair(10) == pytest.approx(3.24)
