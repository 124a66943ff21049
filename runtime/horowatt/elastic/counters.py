# SPDX-License-Identifier: Apache-2.0
"""Counters of one worker in a small memory-mapped file: written in a microsecond, read by anybody.

Layout, little-endian: a header (magic, version, sequence) and two records. The writer fills the record
that readers do not use, then advances the sequence, which points them to it. So, unlike with a plain
seqlock, a worker killed in the middle of an update leaves its last whole record readable.

The reader is an agent that may be root while the file belongs to a tenant: nothing in it is trusted.

Known limitations: a tenant can remove its own lock file while its worker runs, and then the lease
looks free; an agent that must know better asks NVML for the processes on the GPU.
"""

import errno
import fcntl
import math
import mmap
import os
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from horowatt.files import open_owned

VERSION = 1
_MAGIC = b"HWCOUNT\0"
_HEADER = struct.Struct("<8sIIQ")
"""Magic, version, padding, sequence."""
_SEQUENCE = struct.Struct("<Q")
_SEQUENCE_OFFSET = 16
_RECORD = struct.Struct("<QqqqqqqddddqQ")
"""Sequence, pid, rank, world size, steps, samples, epoch samples, four times, flags, sequence."""
_RECORD_OFFSETS = (64, 192)
FILE_SIZE_BYTES = 320
PUBLISH_INTERVAL_S = 0.02
"""Steps that follow one another faster than this are shown together, seconds: at a thousand steps per
second, each microsecond would cost a tenth of a percent. ``publish`` shows the rest at the end."""

_ABSENT = -1
"""Stands for None in a counter; NaN stands for None in a time. Neither ever leaves this module."""
_MEASURABLE = 1
_READ_ATTEMPTS = 100
_MAX_COUNT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What a worker has done since it started.

    Attributes:
        pid: Process that writes them.
        rank: Horovod rank, None before ``hvd.init``.
        world_size: Horovod size, None before ``hvd.init``.
        steps: Optimizer steps since the worker started.
        samples: Samples trained on; None when they could not be counted.
        epoch_samples: Length of the training data set; None if unknown.
        world_entered_s: When the present world was entered, None before ``hvd.init``.
        first_step_end_s: End of the first step in the present world; None before it.
        last_step_end_s: End of the latest step; None before the first.
        started_s: Start of the worker.
        measurable: False when steps cannot be counted in this command (it is not a PyTorch script),
            so that ``steps == 0`` says nothing.
    """

    pid: int
    rank: int | None
    world_size: int | None
    steps: int
    samples: int | None
    epoch_samples: int | None
    world_entered_s: float | None
    first_step_end_s: float | None
    last_step_end_s: float | None
    started_s: float
    measurable: bool


class CountersWriter:
    """The worker's side. Attributes may be set freely; ``publish`` shows them to readers."""

    def __init__(self, path: Path) -> None:
        """Replace the counters of an earlier worker of the lease by fresh ones.

        Without room on the file system the worker trains on, unseen: counting is no reason to fail.
        """
        self.pid = os.getpid()
        self.rank = _ABSENT
        self.world_size = _ABSENT
        self.steps = 0
        self.samples = _ABSENT
        self.epoch_samples = _ABSENT
        self.world_entered_s = math.nan
        self.first_step_end_s = math.nan
        self.last_step_end_s = math.nan
        self.started_s = time.time()
        self.flags = _MEASURABLE
        self._published_s = 0.0
        self._sequence = 0
        self._map = _shared_map(path)
        self.publish()

    def enter_world(self, rank: int, world_size: int, now_s: float) -> None:
        """Note that ``hvd.init`` returned."""
        self._published_s = 0.0
        self.rank = rank
        self.world_size = world_size
        self.world_entered_s = now_s
        self.first_step_end_s = math.nan
        self.publish()

    def not_measurable(self) -> None:
        """Note that steps of this command cannot be counted."""
        self.flags &= ~_MEASURABLE
        self.publish()

    def step(self, end_s: float, samples: int | None) -> None:
        """Count one optimizer step that ended at ``end_s`` and trained on ``samples`` samples.

        Readers see it at once, or with a later step if steps are shorter than ``PUBLISH_INTERVAL_S``.
        """
        self.steps += 1
        self.last_step_end_s = end_s
        if self.first_step_end_s != self.first_step_end_s:  # only NaN differs from itself
            self.first_step_end_s = end_s
        if samples is not None:
            self.samples = samples + (self.samples if self.samples > 0 else 0)
        if end_s - self._published_s > PUBLISH_INTERVAL_S or end_s < self._published_s:
            self._published_s = end_s
            self.publish()

    def publish(self) -> None:
        """Show the present values to readers."""
        sequence = self._sequence + 1
        _RECORD.pack_into(
            self._map,
            _RECORD_OFFSETS[sequence & 1],
            sequence,
            self.pid,
            self.rank,
            self.world_size,
            self.steps,
            self.samples,
            self.epoch_samples,
            self.world_entered_s,
            self.first_step_end_s,
            self.last_step_end_s,
            self.started_s,
            self.flags,
            sequence,
        )
        _SEQUENCE.pack_into(self._map, _SEQUENCE_OFFSET, sequence)
        self._sequence = sequence

    def close(self) -> None:
        """Show the last values, and unmap the file; it keeps them."""
        self.publish()
        self._map.close()


