# SPDX-License-Identifier: Apache-2.0
"""The store: what was committed comes back, once, whole, and nothing else does."""

import contextlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis import given, settings
from hypothesis import strategies as st

from horowatt.errors import NeedsOperator
from horowatt.records import BatchRule, EnergyInterval, EnergyMethod, LauncherKind, StreamChunk
from horowatt_allocator.adapters import log_streams, schema
from horowatt_allocator.adapters.database import DATABASE_NAME, migrate, open_engine
from horowatt_allocator.adapters.log_streams import StreamState, take
from horowatt_allocator.adapters.store import SqlStore
from horowatt_allocator.ports.store import Intake, JobChunk, LogFilter, Submission
from horowatt_allocator.records.cluster import (
    Change,
    Decided,
    Decision,
    Gpu,
    Inventory,
    Node,
    NodeSpec,
    Plan,
    PlanStatus,
    Policy,
    State,
    Tenant,
    Told,
)
from horowatt_allocator.records.jobs import (
    WAITING,
    Column,
    Generation,
    Job,
    JobEstimate,
    JobPhase,
    JobSpec,
    LeaseState,
    NodeClock,
    Observation,
    PauseKind,
    PhaseMark,
    RateWindow,
    Reason,
    Resize,
    ResizePhase,
    StreamCursor,
)

NASTY = 'it\'s "$(reboot)"; — ü\n'
INVENTORY = Inventory(
    name="lab",
    nodes=(
        NodeSpec(name="a", address="a", gpu_type=None, num_gpus=2, base_w=None),
        NodeSpec(name="b", address="b", gpu_type="h100", num_gpus=2, base_w=100.0),
    ),
)
TENANTS = {"vision": Tenant(name="vision", users=("*",))}


def job(job_id: str, **changes: Any) -> Job:
    spec = JobSpec(
        job_id=job_id,
        name=NASTY,
        tenant="vision",
        uid=1000,
        gid=1000,
        username="bob",
        launcher=LauncherKind.HOROWATT,
        command=("python", NASTY),
        environment={"A": NASTY},
        working_dir="/tmp",
        virtual_env=None,
        legal_widths=(1, 2, 4),
        batch_rule=BatchRule.TOTAL,
        batch_size=64,
        total_samples=None,
        total_epochs=1.5,
        deadline_s=None,
        wall_time_limit_s=None,
        gpu_types=("h100",),
        weight=1.0,
        flexibility=0.25,
        submitted_at_s=1.5,
    )
    return replace(Job(spec=spec, phase=JobPhase.QUEUED), **changes)


def lease(lease_id: str, job_id: str, node: str = "a") -> LeaseState:
    return LeaseState(
        lease_id=lease_id,
        job_id=job_id,
        node=node,
        gpu_uuid="GPU-1",
        gpu_type="h100",
        slot_index=0,
        simulated=True,
        generation=1,
        granted_s=2.0,
    )


def interval(seq: int, energy_j: float | None = 1.25, job_id: str | None = "j1") -> EnergyInterval:
    return EnergyInterval(
        seq=seq,
        gpu_uuid="GPU-1",
        gpu_type="h100",
        simulated=True,
        start_s=float(seq),
        end_s=float(seq + 1),
        counter_start_j=10.0 * seq,
        counter_end_j=None if energy_j is None else 10.0 * seq + energy_j,
        energy_j=energy_j,
        unmeasured="" if energy_j is not None else "no counter",
        method=EnergyMethod.COUNTER if energy_j is not None else EnergyMethod.MISSING,
        job_id=job_id,
        lease_id="l1" if job_id else None,
        generation=1 if job_id else 0,
        attributable=True,
    )


