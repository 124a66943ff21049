# SPDX-License-Identifier: Apache-2.0
"""Placement: stable leases, jobs together, nothing published before every slot is free."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from specimens import NOW_S, gpu, job, lease, node, state

from horowatt.records import LauncherKind
from horowatt_allocator.decisions.estimates import Predictor
from horowatt_allocator.decisions.placement import Layout, next_slot_index, place, without
from horowatt_allocator.records.cluster import Policy, State
from horowatt_allocator.records.jobs import Column, Job, JobEstimate, JobPhase, LeaseState


def target(width: int, gpu_type: str = "V") -> Column:
    """Return a column of that width."""
    return Predictor(job(), JobEstimate(), gpu(gpu_type=gpu_type), Policy()).column(width, None)


def holding(job_id: str, *leases: LeaseState, home: str = "n1", **fields: object) -> Job:
    """Return a running job with these leases."""
    one = job(job_id, **fields)
    ids = tuple(one_lease.lease_id for one_lease in leases)
    return replace(one, phase=JobPhase.RUNNING, lease_ids=ids, home_node=home, column=target(len(ids)))


def cluster(*held: LeaseState, jobs: tuple[Job, ...], sizes: tuple[int, ...] = (4, 4)) -> State:
    """Return nodes n1, n2, ... with these leases."""
    nodes = [node(f"n{n}", size) for n, size in enumerate(sizes, start=1)]
    return state(*nodes, jobs=jobs, leases={one.lease_id: one for one in held})


def only(layouts: tuple[Layout, ...]) -> Layout:
    """Return the one layout."""
    (layout,) = layouts
    return layout


def test_a_start_takes_the_node_it_just_fills() -> None:
    """A job starts whole on the node that has the fewest sufficient free GPUs."""
    one = job()
    where = cluster(jobs=(one,), sizes=(4, 2))
    layout = only(place(where, {"j0": target(2)}, NOW_S).layouts)
    assert [slot.node for slot in layout.add] == ["n2", "n2"]
    assert layout.num_missing == 0


def test_growth_begins_where_the_job_is() -> None:
    """New slots are on the job's own nodes first; its old leases stay as they are."""
    held = (lease("a", "j0", "n2", 1),)
    one = holding("j0", *held, home="n2")
    layout = only(place(cluster(*held, jobs=(one,)), {"j0": target(4)}, NOW_S).layouts)
    assert layout.keep == ("a",)
    assert [slot.gpu.uuid for slot in layout.add] == ["GPU-n2-0", "GPU-n2-2", "GPU-n2-3"]


def test_growth_spans_nodes_only_when_it_must() -> None:
    """What does not fit at home goes to another node."""
    held = (lease("a", "j0", "n1", 0),)
    one = holding("j0", *held)
    layout = only(place(cluster(*held, jobs=(one,), sizes=(2, 4)), {"j0": target(4)}, NOW_S).layouts)
    assert [slot.node for slot in layout.add] == ["n1", "n2", "n2"]


def test_a_shrink_drops_the_newest_and_keeps_the_home() -> None:
    """Slots away from the launcher go first, newest first; an old worker always stays."""
    held = (
        lease("a", "j0", "n1", 0),
        lease("b", "j0", "n1", 1, generation=2),
        lease("c", "j0", "n2", 0),
        lease("d", "j0", "n2", 1, generation=3),
    )
    one = holding("j0", *held)
    where = cluster(*held, jobs=(one,))
    assert only(place(where, {"j0": target(2)}, NOW_S).layouts).drop == ("c", "d")
    assert only(place(where, {"j0": target(1)}, NOW_S).layouts).keep == ("a",)


def test_an_attached_job_gives_up_its_highest_positions() -> None:
    """The ranks of a host stay 0 to n-1 under a launcher that only knows counts."""
    held = tuple(lease(f"l{n}", "j0", "n1", n, generation=9 - n) for n in range(4))
    one = holding("j0", *held, launcher=LauncherKind.ATTACHED)
    layout = only(place(cluster(*held, jobs=(one,)), {"j0": target(2)}, NOW_S).layouts)
    assert layout.drop == ("l2", "l3")


def test_nothing_is_published_while_slots_are_missing_and_those_there_are_kept_for_the_older() -> None:
    """An older job that lacks a slot keeps the free ones; a younger one does not overtake with them."""
    held = (lease("x", "other", "n1", 0), lease("y", "other", "n1", 1))
    other = holding("other", *held)
    older, younger = job("older"), job("younger", submitted_at_s=NOW_S + 1)
    where = cluster(*held, jobs=(other, older, younger), sizes=(4,))
    layouts = {
        layout.job_id: layout
        for layout in place(where, {"younger": target(1), "older": target(4)}, NOW_S).layouts
    }
    assert (layouts["older"].num_missing, len(layouts["older"].add)) == (2, 2)
    assert layouts["younger"].num_missing == 1


def test_withdrawn_slots_lost_gpus_and_silent_nodes_are_not_free() -> None:
    """A slot is free only when no unreleased lease is on it and its node and GPU are there."""
    withdrawn = lease("x", "other", "n1", 0, withdrawn_s=NOW_S)
    one = job()
    where = cluster(withdrawn, jobs=(one,), sizes=(3, 4))
    n1, n2 = where.nodes["n1"], where.nodes["n2"]
    n1 = replace(n1, gpus=(n1.gpus[0], n1.gpus[1], replace(n1.gpus[2], lost=True)))
    where = replace(where, nodes={"n1": n1, "n2": replace(n2, last_seen_s=NOW_S - 31)})
    layout = only(place(where, {"j0": target(2)}, NOW_S).layouts)
    assert [slot.gpu.uuid for slot in layout.add] == ["GPU-n1-1"]
    assert layout.num_missing == 1


def test_dead_workers_go_and_more_until_the_width_is_legal() -> None:
    """Losing one worker of four with legal widths 1, 2, 4 leaves two of the others."""
    held = tuple(lease(f"l{n}", "j0", "n1", n) for n in range(4))
    one = holding("j0", *held)
    layout = without(one, {one_lease.lease_id: one_lease for one_lease in held}, ["l1"], 2)
    assert layout.keep == ("l0", "l2")
    assert layout.drop == ("l1", "l3")


@given(st.sets(st.integers(0, 20)))
def test_slot_positions_are_the_lowest_free_ones(taken: set[int]) -> None:
    """A new position is not taken, and all below it are."""
    index = next_slot_index(taken)
    assert index not in taken
    assert set(range(index)) <= taken


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
)
def test_no_slot_is_given_twice(sizes: list[int], wanted: list[int]) -> None:
    """Whatever starts together, each slot goes to one job, and none is given that is not there."""
    jobs = tuple(job(f"j{n}", widths=(width,)) for n, width in enumerate(wanted))
    where = cluster(jobs=jobs, sizes=tuple(sizes))
    targets = {f"j{n}": target(width) for n, width in enumerate(wanted)}
    layouts = place(where, targets, NOW_S).layouts
    given_slots = [(slot.node, slot.gpu.uuid) for layout in layouts for slot in layout.add]
    assert len(set(given_slots)) == len(given_slots) <= sum(sizes)
    for layout in layouts:
        assert len(layout.add) + layout.num_missing == targets[layout.job_id].width
