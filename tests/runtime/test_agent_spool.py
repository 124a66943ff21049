# SPDX-License-Identifier: Apache-2.0
"""What the agent remembers, and that nothing is lost or told twice."""

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from horowatt.agent.meter import Holder, OpenInterval
from horowatt.agent.spool import Spool
from horowatt.agent.state import StateFile
from horowatt.errors import NeedsOperator
from horowatt.records import EnergyInterval, EnergyMethod

HOLDER = Holder(job_id="a", lease_id="a-1", generation=1)


def interval(number: int, text: str = "") -> EnergyInterval:
    return EnergyInterval(
        seq=0,
        gpu_uuid="GPU-0",
        gpu_type="type" + text,
        simulated=True,
        start_s=float(number),
        end_s=number + 1.0,
        counter_start_j=10.0 * number,
        counter_end_j=10.0 * number + 10.0,
        energy_j=10.0,
        unmeasured="",
        method=EnergyMethod.COUNTER,
        job_id="a",
        lease_id="a-1",
        generation=1,
        attributable=True,
    )


def opened(start_s: float) -> OpenInterval:
    return OpenInterval(
        gpu_uuid="GPU-0",
        gpu_type="type",
        simulated=True,
        holder=HOLDER,
        start_s=start_s,
        start_j=5.0,
        integrated=False,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sqlite"


def test_a_second_run_goes_on_where_the_first_ended(path: Path) -> None:
    """What was stored is there for the next run, with the same identity and without a hole in seq."""
    first = StateFile(path)
    spool = Spool(first)
    spool.store([interval(1), interval(2)], [opened(3.0)])
    first.close()
    second = StateFile(path)
    again = Spool(second)
    again.store([interval(3)], [])
    assert [one.seq for one in again.unacked()] == [1, 2, 3]
    assert again.opened() == {"GPU-0": opened(3.0)}
    assert second.agent_id == first.agent_id
    assert second.same_boot
    second.close()


def test_acknowledged_intervals_are_forgotten(path: Path) -> None:
    """An interval is reported until it is acknowledged, and its number is never used again."""
    state = StateFile(path)
    spool = Spool(state)
    spool.store([interval(n) for n in range(5)], [])
    assert spool.acknowledge(3)
    assert [one.seq for one in spool.unacked()] == [4, 5]
    assert spool.acknowledge(1)
    assert spool.acknowledge(5)
    state.close()
    state = StateFile(path)
    spool = Spool(state)
    assert spool.unacked() == ()
    spool.store([interval(9)], [])
    assert [one.seq for one in spool.unacked()] == [6]
    state.close()


def test_a_restored_copy_does_not_repeat_numbers(path: Path) -> None:
    """A state file older than what the head knows goes on behind the head's count, and says so."""
    state = StateFile(path)
    spool = Spool(state)
    spool.store([interval(1)], [])
    assert not spool.acknowledge(40)
    spool.store([interval(2)], [])
    assert [one.seq for one in spool.unacked()] == [41]
    state.close()
    state = StateFile(path)
    assert Spool(state).next_seq == 42
    state.close()


def test_a_report_is_bounded(path: Path) -> None:
    """After a long absence of the head, intervals go out in order and in portions."""
    state = StateFile(path)
    spool = Spool(state)
    spool.store([interval(n) for n in range(30)], [])
    assert [one.seq for one in spool.unacked(10)] == list(range(1, 11))
    state.close()


def test_a_gpu_that_is_gone_leaves_no_open_interval(path: Path) -> None:
    """The open interval of a GPU that was taken out of the node is removed with its last record."""
    state = StateFile(path)
    spool = Spool(state)
    spool.store([], [opened(1.0)])
    spool.store([interval(1)], [], ["GPU-0"])
    assert spool.opened() == {}
    state.close()


def test_a_broken_state_file_is_kept_aside(path: Path) -> None:
    """A file that is no database is kept for a look, and the agent begins anew as another agent."""
    path.write_bytes(b"not a database" * 100)
    state = StateFile(path)
    assert state.set_aside is not None
    assert state.set_aside.read_bytes().startswith(b"not a database")
    assert Spool(state).unacked() == ()
    state.close()


def test_a_newer_layout_is_refused(path: Path) -> None:
    """A file of another version is neither misread nor overwritten."""
    StateFile(path).close()
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version=99")
    database.commit()
    database.close()
    with pytest.raises(NeedsOperator, match="another version") as caught:
        StateFile(path)
    assert caught.value.code == "HW-AGENT-008"


def test_the_state_file_is_private(path: Path) -> None:
    """Other users cannot read what the agent remembers."""
    state = StateFile(path)
    assert path.stat().st_mode & 0o077 == 0
    state.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"this machine does not let root mount: {mounted.stderr.decode()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no space on the file system of ``folder``."""
    path = folder / "ballast"
    with path.open("wb", buffering=0) as ballast:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while True:
                    ballast.write(b"\0" * size)
            except OSError:
                continue
    return path


@pytest.mark.root
def test_a_full_disk_loses_nothing(small_disk: Path) -> None:
    """While the disk is full intervals wait, unreported; with space they are stored, in order."""
    state = StateFile(small_disk / "agent.sqlite")
    spool = Spool(state)
    spool.store([interval(0)], [opened(1.0)])
    ballast = fill(small_disk)
    for number in range(1, 40):
        spool.store([interval(number, "x" * 1000)], [opened(number + 1.0)])
    assert spool.degraded is not None
    assert spool.degraded.code == "HW-DISK-001"
    waiting = spool.num_waiting
    assert waiting > 0
    reported = [one.seq for one in spool.unacked()]
    assert reported == list(range(1, 41 - waiting))
    ballast.unlink()
    spool.flush()
    assert spool.degraded is None
    assert [one.start_s for one in spool.unacked()] == [float(number) for number in range(40)]
    assert [one.seq for one in spool.unacked()] == list(range(1, 41))
    state.close()


@pytest.mark.root
def test_a_kill_on_a_full_disk_leaves_an_older_open_interval(small_disk: Path) -> None:
    """What could not be stored is covered by the open interval that was stored before it."""
    path = small_disk / "agent.sqlite"
    state = StateFile(path)
    spool = Spool(state)
    spool.store([interval(0)], [opened(1.0)])
    ballast = fill(small_disk)
    number = 1
    while spool.degraded is None:
        spool.store([interval(number, "x" * 1000)], [opened(number + 1.0)])
        number += 1
    stored = len(spool.unacked())
    state.close()
    state = StateFile(path)
    again = Spool(state)
    assert len(again.unacked()) == stored
    assert again.opened()["GPU-0"].start_s == again.unacked()[-1].end_s
    ballast.unlink()
    state.close()