def full_state(state: State) -> State:
    """A state with something in every place."""
    column = Column(
        gpu_type="h100",
        width=2,
        limit_w=250.0,
        rate_per_s=10.0,
        low_rate_per_s=9.0,
        high_rate_per_s=11.0,
        marginal_w=200.0,
        held_idle_w=100.0,
        nominal=True,
    )
    running = job(
        "j1",
        phase=JobPhase.RUNNING,
        column=column,
        generation=2,
        lease_ids=("l1",),
        home_node="a",
        attempt=1,
        samples=5,
        window=RateWindow(
            generation=2,
            limit_w=None,
            start_s=1.0,
            start_samples=1,
            start_energy_j=None,
            end_s=2.0,
            end_samples=5,
            end_energy_j=3.0,
        ),
        generations=(Generation(number=1, width=1, gpu_type="h100", limit_w=None, published_s=1.0),),
        events={"a": StreamCursor(next_offset=7, tail="{")},
        resizes=(
            Resize(
                number=1,
                decided_s=1.0,
                width=1,
                width_before=0,
                marks=(PhaseMark(phase=ResizePhase.GRANTED, node="a", first_s=1.1, last_s=1.2, count=2),),
                clocks_s={"a": -300.5},
                cold=True,
                code="HW-X",
                why="because",
            ),
        ),
        clocks={"a": NodeClock(earlier_s=0.1, recent_s=0.2, num_recent=3, sent_at_s=4.0)},
        cold="no script",
        num_commits=2,
        ending=JobPhase.QUEUED,
    )
    gpu = Gpu(
        uuid="GPU-1",
        nvml_index=0,
        gpu_type="h100",
        simulated=True,
        energy_j=None,
        power_w=80.5,
        idle_w=None,
        limit_w=300.0,
        default_limit_w=300.0,
        min_limit_w=100.0,
        max_limit_w=300.0,
        can_set_limit=True,
        lost=False,
        sampled_at_s=3.0,
    )
    observation = Observation(
        gpu_type="h100", width=1, limit_w=None, rate_per_s=5.0, power_w=None, seconds_s=10.0, at_s=4.0
    )
    plan = Plan(
        columns={"j1": column, "j2": WAITING},
        status=PlanStatus.OPTIMAL,
        value=1.0,
        bound=None,
        violations={"cap": 1.0},
        binding=("gpus:h100",),
        power_w=300.0,
        solve_s=0.01,
        solver="test",
    )
    return replace(
        state,
        nodes={**state.nodes, "a": replace(state.nodes["a"], gpus=(gpu,), last_seen_s=5.0, agent_id="A")},
        jobs={"j1": running, "j2": job("j2")},
        leases={"l1": lease("l1", "j1")},
        estimates={
            "j1": JobEstimate(
                observations=(observation,), pauses_s=(1.5,), kind_pauses_s={PauseKind.SHRINK: (1.5,)}
            )
        },
        plan=plan,
        needs_decision="test",
        last_decision_s=6.0,
        num_decisions=3,
        next_lease=9,
    )


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], SqlStore]]:
    """Opens the store of one folder, closing the one opened before."""
    stores: list[SqlStore] = []

    def open_again() -> SqlStore:
        for store in stores:
            store.close()
        stores.append(SqlStore.open(tmp_path, 100.0))
        return stores[-1]

    yield open_again
    for store in stores:
        store.close()


def load(store: SqlStore) -> State:
    return store.load(INVENTORY, TENANTS, Policy())


def test_a_fresh_database_gives_the_inventory(opened: Callable[[], SqlStore]) -> None:
    """Without anything stored the state is the inventory's nodes, never seen, and no jobs."""
    state = load(opened())
    assert state.nodes == {spec.name: Node(spec=spec) for spec in INVENTORY.nodes}
    assert (state.jobs, state.leases, state.plan, state.next_lease) == ({}, {}, None, 1)


def test_what_was_committed_comes_back(opened: Callable[[], SqlStore]) -> None:
    """Every field of the state comes back equal after the store was closed and opened again."""
    store = opened()
    state = full_state(load(store))
    store.commit(state, now_s=1.0)
    assert load(opened()) == state


