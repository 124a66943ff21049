# SPDX-License-Identifier: Apache-2.0
"""Durable commits: what ``state.commit()`` keeps in memory also goes to disk, while the script trains on.

Installed at worker start by module name, for scripts that know nothing of it. A commit costs the training
thread the encoding of what is not a tensor, and a copy of the tensors among the state's plain attributes;
models and optimizers were copied by ``commit()`` itself. A thread of low priority writes; when it is not
done by the next commit, only the newest commit waits.

**Who writes.** The worker of lowest rank on each node, so that rank 0, from which all others synchronise, is
one of them; when it dies, the next one takes over with the next world. It holds ``writer.lock`` in the
folder, so that no second one ever writes, be it of an older world. Where nodes share the folder only the
node of the lowest rank writes: each worker leaves a file with its node's identity there, and steps back
when it sees one of a lower rank.

**Who restores.** At the first ``state.sync()`` of a world in which nobody has trained yet, all ranks agree
on the newest commit that any of them can read, and load it; it is sent to those that cannot read it.
Everywhere else the state comes from rank 0 as always. When commits are there but none can be read, or the
newest does not fit the script, the job ends with an error: it never starts from the beginning unless the
folder is empty, because that would lose work without a word.

A script with several states has commits of each: a state is told from others by the order in which the
script first takes them into ``hvd.elastic.run``.
"""

import atexit
import contextlib
import ctypes
import errno
import fcntl
import functools
import math
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from horowatt.elastic import commit_state
from horowatt.elastic.commit_files import (
    KEPT,
    Abandoned,
    FileSource,
    MemorySource,
    Snapshot,
    StoredCommit,
    file_name,
    list_commits,
    number_of,
    open_commit,
    open_folder,
    prune,
    read_commit,
    remove_leftovers,
    set_aside,
    write_commit,
)
from horowatt.elastic.import_hooks import Hook
from horowatt.elastic.memory import available_bytes
from horowatt.errors import HorowattError, NeedsOperator
from horowatt.files import disk_full

SAVED_BY_COMMIT = "_horowatt_saved_by_commit"
"""In a state's ``__dict__`` while ``commit()`` has saved it and it cannot have changed since."""
INTERVAL = "interval"
"""Trigger of a commit that nobody asked for."""

_TRACK = "_horowatt_track"
_LOCK = "writer.lock"
_NICENESS = 10
"""Above that of the training. Much more, and on a busy node the training would wait for what this holds."""
_IO_PRIORITY_LOWEST = (2 << 13) | 7
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_SPARE_BYTES = 64 << 20
_BLOCKING_SHARE = 20
"""A write that training must wait for is made so seldom that it takes a twentieth of the time."""
_STUCK_S = 300.0
_SEND_BYTES = 64 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class Written:
    """A commit that is on disk.

    Attributes:
        number: How many commits the job had made, this one included.
        trigger: What was given to ``request``, or ``"interval"``.
        num_bytes: Size of the file.
        write_s: From the start of the write until it was on disk.
        blocked_s: For how long training waited because of it.
        at_s: When it was on disk, Unix seconds.
    """

    number: int
    trigger: str
    num_bytes: int
    write_s: float
    blocked_s: float
    at_s: float


@dataclass(slots=True)
class _Track:
    """One state of the script."""

    run: int
    number: int = 0
    synced: bool = False
    committing: bool = False


@dataclass(slots=True)
class _Job:
    snapshot: Snapshot
    triggers: set[str]
    blocked_s: float
    ready: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True, slots=True)
class _Place:
    """What a rank tells the others before each synchronisation."""

    synced: bool
    number: int
    node: str
    folder: str
    newest: int


def say(problem: HorowattError) -> None:
    """Write a problem to standard error."""
    sys.stderr.write(f"horowatt: {problem}\n")


