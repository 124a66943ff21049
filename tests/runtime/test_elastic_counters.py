# SPDX-License-Identifier: Apache-2.0
"""The counters of a worker and the lock that says whether it lives."""

import fcntl
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from horowatt.elastic.counters import CountersWriter, is_held, read_counters

UID = os.getuid()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Every counter comes back as it was set, and absent ones come back as None."""
    writer = CountersWriter(tmp_path / "c")
    fresh = read_counters(tmp_path / "c", UID)
    assert fresh is not None
    assert (fresh.rank, fresh.world_size, fresh.samples, fresh.first_step_end_s) == (None, None, None, None)
    assert fresh.steps == 0
    assert fresh.pid == os.getpid()
    assert fresh.measurable
    writer.enter_world(1, 3, 10.0)
    writer.step(11.0, 64)
    writer.step(12.0, 32)
    writer.epoch_samples = 1437
    writer.not_measurable()
    read = read_counters(tmp_path / "c", UID)
    assert read is not None
    assert (read.rank, read.world_size, read.steps, read.samples, read.epoch_samples) == (1, 3, 2, 96, 1437)
    assert (read.world_entered_s, read.first_step_end_s, read.last_step_end_s) == (10.0, 11.0, 12.0)
    assert not read.measurable


def test_a_new_world_has_no_first_step_yet(tmp_path: Path) -> None:
    """Entering a world forgets the first step of the world before, and keeps all sums."""
    writer = CountersWriter(tmp_path / "c")
    writer.enter_world(0, 1, 1.0)
    writer.step(2.0, None)
    writer.enter_world(0, 2, 3.0)
    read = read_counters(tmp_path / "c", UID)
    assert read is not None
    assert (read.first_step_end_s, read.last_step_end_s, read.steps, read.samples) == (None, 2.0, 1, None)


def test_no_samples_are_not_zero_samples(tmp_path: Path) -> None:
    """Samples stay None until some were counted; a step without new samples adds nothing."""
    writer = CountersWriter(tmp_path / "c")
    writer.step(1.0, None)
    unknown = read_counters(tmp_path / "c", UID)
    writer.step(2.0, 0)
    known = read_counters(tmp_path / "c", UID)
    assert unknown is not None
    assert known is not None
    assert (unknown.samples, known.samples) == (None, 0)


def test_very_short_steps_are_shown_together(tmp_path: Path) -> None:
    """The first step of a world is shown at once, steps of a millisecond a little later, none is lost."""
    writer = CountersWriter(tmp_path / "c")
    shown = []
    for number in range(1, 101):
        writer.step(1000.0 + number / 1000, 2)
        read = read_counters(tmp_path / "c", UID)
        assert read is not None
        assert number - read.steps <= 21
        shown.append(read.steps)
    assert shown[0] == 1
    assert len(set(shown)) < 10
    writer.enter_world(0, 2, 1001.0)
    writer.step(1000.11, 2)
    read = read_counters(tmp_path / "c", UID)
    assert read is not None
    assert (read.steps, read.samples, read.first_step_end_s) == (101, 202, 1000.11)


def test_a_reader_never_mixes_two_updates(tmp_path: Path) -> None:
    """While a worker counts as fast as it can, what is read always fits together."""
    writer = CountersWriter(tmp_path / "c")
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            writer.step(float(writer.steps + 1), 7)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(2000):
            read = read_counters(tmp_path / "c", UID)
            if read is None or not read.steps:
                continue
            assert read.samples == 7 * read.steps
            assert read.last_step_end_s == float(read.steps)
    finally:
        stop.set()
        thread.join()


def test_a_worker_killed_in_the_middle_of_an_update_leaves_its_last_whole_one(tmp_path: Path) -> None:
    """Half a record in the unused half of the file does not hide the record before it."""
    writer = CountersWriter(tmp_path / "c")
    writer.step(1.0, 5)
    data = bytearray((tmp_path / "c").read_bytes())
    (sequence,) = struct.unpack_from("<Q", data, 16)
    offset = (64, 192)[(sequence + 1) & 1]
    data[offset : offset + 40] = b"\xee" * 40
    (tmp_path / "c").write_bytes(data)
    read = read_counters(tmp_path / "c", UID)
    assert read is not None
    assert (read.steps, read.samples) == (1, 5)


@pytest.mark.parametrize("content", [b"", b"x", b"\0" * 320, b"\xff" * 320, b"HWCOUNT\0" + b"\xff" * 312])
def test_garbage_is_no_counters(content: bytes, tmp_path: Path) -> None:
    """A file that a tenant made up is not believed."""
    (tmp_path / "c").write_bytes(content)
    assert read_counters(tmp_path / "c", UID) is None


def test_impossible_values_are_not_believed(tmp_path: Path) -> None:
    """A whole record with a negative number of steps is garbage too."""
    writer = CountersWriter(tmp_path / "c")
    writer.steps = -5
    writer.publish()
    assert read_counters(tmp_path / "c", UID) is None


def test_links_and_absent_files_are_no_counters(tmp_path: Path) -> None:
    """A link planted by a tenant is not followed, and an absent file is simply absent."""
    CountersWriter(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert read_counters(tmp_path / "absent", UID) is None
    with pytest.raises(Exception, match="link"):
        read_counters(tmp_path / "link", UID)


def test_a_new_worker_starts_at_zero_without_touching_the_old_ones_mapping(tmp_path: Path) -> None:
    """Counters of an earlier worker of the lease are replaced, and its late updates are not seen."""
    old = CountersWriter(tmp_path / "c")
    old.step(1.0, 1)
    CountersWriter(tmp_path / "c")
    old.step(2.0, 1)
    read = read_counters(tmp_path / "c", UID)
    assert read is not None
    assert read.steps == 0


def test_a_lock_is_held_exactly_while_a_process_has_it(tmp_path: Path) -> None:
    """Absent, free, held, held by a child only, free again."""
    lock = tmp_path / "lock"
    assert not is_held(lock)
    lock.touch()
    assert not is_held(lock)
    descriptor = os.open(lock, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert is_held(lock)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[descriptor])
    os.close(descriptor)
    try:
        assert is_held(lock)
    finally:
        child.communicate(b"\n")
    assert not is_held(lock)


def test_asking_twice_at_once_does_not_look_held(tmp_path: Path) -> None:
    """One who asks while another asks is not taken for a worker."""
    lock = tmp_path / "lock"
    lock.touch()
    descriptor = os.open(lock, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    assert not is_held(lock)
    os.close(descriptor)