def test_changes_and_removals_come_back(opened: Callable[[], SqlStore]) -> None:
    """Changed records come back changed; removed ones do not come back."""
    store = opened()
    state = full_state(load(store))
    store.commit(state, now_s=1.0)
    after = replace(
        state,
        jobs={"j1": replace(state.jobs["j1"], phase=JobPhase.FINISHED, exit_code=0, lease_ids=())},
        leases={},
        plan=None,
        next_lease=10,
    )
    store.commit(after, now_s=2.0)
    store.commit(after, now_s=3.0)
    assert load(opened()) == after


def test_lease_ids_of_two_databases_never_meet(tmp_path: Path) -> None:
    """The prefix of lease ids is chosen once per database, stays, and is valid in a host name."""
    prefixes = set()
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        found = []
        for _ in range(2):
            store = SqlStore.open(folder, 1.0)
            found.append(load(store).lease_prefix)
            store.commit(load(store), now_s=1.0)
            store.close()
        assert found[0] == found[1]
        assert found[0].isalnum()
        prefixes.add(found[0])
    assert len(prefixes) == 2


def test_a_node_that_left_the_inventory_stays_while_it_is_leased(opened: Callable[[], SqlStore]) -> None:
    """A node outside the inventory is kept for its leases, and dropped once they are released."""
    store = opened()
    state = full_state(load(store))
    store.commit(state, now_s=1.0)
    smaller = Inventory(name="lab", nodes=INVENTORY.nodes[1:])
    assert set(store.load(smaller, TENANTS, Policy()).nodes) == {"a", "b"}
    released = {"l1": replace(state.leases["l1"], released_s=9.0)}
    store.commit(replace(state, leases=released), now_s=2.0)
    assert set(store.load(smaller, TENANTS, Policy()).nodes) == {"b"}


def test_the_inventory_wins_over_what_was_stored(opened: Callable[[], SqlStore]) -> None:
    """A changed address counts after a restart; what the agent said before stays."""
    store = opened()
    store.commit(full_state(load(store)), now_s=1.0)
    moved = tuple(replace(spec, address="10.0.0.9") for spec in INVENTORY.nodes[:1])
    state = opened().load(Inventory(name="lab", nodes=moved), TENANTS, Policy())
    assert state.nodes["a"].spec.address == "10.0.0.9"
    assert state.nodes["a"].agent_id == "A"


def test_decisions_and_stories_are_kept_in_order(opened: Callable[[], SqlStore]) -> None:
    """Decisions are read by number, stories by job, oldest first; limits keep the latest."""
    store = opened()
    state = load(store)
    change = Change(
        job_id="j1",
        name="n",
        width_before=0,
        width_after=2,
        limit_before_w=None,
        limit_after_w=250.0,
        reason=Reason(code="start", sentence=NASTY),
    )
    decisions = [
        Decision(
            number=number,
            at_s=float(number),
            trigger="test",
            plan_status=PlanStatus.FEASIBLE,
            value=1.0,
            bound=1.5,
            power_w=1.0,
            cap_w=None,
            binding=(),
            violations={},
            solve_s=0.0,
            changes=(change,),
        )
        for number in (1, 2, 3)
    ]
    told = [Told(at_s=float(n), job_id="j1", reason=Reason(code="c", sentence=str(n))) for n in range(5)]
    store.commit(state, now_s=1.0, actions=[*[Decided(decision=item) for item in decisions], *told])
    again = opened()
    assert again.decisions(0, 10) == tuple(decisions)
    assert again.decisions(1, 10) == tuple(decisions[1:])
    assert again.decisions(0, 1) == tuple(decisions[2:])
    assert again.story("j1", 3) == tuple(told[2:])
    assert again.story("j2", 3) == ()