class DurableCommits:
    """Durable commits of one worker. ``hooks`` connects it to Horovod once the script imports that."""

    def __init__(
        self,
        folder: Path,
        *,
        every_s: float,
        every_steps: int | None = None,
        shared: bool | None = None,
        on_written: Callable[[Written], None] = lambda _: None,
        on_problem: Callable[[HorowattError], None] = say,
        restore: bool = True,
        steps: Callable[[], int] | None = None,
        node_id: str | None = None,
    ) -> None:
        """Prepare durable commits; nothing is touched before the script uses ``hvd.elastic.run``.

        Args:
            folder: Of this job, for no other; made when it is not there, its parent is not.
            every_s: A commit that comes this long after the last one on disk is written, seconds; 0 writes
                each, infinity none but requested ones.
            every_steps: The same in optimizer steps.
            shared: The folder is the same on all nodes, or on none; None finds out.
            on_written: Called on the writing thread, once for each trigger.
            on_problem: Called once for each kind of problem, and again when it comes back after commits
                were written; never ends the training. May be called on the writing thread.
            restore: False for a worker that joins others that train; it then looks at no file. True is
                right for it too.
            steps: Returns the optimizer steps so far; without it commits are counted.
            node_id: Identity of the kernel this runs on; None asks it.
        """
        self._folder = folder
        self._every_s = every_s
        self._every_steps = every_steps
        self._shared = shared
        self._on_written = on_written
        self._on_problem = on_problem
        self._may_restore = restore
        self._steps = steps
        self._node = re.sub(r"[^A-Za-z0-9]", "", node_id or _boot_id())
        self._requested: set[str] = set()
        self._last_s = time.monotonic()
        self._last_steps = 0
        self._commits = 0
        self._blocking_until_s = -math.inf
        self._runs = 0
        self._rank, self._size = 0, 1
        self._allowed = True
        self._lock: int | None = None
        self._said: set[str] = set()
        self._failed = (-1, -1)
        self._writer = _Writer(self._write)
        # Children, such as those of data loaders, may outlive this process; its lock must not.
        os.register_at_fork(after_in_child=self._forget_lock)

    def hooks(self) -> Mapping[str, Hook]:
        """Return what to do to modules of Horovod, by module name."""
        return {
            "horovod.common.elastic": self._patch_run,
            "horovod.torch.elastic.state": commit_state.keep_saved_state_apart,
        }

    def request(self, trigger: str) -> None:
        """Make the next commit durable whatever the interval; any thread may call this.

        Workers that do not write on their node drop the request at their next commit.
        """
        self._requested.add(trigger)

    def drain(self, timeout_s: float) -> bool:
        """Wait until every commit that was taken is on disk, or failed; False when it takes too long."""
        return self._writer.drain(timeout_s)

    # ---------------------------------------------------------------------------------- the state

    def _patch_run(self, module: ModuleType) -> None:
        original = module.run_fn

        @functools.wraps(original)
        def run_fn(func: Any, reset: Any) -> Any:
            inner = original(func, reset)

            @functools.wraps(inner)
            def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
                self._attach(state)
                return inner(state, *args, **kwargs)

            return wrapper

        module.run_fn = run_fn  # type: ignore[attr-defined]

    def _attach(self, state: Any) -> None:
        """Follow one state. Its class is left alone, so that other repairs of the class take part."""
        if not commit_state.is_supported(state) or _TRACK in vars(state):
            return
        track = _Track(self._runs)
        self._runs += 1

        def commit() -> None:
            track.committing = True
            try:
                type(state).commit(state)
            finally:
                track.committing = False
                vars(state).pop(SAVED_BY_COMMIT, None)

        def save() -> None:
            type(state).save(state)
            if track.committing:
                # An update that comes with this commit makes Horowatt save again: that is no commit.
                track.committing = False
                track.number += 1
                vars(state)[SAVED_BY_COMMIT] = True
                self._after_commit(state, track)

        def sync() -> None:
            self._before_sync(state, track)
            type(state).sync(state)
            track.synced = True

        # Around the assignment of the class, which would look for handlers of these names.
        vars(state).update({_TRACK: track, "commit": commit, "save": save, "sync": sync})

    # ---------------------------------------------------------------------------------- committing

    def _after_commit(self, state: Any, track: _Track) -> None:
        self._commits += 1
        if not self._is_due():
            return
        begin_s = time.monotonic()
        self._last_s, self._last_steps = begin_s, self._step_count()
        triggers = set(self._requested)
        self._requested -= triggers
        try:
            if not self._allowed:
                return
            if self._lock is None and not self._take_lock():
                # The last writer has not let go yet; it will.
                self._requested |= triggers or {INTERVAL}
                return
            snapshot = Snapshot(
                track.run, track.number, time.time(), self._size, self._steps() if self._steps else 0
            )
            commit_state.capture(state, snapshot)
            self._hand_over(snapshot, triggers, begin_s)
        except HorowattError as error:
            self._problem(error, track.run, track.number)
        except OSError as error:
            self._problem(self._cannot_write(error), track.run, track.number)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            self._problem(_unforeseen(error), track.run, track.number)

    def _is_due(self) -> bool:
        if self._requested:
            return True
        now_s = time.monotonic()
        if now_s < self._blocking_until_s:
            return False
        if self._every_steps is not None and self._step_count() - self._last_steps >= self._every_steps:
            return True
        return now_s - self._last_s >= self._every_s

    def _step_count(self) -> int:
        return self._steps() if self._steps is not None else self._commits

    def _hand_over(self, snapshot: Snapshot, triggers: set[str], begin_s: float) -> None:
        size = snapshot.num_bytes
        available = _available_bytes()
        if available is not None and available < size + _SPARE_BYTES:
            if self._blocking_until_s == -math.inf:
                self._say(_short_of_memory(size, available))
            self._writer.drain(math.inf)
            self._write(_Job(snapshot, triggers, 0.0), blocking_since_s=begin_s)
            now_s = time.monotonic()
            self._blocking_until_s = now_s + _BLOCKING_SHARE * (now_s - begin_s)
            return
        ready = _stage_to_host(snapshot)
        running_s = self._writer.submit(_Job(snapshot, triggers, time.monotonic() - begin_s, ready))
        if running_s > _STUCK_S:
            self._problem(
                NeedsOperator(
                    "HW-COMMIT-009",
                    f"a durable commit is being written for {running_s:.0f} s already",
                    because=f"the disk or server of {self._folder} is slow or hangs",
                    hint="training goes on; should the job fail now, it restarts from an older commit",
                    fields={"path": str(self._folder)},
                ),
                snapshot.run,
                snapshot.number - 1,
            )

    # ------------------------------------------------------------------------------- who may write

    def _take_lock(self) -> bool:
        with open_folder(self._folder, create=True) as folder:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(_LOCK, flags, 0o600, dir_fd=folder)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                # A file system without locks: then one rank writes for all.
                if error.errno not in _NO_LOCKS or self._rank != 0:
                    os.close(descriptor)
                    if isinstance(error, BlockingIOError) or error.errno in _NO_LOCKS:
                        return False
                    raise
            remove_leftovers(folder)
        self._lock = descriptor
        return True

    def _forget_lock(self) -> None:
        descriptor, self._lock = self._lock, None
        _close(descriptor)

    def _holds_lock_of(self, folder: int) -> bool:
        """Return False when somebody removed the folder or the lock: then it guards nothing."""
        try:
            there = os.stat(_LOCK, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return self._lock is not None and os.path.samestat(there, os.fstat(self._lock))

    # ------------------------------------------------------------------------------------- writing

    def _write(self, job: _Job, *, blocking_since_s: float | None = None) -> None:
        """Write one commit and say how it went; raises nothing."""
        begin_s = time.monotonic()
        place = (job.snapshot.run, job.snapshot.number)
        num_bytes = None
        try:
            job.ready()
            num_bytes = self._write_to_folder(job.snapshot) if self._allowed else None
        except Abandoned:
            pass
        except HorowattError as error:
            self._problem(error, *place)
        except OSError as error:
            self._problem(self._cannot_write(error), *place)
        except Exception as error:  # noqa: BLE001 - the thread must outlive whatever it is
            self._problem(_unforeseen(error), *place)
        self._let_go_if_replaced()
        if num_bytes is None:
            return
        now_s = time.monotonic()
        if self._said and place > self._failed:
            self._said.clear()
            sys.stderr.write(
                f"horowatt: durable commits work again: commit {job.snapshot.number} is on disk\n"
            )
        blocked_s = job.blocked_s if blocking_since_s is None else now_s - blocking_since_s
        for trigger in sorted(job.triggers - {INTERVAL}) or [INTERVAL]:
            self._tell(
                Written(job.snapshot.number, trigger, num_bytes, now_s - begin_s, blocked_s, time.time())
            )

    def _tell(self, written: Written) -> None:
        try:
            self._on_written(written)
        except Exception as error:  # noqa: BLE001 - it is on disk, whoever could not be told
            sys.stderr.write(f"horowatt: nobody could be told of a durable commit: {error}\n")

    def _write_to_folder(self, snapshot: Snapshot) -> int | None:
        with open_folder(self._folder, create=True) as folder:
            if not self._holds_lock_of(folder):
                self._forget_lock()
                if not self._take_lock():
                    return None
            num_bytes = self._write_file(folder, snapshot)
            prune(folder, snapshot.run, snapshot.number)
            return num_bytes

    def _let_go_if_replaced(self) -> None:
        """Give up the lock when the world changed and a worker of lower rank writes now."""
        if not self._allowed:
            self._forget_lock()

    def _write_file(self, folder: int, snapshot: Snapshot) -> int:
        try:
            return write_commit(folder, snapshot, self._writer.is_ending)
        except OSError as error:
            older = [number for number in list_commits(folder, snapshot.run) if number != snapshot.number]
            if error.errno not in _NO_SPACE or len(older) < KEPT:
                raise
            # Room for the new one is worth more than a second old one.
            for number in older[1:]:
                with contextlib.suppress(OSError):
                    os.unlink(file_name(snapshot.run, number), dir_fd=folder)
            return write_commit(folder, snapshot, self._writer.is_ending)

    def _cannot_write(self, error: OSError) -> HorowattError:
        if error.errno in _NO_SPACE:
            return disk_full(self._folder / "commit", error)
        return NeedsOperator(
            "HW-COMMIT-001",
            f"commits of this job cannot be written to {self._folder}",
            because=error.strerror or str(error),
            hint="training goes on; mend that folder, because until then a lost job restarts from an older "
            "commit, or from the beginning",
            fields={"path": str(self._folder)},
        )

    def _problem(self, error: HorowattError, run: int, number: int) -> None:
        """Say what keeps a commit from being written, once until a later one is."""
        self._failed = max(self._failed, (run, number))
        if error.code not in self._said:
            self._said.add(error.code)
            self._say(error)

    def _say(self, error: HorowattError) -> None:
        try:
            self._on_problem(error)
        except Exception:  # noqa: BLE001 - the training goes on
            say(error)

    # ----------------------------------------------------------------------------------- restoring

    def _before_sync(self, state: Any, track: _Track) -> None:
        """Agree with the other ranks on where the state comes from; all ranks come here together."""
        ops = sys.modules["horovod.torch.mpi_ops"]
        self._rank, self._size = ops.rank(), ops.size()
        folder = self._leave_probe() if self._size > 1 else ""
        newest = -1 if track.synced or not self._may_restore else self._newest(track.run)
        places = _gather(_Place(track.synced, track.number, self._node, folder, newest))
        self._allowed = not self._lower_rank_writes(places)
        if self._writer.drain(0.0):
            self._let_go_if_replaced()
        if any(place.synced for place in places):
            track.number = places[0].number
            return
        track.number = 0
        if max(place.newest for place in places) >= 0:
            self._restore(state, track)

    def _leave_probe(self) -> str:
        """Show in the folder that this node sees it; return what identifies the folder on this node."""
        with contextlib.suppress(OSError, HorowattError), open_folder(self._folder, create=True) as folder:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(f"node-{self._node}", flags, 0o600, dir_fd=folder))
            status = os.fstat(folder)
            return f"{status.st_dev}:{status.st_ino}"
        return ""

    def _lower_rank_writes(self, places: list[_Place]) -> bool:
        """Return True when a rank below this one writes to the folder that this one has."""
        lower = places[: self._rank]
        if self._shared and lower:
            return True
        mine = places[self._rank]
        if any((place.node, place.folder) == (mine.node, mine.folder) for place in lower):
            return True
        others = {place.node for place in lower} - {self._node}
        return self._shared is None and any((self._folder / f"node-{node}").exists() for node in others)

    def _newest(self, run: int) -> int:
        """Return the number of the newest commit here, -1 for none; 0 when that cannot be known."""
        try:
            numbers = {path: number_of(run)(path.name) for path in self._folder.iterdir()}
            return max(
                (number for path, number in numbers.items() if number is not None and _is_mine(path)),
                default=-1,
            )
        except NotADirectoryError:
            return -1
        except FileNotFoundError:
            # Without its parent it is rather not mounted than not made yet.
            return -1 if self._folder.parent.is_dir() else 0
        except OSError:
            return 0

    def _restore(self, state: Any, track: _Track) -> None:
        commit, source, why = self._read_newest(track.run)
        try:
            mine = (commit.index.number, commit.index.at_s) if commit else (-1, 0.0)
            gathered: list[tuple[tuple[int, float], str]] = _gather((mine, why))
            best = max(place for place, _ in gathered)
            if best[0] < 0:
                self._give_up([reason for _, reason in gathered if reason])
                return
            holders = [rank for rank, (place, _) in enumerate(gathered) if place == best]
            if len(holders) < self._size:
                commit = self._share(commit, source, holders)
        finally:
            if source is not None:
                source.close()
        assert commit is not None  # noqa: S101 - it was read here or received
        remarks = commit_state.restore(state, commit, str(self._folder / file_name(track.run, best[0])))
        track.number = best[0]
        if commit.index.world_size != self._size:
            # For the script this is a resize: a learning rate may follow the width, for example.
            state.reset()
            for callback in state._reset_callbacks:  # noqa: SLF001
                callback()
        if self._rank == 0:
            for remark in (_continuing(*best, time.time()), *remarks):
                sys.stderr.write(f"horowatt: {remark}\n")

    def _read_newest(self, run: int) -> tuple[StoredCommit | None, FileSource | None, str]:
        """Return the newest commit that this rank can read, its file, and what kept it from newer ones."""
        why = ""
        try:
            if not self._may_restore:
                return None, None, why
            with open_folder(self._folder) as folder:
                for number in list_commits(folder, run):
                    try:
                        return *self._read(folder, file_name(run, number)), why
                    except FileNotFoundError:
                        # Another rank of this node has just set it aside, and said so.
                        continue
                    except HorowattError as error:
                        why = why or f"{error.message}: {error.because}"
        except HorowattError as error:
            self._say(error)
            why = f"{error.message}: {error.because}"
        except FileNotFoundError:
            if not self._folder.parent.is_dir():
                why = f"{self._folder.parent} does not exist; perhaps it is not mounted"
        except OSError as error:
            why = f"{self._folder} cannot be read: {error.strerror or error}"
        return None, None, why

    def _read(self, folder: int, name: str) -> tuple[StoredCommit, FileSource]:
        path = self._folder / name
        source = None
        try:
            source = FileSource(open_commit(folder, path.parent, name))
            return read_commit(source, path), source
        except FileNotFoundError:
            raise
        except (HorowattError, OSError) as error:
            if source is not None:
                source.close()
            if isinstance(error, OSError):
                unreadable = _unreadable(path, error)
                self._say(unreadable)
                raise unreadable from error
            if error.code != "HW-COMMIT-003" or set_aside(folder, name):
                self._say(error)
            raise

    def _give_up(self, reasons: list[str]) -> None:
        raise NeedsOperator(
            "HW-COMMIT-004",
            "no commit of this job can be read",
            because="; ".join(dict.fromkeys(reasons)) or f"all files in {self._folder} are damaged",
            hint=f"mend or mount {self._folder}; or, to start from the beginning, move what is in it away",
            fields={"path": str(self._folder)},
        )

    def _share(
        self, commit: StoredCommit | None, source: FileSource | None, holders: list[int]
    ) -> StoredCommit:
        """Send the agreed commit from its lowest holder to all ranks, and return it."""
        ops, torch = sys.modules["horovod.torch.mpi_ops"], sys.modules["torch"]
        root = holders[0]
        size = torch.tensor([source.size if source is not None else 0])
        total = int(ops.broadcast(size, root, name="horowatt.commit.size").item())
        keep = self._rank not in holders
        received = torch.empty(total if keep else 0, dtype=torch.uint8)
        for begin in range(0, total, _SEND_BYTES):
            end = min(begin + _SEND_BYTES, total)
            chunk = received[begin:end] if keep else torch.empty(end - begin, dtype=torch.uint8)
            if self._rank == root and source is not None:
                source.read_into(begin, memoryview(chunk.numpy()))
            ops.broadcast_(chunk, root, name="horowatt.commit.part")
        if not keep and commit is not None:
            return commit
        return read_commit(MemorySource(memoryview(received.numpy())), Path(f"of rank {root}"))