def _shared_map(path: Path) -> mmap.mmap:
    content = _HEADER.pack(_MAGIC, VERSION, 0, 0).ljust(FILE_SIZE_BYTES, b"\0")
    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # Written, not truncated to size: a hole that cannot be filled later would be a SIGBUS.
            os.write(descriptor, content)
            return mmap.mmap(descriptor, FILE_SIZE_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sys.stderr.write(f"horowatt: no space left for {path}; this worker is not measured\n")
        private = mmap.mmap(-1, FILE_SIZE_BYTES)
        private.write(content)
        return private


def read_counters(path: Path, uid: int) -> Counters | None:
    """Return the counters in ``path``, or None when there are none that can be believed.

    Args:
        uid: The only user whose file is read.
    """
    try:
        descriptor = open_owned(path, uid)
    except OSError:
        return None
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> Counters | None:
    for _ in range(_READ_ATTEMPTS):
        content = os.pread(descriptor, FILE_SIZE_BYTES, 0)
        after = os.pread(descriptor, _SEQUENCE.size, _SEQUENCE_OFFSET)
        if len(content) != FILE_SIZE_BYTES or len(after) != _SEQUENCE.size:
            return None
        magic, version, _, sequence = _HEADER.unpack_from(content)
        if magic != _MAGIC or version != VERSION or sequence == 0:
            return None
        if (sequence,) != _SEQUENCE.unpack(after):
            continue
        record = _RECORD.unpack_from(content, _RECORD_OFFSETS[sequence & 1])
        if record[0] == record[-1] == sequence:
            return _checked(record[1:-1])
    return None


def _checked(values: tuple[int | float, ...]) -> Counters | None:
    pid, rank, world_size, steps, samples, epoch_samples = (int(value) for value in values[:6])
    entered_s, first_s, last_s, started_s = (float(value) for value in values[6:10])
    flags = int(values[10])
    counts_ok = all(_ABSENT <= count < _MAX_COUNT for count in (rank, world_size, samples, epoch_samples))
    times_ok = all(math.isnan(time_s) or 0 <= time_s < _MAX_COUNT for time_s in (entered_s, first_s, last_s))
    if not (counts_ok and times_ok and 0 <= steps < _MAX_COUNT and pid > 0 and 0 <= started_s < _MAX_COUNT):
        return None
    return Counters(
        pid=pid,
        rank=_count(rank),
        world_size=_count(world_size),
        steps=steps,
        samples=_count(samples),
        epoch_samples=_count(epoch_samples),
        world_entered_s=_time(entered_s),
        first_step_end_s=_time(first_s),
        last_step_end_s=_time(last_s),
        started_s=started_s,
        measurable=bool(flags & _MEASURABLE),
    )


def _count(value: int) -> int | None:
    return None if value == _ABSENT else value


def _time(value_s: float) -> float | None:
    return None if math.isnan(value_s) else value_s


def is_held(lock_path: Path) -> bool:
    """Return True while some process holds the lock file; never waits, never keeps it.

    An absent file is not held. Two callers that ask at once do not disturb each other.
    """
    try:
        descriptor = os.open(lock_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