def test_intervals_are_booked_once(opened: Callable[[], SqlStore]) -> None:
    """A repeated report adds nothing; intervals come back equal; energy per job survives a restart."""
    store = opened()
    state = load(store)
    first = Intake(agent_id="A", node="a", intervals=(interval(1), interval(2, None), interval(3, 2.0, None)))
    store.commit(state, now_s=1.0, intake=first)
    store.commit(state, now_s=1.0, intake=first)
    store.commit(state, now_s=1.0, intake=replace(first, intervals=(*first.intervals, interval(4))))
    for found in (store, opened()):
        load(found)
        assert found.acked_seq("A") == 4
        assert found.agent_node("A") == "a"
        assert found.job_energy_j("j1") == 2.5
        assert found.job_energy_j("j2") is None
        booked = list(found.intervals(None, None))
        assert [item.interval for item in booked] == [
            interval(1),
            interval(2, None),
            interval(3, 2.0, None),
            interval(4),
        ]
        assert {item.node for item in booked} == {"a"}
    assert [item.interval.seq for item in store.intervals(2.5, 3.5)] == [2, 3]


def test_two_agents_count_apart(opened: Callable[[], SqlStore]) -> None:
    """The same sequence numbers of another agent are other intervals."""
    store = opened()
    state = load(store)
    for agent in ("A", "B"):
        store.commit(state, now_s=1.0, intake=Intake(agent_id=agent, node="a", intervals=(interval(1),)))
    assert store.job_energy_j("j1") == 2.5
    assert (store.acked_seq("A"), store.acked_seq("B"), store.acked_seq("C")) == (1, 1, 0)


def test_idempotency_keys_belong_to_their_user(opened: Callable[[], SqlStore]) -> None:
    """A key is found for its own user only, and is forgotten after a week."""
    store = opened()
    state = load(store)
    kept = Submission(uid=1000, key="k", digest="d", job_id="j1")
    store.commit(state, now_s=1.0, submission=kept)
    assert opened().submission(1000, "k") == kept
    store = opened()
    assert store.submission(1001, "k") is None
    load(store)
    store.commit(state, now_s=8 * 86_400.0, submission=replace(kept, key="other"))
    assert store.submission(1000, "k") is None


def test_numbers_of_jobs_never_go_back(opened: Callable[[], SqlStore]) -> None:
    """Jobs that were removed still count, so that no id is given twice."""
    store = opened()
    state = load(store)
    store.commit(replace(state, jobs={"j1": job("j1"), "j2": job("j2")}), now_s=1.0)
    store.commit(replace(state, jobs={}), now_s=2.0)
    assert store.num_jobs_ever() == 2
    store = opened()
    load(store)
    assert store.num_jobs_ever() == 2


def chunk(stream: str, offset: int, text: str) -> StreamChunk:
    return StreamChunk(stream=stream, offset=offset, next_offset=offset + len(text.encode()), text=text)


def give(store: SqlStore, state: State, *chunks: StreamChunk, job_id: str = "j1") -> None:
    items = tuple(JobChunk(job_id=job_id, chunk=item) for item in chunks)
    store.commit(state, now_s=1.0, intake=Intake(agent_id="A", node="a", chunks=items))


def log(store: SqlStore, after: int = 0, wanted: LogFilter | None = None) -> str:
    return "".join(text for _, _, text in store.log_page("j1", after, wanted or LogFilter()).pieces)


def test_log_lines_appear_whole(opened: Callable[[], SqlStore]) -> None:
    """A line that comes in two pieces is shown once it is whole, also across a restart."""
    store = opened()
    state = replace(load(store), jobs={"j1": job("j1", phase=JobPhase.RUNNING)})
    give(store, state, chunk("lease/x", 0, "one\ntw"), chunk("events", 0, "{}\n"))
    assert log(store, wanted=LogFilter(without=frozenset({"events"}))) == "one\n"
    store = opened()
    state = load(store)
    assert store.offsets("j1", "a") == {"lease/x": 6, "events": 3}
    assert store.offsets("j1", "b") == {}
    give(store, state, chunk("lease/x", 6, "o\nthr"))
    assert log(store, wanted=LogFilter(stream="lease/x")) == "one\ntwo\n"
    page = store.log_page("j1", 0, LogFilter())
    assert log(store, after=page.cursor) == ""
    ended = replace(state, jobs={"j1": replace(state.jobs["j1"], phase=JobPhase.FINISHED)})
    store.commit(ended, now_s=1.0)
    assert log(store, after=page.cursor) == "thr\n"