def _gather(mine: Any) -> list[Any]:
    ops = sys.modules["horovod.torch.mpi_ops"]
    if ops.size() == 1:
        return [mine]
    gathered: list[Any] = sys.modules["horovod.torch.functions"].allgather_object(mine, "horowatt.commit")
    return gathered


def _short_of_memory(size: int, available: int) -> HorowattError:
    return NeedsOperator(
        "HW-COMMIT-006",
        "training waits for each durable commit to be written",
        because=f"another copy of the state ({size >> 20} MiB) does not fit into the memory that is "
        f"available ({available >> 20} MiB)",
        hint="nothing is lost; give the node more memory. Until then fewer commits are written, so that "
        "training waits for a twentieth of the time at most",
    )


def _unreadable(path: Path, error: OSError) -> HorowattError:
    return NeedsOperator(
        "HW-COMMIT-010",
        f"the commit {path} cannot be read",
        because=error.strerror or str(error),
        hint="an older one is used if there is one; look after the disk or server of that folder",
        fields={"path": str(path)},
    )


def _continuing(number: int, at_s: float, now_s: float) -> str:
    at = datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"continuing from commit {number} of {at}, {_duration(max(now_s - at_s, 0.0))} old"


def _duration(seconds: float) -> str:
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest_s} s" if minutes else f"{rest_s} s"


