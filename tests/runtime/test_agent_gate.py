# SPDX-License-Identifier: Apache-2.0
"""Whether a GPU may be granted: glances in, verdicts out, no GPU and no clock."""

from horowatt.agent.gate import CLEAR_AFTER_S, LEAVING_S, LITTLE_AFTER_S, ForeignProcess, Gate, Glance

GIB = 1 << 30
MINE, OTHERS = 1000, 1001


def process(pid: int = 123, uid: int | None = OTHERS, gib: float | None = 1.2) -> ForeignProcess:
    memory = None if gib is None else int(gib * GIB)
    return ForeignProcess(pid=pid, uid=uid, memory_bytes=memory)


def glance(at_s: float, *foreign: ForeignProcess, **more: object) -> Glance:
    named = sum(one.memory_bytes or 0 for one in foreign)
    fields: dict[str, object] = {
        "at_s": at_s,
        "uids": frozenset(),
        "held": False,
        "fault": "",
        "sick": "",
        "foreign": foreign,
        "named_bytes": named,
        "used_bytes": named,
        "total_bytes": 80 * GIB,
    }
    return Glance(**{**fields, **more})  # type: ignore[arg-type]


def test_a_foreign_process_blocks_and_does_not_let_the_gpu_flap() -> None:
    """It blocks from the first look; short pauses between such processes do not free the GPU."""
    gate = Gate()
    assert gate.judge(glance(0.0)) == ""
    assert gate.judge(glance(1.0, process())) == "process 123 uses 1.2 GiB"
    for at_s in range(2, 40, 3):
        assert gate.judge(glance(float(at_s)))
        assert gate.judge(glance(at_s + 1.0, process()))
    assert gate.judge(glance(50.0))
    assert gate.judge(glance(50.0 + CLEAR_AFTER_S - 1))
    assert gate.judge(glance(50.0 + CLEAR_AFTER_S)) == ""


def test_what_a_worker_leaves_behind_blocks_only_until_it_is_gone() -> None:
    """The rest of the lease that just ended frees the GPU with the first clean look."""
    gate = Gate()
    gate.judge(glance(0.0, uids=frozenset({MINE}), held=True))
    rest = process(uid=MINE)
    assert gate.judge(glance(1.0, rest)) == "process 123 still uses 1.2 GiB"
    assert gate.judge(glance(2.0, used_bytes=3 * GIB)).startswith("3.0 GiB of its memory")
    assert gate.judge(glance(3.0)) == ""
    assert gate.judge(glance(4.0, process(), rest)) == "process 123 uses 1.2 GiB, and 1 more"
    assert gate.judge(glance(5.0)) != ""
    assert gate.judge(glance(5.0 + CLEAR_AFTER_S)) == ""
    late = 1.0 + LEAVING_S
    assert gate.judge(glance(late, rest))
    assert gate.judge(glance(late + 1.0))


def test_processes_that_the_node_cannot_name_say_so() -> None:
    """Neither a user nor an amount is invented."""
    busy = Gate().judge(glance(0.0, process(7, None, None)))
    assert busy == "process 7 that this node does not see uses it"


def test_much_memory_without_a_process_blocks_for_good() -> None:
    """What was measured is not overruled by time; the next job would die of it."""
    gate = Gate()
    gate.judge(glance(0.0))
    for at_s in (1.0, 1000.0, 100_000.0):
        assert "30.0 GiB of its memory" in gate.judge(glance(at_s, used_bytes=30 * GIB))
    gate = Gate()
    assert gate.judge(glance(0.0, used_bytes=30 * GIB)), "also when it was there first"


def test_little_memory_without_a_process_blocks_for_a_while() -> None:
    """After that it is the driver's own, is said once, and does not block again."""
    gate = Gate()
    gate.judge(glance(0.0, uids=frozenset({MINE}), held=True, used_bytes=20 * GIB))
    assert "1.0 GiB" in gate.judge(glance(1.0, used_bytes=1 * GIB))
    assert gate.judge(glance(LITTLE_AFTER_S, used_bytes=1 * GIB))
    assert gate.accepted == ""
    assert gate.judge(glance(1.0 + LITTLE_AFTER_S, used_bytes=1 * GIB)) == ""
    assert "1.0 GiB" in gate.accepted
    assert gate.judge(glance(2.0 + LITTLE_AFTER_S, used_bytes=1 * GIB)) == ""
    assert gate.accepted == ""
    assert gate.judge(glance(3.0 + LITTLE_AFTER_S, used_bytes=3 * GIB))


def test_a_display_server_is_no_job() -> None:
    """A little memory that was there before the first job is usual, and what is named explains itself."""
    gate = Gate()
    assert gate.judge(glance(0.0, used_bytes=2 * GIB)) == ""
    assert gate.judge(glance(1.0, used_bytes=int(2.2 * GIB))) == ""
    assert gate.judge(glance(2.0, used_bytes=20 * GIB, named_bytes=18 * GIB)) == ""
    assert gate.judge(glance(3.0, used_bytes=20 * GIB, named_bytes=16 * GIB))


def test_memory_near_its_mark_does_not_let_the_gpu_flap() -> None:
    """Between the two marks the verdict stays what it was."""
    gate = Gate()
    middle = int(0.4 * GIB)
    gate.judge(glance(0.0))
    assert gate.judge(glance(1.0, used_bytes=middle)) == ""
    assert gate.judge(glance(2.0, used_bytes=int(0.6 * GIB)))
    for at_s in range(3, 30):
        assert gate.judge(glance(float(at_s), used_bytes=middle))
    assert gate.judge(glance(30.0))
    assert gate.judge(glance(30.0 + CLEAR_AFTER_S)) == ""


def test_what_cannot_be_read_never_blocks() -> None:
    """Without a process list memory tells; without memory the lock alone does."""
    gate = Gate()
    gate.judge(glance(0.0, uids=frozenset({MINE}), held=True, used_bytes=None, total_bytes=None))
    assert gate.judge(glance(1.0, used_bytes=None, total_bytes=None)) == ""
    assert gate.judge(glance(2.0, used_bytes=None, sick="odd")) == ""


def test_the_holders_own_memory_is_not_held_against_it() -> None:
    """While its worker lives, a lease explains whatever memory is in use."""
    gate = Gate()
    mine = {"uids": frozenset({MINE}), "held": True}
    assert gate.judge(glance(0.0, used_bytes=70 * GIB, **mine)) == ""
    assert gate.judge(glance(1.0, process(), used_bytes=70 * GIB, **mine)) != ""


def test_a_fault_blocks_and_a_hiccup_does_not() -> None:
    """A pending reset counts at once; an unreadable clock only when it stays so."""
    gate = Gate()
    assert gate.judge(glance(0.0, fault="fell off the bus")) == "fell off the bus"
    assert gate.judge(glance(1.0, process(), fault="needs a reset")) == "needs a reset"
    assert gate.judge(glance(2.0)) == "needs a reset"
    assert gate.judge(glance(2.0 + CLEAR_AFTER_S)) == ""
    gate = Gate()
    assert [gate.judge(glance(float(at_s), sick="odd")) for at_s in range(3)] == ["", "", "odd"]