def test_last_words_after_the_end_are_shown(opened: Callable[[], SqlStore]) -> None:
    """Output that arrives after the job ended is shown even without an end of line."""
    store = opened()
    state = replace(load(store), jobs={"j1": job("j1", phase=JobPhase.FAILED)})
    store.commit(state, now_s=1.0)
    give(store, state, chunk("launcher", 0, "died"))
    assert log(store) == "died\n"


def test_the_log_of_a_job_is_bounded(opened: Callable[[], SqlStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound one marker stands, offsets go on, and a restart changes nothing about it."""
    monkeypatch.setattr(log_streams, "MAX_LOG_BYTES_PER_JOB", 10)
    store = opened()
    state = replace(load(store), jobs={"j1": job("j1", phase=JobPhase.RUNNING)})
    give(store, state, chunk("a", 0, "12345\n"), chunk("b", 0, "67890\n"))
    assert log(store).count("[horowatt] more than") == 1
    assert log(store).startswith("12345\n6789\n[horowatt]")
    store = opened()
    give(store, load(store), chunk("a", 6, "more\n"), chunk("c", 0, "x\n"))
    assert log(store).count("[horowatt] more than") == 1
    assert "more\n" not in log(store)
    assert store.offsets("j1", "a") == {"a": 11, "b": 6, "c": 2}


def test_pages_of_a_log_are_cut(opened: Callable[[], SqlStore]) -> None:
    """A long log comes in pages that together are the whole of it."""
    store = opened()
    state = replace(load(store), jobs={"j1": job("j1", phase=JobPhase.RUNNING)})
    offset, line = 0, "x" * 40_000 + "\n"
    for _ in range(20):
        give(store, state, chunk("a", offset, line))
        offset += len(line)
    cursor, found, pages = 0, "", 0
    while True:
        page = store.log_page("j1", cursor, LogFilter())
        found, cursor, pages = found + "".join(text for *_, text in page.pieces), page.cursor, pages + 1
        if not page.more:
            break
    assert found == line * 20
    assert pages > 1


@given(st.text(alphabet="ab\n\x00ü", max_size=200), st.data())
def test_any_cut_of_a_stream_gives_the_same_lines(text: str, data: st.DataObject) -> None:
    """However a stream is cut into pieces, the lines that become visible are its lines."""
    states: dict[log_streams.StreamKey, StreamState] = {}
    key, shown, position = ("j1", "a", "s"), "", 0
    while position < len(text):
        end = data.draw(st.integers(position + 1, len(text)))
        offset = len(text[:position].encode())
        taken = take([(key, chunk("s", offset, text[position:end]))], states, {})
        states.update(taken.states)
        shown += "".join(piece for _, piece in taken.pieces)
        position = end
    tail = states[key].tail if states else ""
    assert shown + tail == text.replace("\x00", "\ufffd")
    assert not shown or shown.endswith("\n")
    assert "\n" not in tail


def test_a_record_that_would_not_come_back_is_not_written(opened: Callable[[], SqlStore]) -> None:
    """An infinite figure is refused as a whole commit instead of spoiling the database."""
    store = opened()
    state = load(store)
    bad = replace(state, jobs={"j1": job("j1"), "j2": job("j2", rate_per_s=float("inf"))})
    with pytest.raises(NeedsOperator) as caught:
        store.commit(bad, now_s=1.0)
    assert caught.value.code == "HW-DB-005"
    assert load(opened()).jobs == {}


def limit_pages(store: SqlStore, pages: int) -> None:
    with store._engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")


def test_a_full_database_loses_nothing_and_recovers(opened: Callable[[], SqlStore]) -> None:
    """SQLite's own 'database or disk is full' refuses the whole commit; afterwards all goes on."""
    store = opened()
    state = replace(load(store), jobs={"j1": job("j1", phase=JobPhase.RUNNING)})
    store.commit(state, now_s=1.0)
    limit_pages(store, 1)
    much = Intake(
        agent_id="A",
        node="a",
        intervals=tuple(interval(seq) for seq in range(1, 500)),
        chunks=(JobChunk(job_id="j1", chunk=chunk("a", 0, "line\n" * 10_000)),),
    )
    with pytest.raises(NeedsOperator) as caught:
        store.commit(replace(state, num_decisions=7), now_s=2.0, intake=much)
    assert caught.value.code == "HW-DISK-001"
    assert "free space" in caught.value.hint
    assert (store.acked_seq("A"), store.offsets("j1", "a"), log(store)) == (0, {}, "")
    limit_pages(store, 1_000_000)
    store.commit(replace(state, num_decisions=7), now_s=3.0, intake=much)
    store = opened()
    assert load(store).num_decisions == 7
    assert store.acked_seq("A") == 499


def fill_up(path: Path) -> None:
    with path.open("wb") as stream, contextlib.suppress(OSError):
        while True:
            os.write(stream.fileno(), b"x" * 4096)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_loses_nothing_and_recovers(tmp_path: Path) -> None:
    """On a file system that is really full a commit is refused, and works again once there is room."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    try:
        store = SqlStore.open(folder, 1.0)
        state = replace(load(store), jobs={"j1": job("j1", phase=JobPhase.RUNNING)})
        store.commit(state, now_s=1.0)
        ballast = folder / "ballast"
        fill_up(ballast)
        refused: list[str] = []
        while len(refused) < 3:
            try:
                give(store, state, chunk("a", store.offsets("j1", "a").get("a", 0), "y" * 5000 + "\n"))
            except NeedsOperator as error:
                refused.append(error.code)
        assert refused == ["HW-DISK-001"] * 3
        held = store.offsets("j1", "a").get("a", 0)
        ballast.unlink()
        give(store, state, chunk("a", held, "z\n"))
        store.close()
        store = SqlStore.open(folder, 1.0)
        load(store)
        assert store.offsets("j1", "a")["a"] == held + 2
        assert log(store).endswith("z\n")
        assert len(log(store).encode()) == held + 2
        store.close()
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_second_store_is_refused(tmp_path: Path) -> None:
    """Two services cannot share a state folder; the error names the one that has it."""
    first = SqlStore.open(tmp_path, 1.0)
    with pytest.raises(NeedsOperator) as caught:
        SqlStore.open(tmp_path, 1.0)
    assert caught.value.code == "HW-SRV-002"
    assert str(os.getpid()) in caught.value.message
    first.close()
    SqlStore.open(tmp_path, 1.0).close()


def test_the_database_is_private(tmp_path: Path) -> None:
    """Files of the database are readable by the service's user only, whatever the umask."""
    before = os.umask(0)
    try:
        store = SqlStore.open(tmp_path, 1.0)
        store.commit(full_state(load(store)), now_s=1.0)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        store.close()
    finally:
        os.umask(before)
    assert DATABASE_NAME in modes
    assert set(modes.values()) == {0o600}, modes


def test_migrations_give_the_schema(tmp_path: Path) -> None:
    """An empty file migrated up has exactly the tables that the code uses; again changes nothing."""
    path = tmp_path / DATABASE_NAME
    engine = open_engine(path)
    migrate(engine, path)
    migrate(engine, path)
    with engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), schema.metadata)
    engine.dispose()
    assert differences == []