def _unforeseen(error: Exception) -> HorowattError:
    return NeedsOperator(
        "HW-COMMIT-000",
        "a durable commit failed for a reason that nobody foresaw",
        because=f"{type(error).__name__}: {error}",
        hint="training goes on; please report this",
    )


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _is_mine(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


# ------------------------------------------------------------------------------------------ memory


def _available_bytes() -> int | None:
    """Return the memory that this process can still have, bytes; None where the kernel does not say."""
    available = available_bytes()
    return None if available is None else min([available, *_control_group_bytes()])


def _control_group_bytes() -> Iterator[int]:
    """Yield what each control group (v2) above this process leaves it, page cache not counted."""
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        group = root / next(line[3:] for line in lines if line.startswith("0::")).lstrip("/")
        for folder in (group, *group.parents):
            limit = _read_number(folder / "memory.max")
            used = _read_number(folder / "memory.current")
            if limit is not None and used is not None:
                cache = re.search(
                    r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE
                )
                yield max(limit - used + int(cache[1] if cache else 0), 0)
            if folder == root:
                return


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _stage_to_host(snapshot: Snapshot) -> Callable[[], None]:
    """Start copying a snapshot's GPU tensors to the host; return what waits for the copies.

    The copies run on a stream of their own, so the training thread goes on at once, and the GPU's memory is
    free again when they are done. Tensors of other devices are copied by the writing thread.
    """
    on_gpu = [index for index, tensor in enumerate(snapshot.tensors) if tensor.is_cuda]
    if not on_gpu:
        return lambda: None
    torch = sys.modules["torch"]
    events = []
    for device in {snapshot.tensors[index].device for index in on_gpu}:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for index in on_gpu:
                tensor = snapshot.tensors[index]
                if tensor.device == device:
                    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                    host.copy_(tensor.detach(), non_blocking=True)
                    tensor.record_stream(stream)
                    snapshot.tensors[index] = host.requires_grad_(tensor.requires_grad)
            events.append(stream.record_event())

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


# ------------------------------------------------------------------------------------------ thread


class _Writer:
    """A thread that writes one commit at a time; of those that wait for it only the newest stays."""

    def __init__(self, write: Callable[[_Job], None]) -> None:
        self._write = write
        self._condition = threading.Condition()
        self._pending: _Job | None = None
        self._busy_since_s: float | None = None
        self._thread: threading.Thread | None = None
        self._ending = False
        self._pid = os.getpid()

    def submit(self, job: _Job) -> float:
        """Have a job written next, in place of one that waits; return how long one is being written, s."""
        with self._condition:
            if self._pending is not None:
                job.triggers |= self._pending.triggers
            self._pending = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="durable-commits", daemon=True)
                self._thread.start()
                # A daemon is stopped anywhere; half a file would be left.
                atexit.register(self._end)
            self._condition.notify_all()
            return 0.0 if self._busy_since_s is None else time.monotonic() - self._busy_since_s

    def drain(self, timeout_s: float) -> bool:
        with self._condition:
            return self._condition.wait_for(
                lambda: self._pending is None and self._busy_since_s is None,
                None if math.isinf(timeout_s) else timeout_s,
            )

    def is_ending(self) -> bool:
        return self._ending

    def _end(self) -> None:
        if os.getpid() != self._pid:
            # A forked child has no such thread, and perhaps a condition that nobody will ever release.
            return
        self._ending = True
        with self._condition:
            self._pending = None
        self.drain(5.0)

    def _run(self) -> None:
        _step_back()
        while True:
            with self._condition:
                self._busy_since_s = None
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._pending is not None)
                job, self._pending = self._pending, None
                self._busy_since_s = time.monotonic()
            if job is not None:
                self._write(job)
            # Memory of the commit is free while the thread waits.
            del job


def _step_back() -> None:
    """Let the training go first: this thread's niceness and the class of its disk requests."""
    with contextlib.suppress(OSError):
        # For the kernel 0 is the calling thread, not the process.
        os.setpriority(os.PRIO_PROCESS, 0, min(os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS, 19))
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, _IO_PRIORITY_LOWEST)