def test_a_newer_database_is_refused(tmp_path: Path) -> None:
    """A database written by a newer version is left as it is."""
    SqlStore.open(tmp_path, 1.0).close()
    with sqlite3.connect(tmp_path / DATABASE_NAME) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(NeedsOperator) as caught:
        SqlStore.open(tmp_path, 1.0)
    assert caught.value.code == "HW-DB-002"
    assert "9999" in caught.value.because


def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    """A file that is no database, and a record that cannot be read, are errors with a way out."""
    (tmp_path / DATABASE_NAME).write_bytes(b"not a database at all, but long enough to be read as one" * 50)
    with pytest.raises(NeedsOperator) as caught:
        SqlStore.open(tmp_path, 1.0)
    assert caught.value.code == "HW-DB-001"
    (tmp_path / DATABASE_NAME).unlink()
    store = SqlStore.open(tmp_path, 1.0)
    store.commit(full_state(load(store)), now_s=1.0)
    with store._engine.begin() as connection:
        connection.execute(sa.update(schema.jobs).values(document="{"))
    with pytest.raises(NeedsOperator) as caught:
        load(store)
    assert caught.value.code == "HW-DB-001"
    store.close()


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_store import *
store = SqlStore.open(Path(sys.argv[1]), 1.0)
state = load(store)
print("go", flush=True)
while True:
    n = state.num_decisions + 1
    jobs = {f"j{i}": job(f"j{i}", generation=n) for i in range(20)}
    told = [Told(at_s=float(n), job_id="j1", reason=Reason(code="n", sentence=str(n)))]
    intake = Intake(agent_id="A", node="a", intervals=(interval(2 * n - 1), interval(2 * n)),
        chunks=(JobChunk(job_id="j1", chunk=chunk("s", store.offsets("j1", "a").get("s", 0), f"{n}\\n")),))
    state = replace(state, jobs=jobs, num_decisions=n, next_lease=n)
    store.commit(state, now_s=float(n), actions=told, intake=intake)
    print(n, flush=True)
"""


def test_kill_9_never_leaves_half_a_commit(tmp_path: Path) -> None:
    """Killed at any moment, the database holds one whole commit: at least the last acknowledged one."""
    reached = 0
    for round_ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            text=True,
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "go\n"
            for _ in range(3 + 7 * round_):
                acknowledged = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            acknowledged = int((writer.stdout.read().splitlines() or [str(acknowledged)])[-1])
        store = SqlStore.open(tmp_path, 1.0)
        state = load(store)
        n = state.num_decisions
        assert acknowledged <= n <= acknowledged + 1
        assert {item.generation for item in state.jobs.values()} == {n}
        assert state.next_lease == n
        assert store.acked_seq("A") == 2 * n
        assert [item.interval.seq for item in store.intervals(None, None)] == list(range(1, 2 * n + 1))
        assert log(store) == "".join(f"{i}\n" for i in range(1, n + 1))
        assert len(store.story("j1", 10_000)) == n
        store.close()
        assert n > reached
        reached = n


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.integers(0, 6)).map(lambda pair: range(pair[0], pair[0] + pair[1])),
        max_size=8,
    )
)
def test_any_order_of_reports_books_once(
    tmp_path_factory: pytest.TempPathFactory, reports: list[range]
) -> None:
    """Repeated and overlapping reports book each sequence number at most once, and acknowledge the last."""
    store = SqlStore.open(tmp_path_factory.mktemp("order"), 1.0)
    state = load(store)
    expected: list[int] = []
    for seqs in reports:
        intake = Intake(agent_id="A", node="a", intervals=tuple(interval(seq) for seq in seqs))
        store.commit(state, now_s=1.0, intake=intake)
        expected += [seq for seq in seqs if seq > max(expected, default=0)]
        assert store.acked_seq("A") == max(expected, default=0)
    assert [item.interval.seq for item in store.intervals(None, None)] == expected
    store.close()


def test_a_thousand_jobs_are_written_once(opened: Callable[[], SqlStore]) -> None:
    """With a thousand jobs a commit that changes one writes one row."""
    store = opened()
    state = load(store)
    jobs = {f"j{n}": job(f"j{n}") for n in range(1000)}
    state = replace(state, jobs=jobs)
    store.commit(state, now_s=1.0)
    statements: list[tuple[str, Any]] = []
    sa.event.listen(
        store._engine, "before_cursor_execute", lambda *args: statements.append((args[2], args[3]))
    )
    after = replace(state, jobs={**jobs, "j7": replace(jobs["j7"], generation=1)})
    store.commit(after, now_s=2.0)
    writes = [text for text, _ in statements if not text.startswith("BEGIN")]
    assert len(writes) == 1
    assert writes[0].startswith("UPDATE jobs")
    assert load(opened()).jobs == after.jobs
