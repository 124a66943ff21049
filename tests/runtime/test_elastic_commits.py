# SPDX-License-Identifier: Apache-2.0
"""Durable commits: real Horovod workers, killed outright and started again on what they left on disk."""

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

from horowatt.elastic import commit_files
from horowatt.elastic.commit_files import FileSource, MemorySource, Snapshot, file_name
from horowatt.errors import HorowattError, NotAllowed

PATIENCE_S = 150.0
"""Only how long a broken test waits; nothing is asserted about time."""

PRELUDE = """
import hashlib, json, os, pickle, sys, time
from contextlib import nullcontext
from pathlib import Path
from horowatt.elastic import horovod_fixes, import_hooks
from horowatt.elastic.commits import DurableCommits

def say(**record):
    sys.stdout.write(json.dumps(record) + "\\n")
    sys.stdout.flush()

commits = DurableCommits(
    Path(os.environ["COMMITS"]),
    every_s=float(os.environ.get("EVERY_S", "0")),
    node_id=os.environ.get("NODE"),
    on_written=lambda written: say(written=written.number, trigger=written.trigger, bytes=written.num_bytes),
    on_problem=lambda problem: say(problem=problem.code, text=str(problem)),
)
# Before the other repairs, which put methods of their own into the class: the order must not matter.
import_hooks.install(commits.hooks())
import_hooks.install(horovod_fixes.worker_hooks(
    on_world=lambda *_: None, on_leave=lambda: None, uncounted=nullcontext))
import horovod.torch as hvd
import torch

def digest(state):
    parts = [*state.model.state_dict().items(), *sorted(state.optimizer.state_dict()["state"].items())]
    def plain(value):
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return sorted((str(key), plain(item)) for key, item in value.items())
        return value
    return hashlib.sha256(repr([(str(key), plain(value)) for key, value in parts]).encode()).hexdigest()

def make(width=4, kind=torch.optim.AdamW, **attributes):
    torch.manual_seed(hvd.rank())
    layers = torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(list(range(100000)), seed=3)
    return hvd.elastic.TorchState(model, optimizer, sampler=sampler, **attributes)

def track_resets(state):
    state.register_reset_callbacks([lambda: say(reset=hvd.size())])
    return state

def number(state):
    return vars(state)["_horowatt_track"].number

def step(state):
    state.optimizer.zero_grad()
    state.model(torch.randn(8, 4)).pow(2).mean().backward()
    state.optimizer.step()
    state.sampler.record_batch(0, 4)
    state.batch += 1
    state.history.append(state.batch)

def describe(state):
    return dict(number=number(state), digest=digest(state), batch=state.batch, history=state.history[-1:],
                position=state.sampler.processed_num, length=len(state.history))
"""

TRAIN = """
hvd.init()
state = track_resets(make(batch=0, history=[]))

@hvd.elastic.run
def train(state):
    say(start=True, size=hvd.size(), **describe(state))
    while not hvd.broadcast_object(Path(os.environ["STOP"]).exists()):
        step(state)
        expected = dict(describe(state), number=number(state) + 1)
        say(commit=True, **expected)
        state.commit()
        # In place, after the commit: must not be part of it.
        state.history.append("later")
        state.history.pop()
        time.sleep(0.01)

train(state)
say(drained=commits.drain(30))
"""


class World:
    """Workers of one fixed Horovod world, each started by itself."""

    def __init__(self, tmp_path: Path) -> None:
        self.work = tmp_path
        self.stop = tmp_path / "stop"
        self.workers: list[subprocess.Popen[bytes]] = []
        self._outputs: list[Path] = []
        self._starts = 0
        self._server: Any = None

    def start(self, folders: list[Path], body: str = TRAIN, *, nodes: list[str] | None = None) -> None:
        """Start one worker per folder, each on a node named as its folder unless ``nodes`` says otherwise."""
        self._starts += 1
        self._server = RendezvousServer()
        port = self._server.start()
        size = len(folders)
        self._server.init(get_host_assignments(parse_hosts(f"localhost:{size}"), size))
        script = self.work / "train.py"
        script.write_text(PRELUDE + textwrap.dedent(body))
        self.workers, self._outputs = [], []
        for rank, folder in enumerate(folders):
            output = self.work / f"output-{self._starts}-{rank}"
            place = {
                **{f"HOROVOD_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")},
                **{f"HOROVOD_{name}": str(size) for name in ("SIZE", "LOCAL_SIZE")},
                "HOROVOD_CROSS_RANK": "0",
                "HOROVOD_CROSS_SIZE": "1",
                "HOROVOD_HOSTNAME": "localhost",
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
                "HOROVOD_GLOO_IFACE": "lo",
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "OMP_NUM_THREADS": "1",
                "COMMITS": str(folder),
                "STOP": str(self.stop),
                "NODE": nodes[rank] if nodes else folder.name,
            }
            with output.open("wb") as stream:
                self.workers.append(
                    subprocess.Popen(
                        [sys.executable, script],
                        env={**os.environ, **place},
                        stdin=subprocess.DEVNULL,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                    )
                )
            self._outputs.append(output)

    def text(self, rank: int) -> str:
        return self._outputs[rank].read_text()

    def said(self, rank: int, what: str) -> list[dict[str, Any]]:
        lines = [line for line in self.text(rank).splitlines(keepends=True) if line.startswith("{")]
        return [record for record in map(json.loads, lines) if what in record]

    def wait_until(self, what: str, true: Callable[[], bool], *, alive: bool = True) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not true():
            ended = any(worker.poll() not in {None, 0} for worker in self.workers) and alive
            if ended or time.monotonic() > deadline_s:
                story = "\n".join(f"--- {rank}\n{self.text(rank)}" for rank in range(len(self._outputs)))
                pytest.fail(f"{what} did not happen\n{story}")
            time.sleep(0.02)

    def written(self, rank: int) -> list[int]:
        return [record["written"] for record in self.said(rank, "written")]

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.close()

    def end(self) -> None:
        """Have the workers stop in order."""
        self.stop.touch()
        for worker in self.workers:
            worker.wait(PATIENCE_S)
        self.stop.unlink()
        self.close()

    def close(self) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait(PATIENCE_S)
        if self._server is not None:
            self._server.stop()
            self._server._httpd.server_close()
            self._server = None


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("commit-*"))


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def _same_as_committed(start: dict[str, Any], before: list[dict[str, Any]]) -> None:
    committed = next(record for record in before if record["number"] == start["number"])
    assert {key: start[key] for key in committed if key != "commit"} == {
        key: committed[key] for key in committed if key != "commit"
    }


@pytest.mark.horovod
def test_killed_outright_a_job_continues_from_its_newest_whole_commit(world: World, tmp_path: Path) -> None:
    """Two workers on one node, kill -9: the same parameters, optimizer, position and attributes come back."""
    folder = tmp_path / "commits"
    world.start([folder, folder])
    world.wait_until("commits", lambda: max([*world.written(0), *world.written(1), 0]) >= 6)
    world.kill()
    before = world.said(0, "commit")
    # One worker per node writes, the other never.
    assert not world.written(1)
    numbers = [_number(path) for path in _files(folder)]
    assert len(numbers) == commit_files.KEPT
    assert not world.said(0, "problem")

    # The newest was cut, and the killed writer left half a file.
    newest = _files(folder)[-1]
    with newest.open("r+b") as stream:
        stream.truncate(newest.stat().st_size // 2)
    leftover = folder / f".{file_name(0, 99)}.1.tmp"
    leftover.write_bytes(b"half")
    world.start([folder, folder])
    world.wait_until("commits", lambda: len([*world.written(0), *world.written(1)]) >= 4)
    world.kill()
    for rank in (0, 1):
        (start,) = world.said(rank, "start")
        assert start["number"] == numbers[0]
        _same_as_committed(start, before)
    problems = [record["problem"] for rank in (0, 1) for record in world.said(rank, "problem")]
    assert problems == ["HW-COMMIT-003"]
    assert world.text(0).count(f"horowatt: continuing from commit {numbers[0]} of ") == 1
    assert "continuing" not in world.text(1)
    # It goes on counting, keeps two, and what was damaged or half written is gone.
    before = world.said(0, "commit")
    assert before[0]["number"] == numbers[0] + 1
    assert len(_files(folder)) == commit_files.KEPT
    assert not leftover.exists()

    # A bit flipped in the newest; another width.
    numbers = [_number(path) for path in _files(folder)]
    _flip(_files(folder)[-1], 1000)
    world.start([folder])
    world.wait_until("start", lambda: bool(world.said(0, "start")))
    world.end()
    (start,) = world.said(0, "start")
    assert start["number"] == numbers[0]
    _same_as_committed(start, before)
    assert [record["problem"] for record in world.said(0, "problem")] == ["HW-COMMIT-003"]
    # Another width is a resize to the script.
    assert world.said(0, "reset") == [{"reset": 1}]
    assert world.said(0, "drained") == [{"drained": True}]

    # None is whole: that ends the job, on every rank, and says what to do.
    for path in _files(folder):
        _flip(path, path.stat().st_size - 100)
    world.start([folder, folder])
    world.wait_until("refusal", lambda: all(w.poll() is not None for w in world.workers), alive=False)
    for rank in (0, 1):
        assert "HW-COMMIT-004" in world.text(rank)
        assert not world.said(rank, "start")


@pytest.mark.horovod
def test_nodes_write_for_themselves_and_help_each_other_out(world: World, tmp_path: Path) -> None:
    """Two nodes with folders of their own: each writes; a node that lost its folder is sent the commit.

    With a folder that both see, only the node of rank 0 writes.
    """
    first, second = tmp_path / "first", tmp_path / "second"
    world.start([first, second])
    world.wait_until("commits", lambda: min(max([*world.written(rank), 0]) for rank in (0, 1)) >= 3)
    world.kill()
    # The batch norm of each replica saw other samples: what comes back is what that node wrote.
    before = world.said(1, "commit")
    newest = max(_number(path) for path in _files(second))
    lost = tmp_path / "new"
    world.start([lost, second])
    world.wait_until("commits", lambda: all(world.written(rank) for rank in (0, 1)))
    world.kill()
    for rank in (0, 1):
        (start,) = world.said(rank, "start")
        assert start["number"] == newest
        _same_as_committed(start, before)
    assert f"continuing from commit {newest} of " in world.text(0)
    assert all(_number(path) > newest - commit_files.KEPT for path in _files(lost))

    shared = tmp_path / "shared"
    world.start([shared, shared], nodes=["one", "two"])
    world.wait_until("commits", lambda: len(world.written(0)) >= 3)
    world.kill()
    assert not world.written(1)
    assert {path.name for path in shared.glob("node-*")} == {"node-one", "node-two"}


RESIZE = """
from horovod.common.elastic import run_fn
from horovod.common.exceptions import HostsUpdatedInterrupt

address = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
first = os.environ["HOROVOD_RANK"] == "0"
changes = ["2", "1"] if first else ["1"]

def enter(size):
    names = ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE")
    os.environ.update(dict.fromkeys(names, size))
    if size == "1":
        os.environ.update(HOROVOD_RANK="0", HOROVOD_LOCAL_RANK="0")
        os.environ.pop("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    else:
        os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = address
    hvd.init()

def train(state):
    say(start=True, size=hvd.size(), **describe(state))
    while not Path(os.environ["STOP"]).exists():
        if number(state) == 4 and hvd.size() == 1 and first:
            raise HostsUpdatedInterrupt(False)
        step(state)
        say(commit=True, size=hvd.size(), number=number(state) + 1)
        state.commit()
        time.sleep(0.01)

def reset():
    hvd.shutdown()
    enter(changes.pop(0))

while not (first or Path(os.environ["COMMITS"], "commit-0-000000000003").exists()):
    time.sleep(0.02)
enter("1") if first else hvd.init()
# Horovod's optimizer asks this when it is made: a world of one may grow.
os.environ["HOROVOD_ELASTIC"] = "1"
state = make(batch=0, history=[])
del os.environ["HOROVOD_ELASTIC"]
run_fn(train, reset)(state)
say(drained=commits.drain(30))
"""


@pytest.mark.horovod
def test_newcomers_and_successors_count_on(world: World, tmp_path: Path) -> None:
    """A newcomer takes state and number from those that train, not from the disk.

    When the writer dies it writes in its place, and no number is written twice.
    """
    folder = tmp_path / "commits"
    world.start([folder, folder], RESIZE)
    world.wait_until("growth", lambda: any(number >= 8 for number in world.written(0)))
    assert not world.written(1)
    world.workers[0].kill()
    world.wait_until("succession", lambda: len(world.written(1)) >= 2, alive=False)
    world.end()
    (alone, together), (joined, left) = world.said(0, "start"), world.said(1, "start")
    assert [start["size"] for start in (alone, together, joined, left)] == [1, 2, 2, 1]
    assert alone["number"] == 0
    assert together["number"] == 4
    assert joined == together
    assert "continuing" not in world.text(0) + world.text(1)
    assert min(world.written(1)) > left["number"] >= max(world.written(0))
    numbers = [record["number"] for record in world.said(1, "commit")]
    assert len(set(numbers)) >= len(numbers) - 1


SCENARIOS = """
import threading
from horowatt.elastic import commits as commits_module
from horowatt.errors import HorowattError
hvd.init()
root = Path(os.environ["COMMITS"])

class Case:
    def __init__(self, name, **options):
        self.folder = root / name
        self.written, self.problems = [], []
        self.commits = DurableCommits(self.folder, **{"every_s": 0.0, **options},
            on_written=self.written.append, on_problem=self.problems.append)

    def begin(self, state):
        self.commits._attach(state)
        state.sync()
        return state

    def numbers(self):
        assert self.commits.drain(60)
        return [written.number for written in self.written]

    def codes(self):
        assert self.commits.drain(60)
        return [problem.code for problem in self.problems]

def refused(code, *texts):
    class Refused:
        def __enter__(self): pass
        def __exit__(self, kind, error, _):
            assert isinstance(error, HorowattError) and error.code == code, error
            assert all(text in str(error) for text in texts), str(error)
            return True
    return Refused()

# What was restored does not change what was saved.
state = make(batch=0, history=[])
step(state)
state.save()
before = digest(state)
state.restore()
step(state)
state.restore()
assert digest(state) == before
say(done="apart")

# A script that never commits: no thread, no file.
case = Case("never")
state = case.begin(make(batch=0, history=[]))
step(state)
state.check_host_updates()
assert not case.folder.exists()
assert not [thread for thread in threading.enumerate() if thread.name == "durable-commits"]
say(done="never")

# On request only; and Horovod's second save of the same state can be left out.
case = Case("request", every_s=float("inf"))
state = case.begin(make(batch=0, history=[]))
inside = []
check = type(state).check_host_updates
type(state).check_host_updates = lambda self: inside.append(commits_module.SAVED_BY_COMMIT in vars(self))
state.commit()
case.commits.request("publication")
state.commit()
state.commit()
type(state).check_host_updates = check
assert inside == [True] * 3 and commits_module.SAVED_BY_COMMIT not in vars(state)
assert case.numbers() == [2]
assert case.written[0].trigger == "publication"
assert case.written[0].num_bytes == (case.folder / "commit-0-000000000002").stat().st_size
say(done="request")

# A writer that is slow: only the newest waits, with everybody's triggers.
gate, write = threading.Event(), commits_module.write_commit
commits_module.write_commit = lambda *arguments: (gate.wait(60), write(*arguments))[1]
case = Case("slow")
state = case.begin(make(batch=0, history=[]))
for turn in range(5):
    if turn == 2:
        case.commits.request("publication")
    state.commit()
    while turn == 0 and case.commits._writer._pending is not None:
        time.sleep(0.01)
assert not case.commits.drain(0.05)
gate.set()
assert case.numbers() == [1, 5]
assert [written.trigger for written in case.written] == ["interval", "publication"]
commits_module.write_commit = write
say(done="slow")

# No room for another copy in memory: training waits, that is said once, and the interval grows.
available, commits_module._available_bytes = commits_module._available_bytes, lambda: 0
case = Case("memory")
state = case.begin(make(batch=0, history=[]))
for _ in range(4):
    case.commits.request("suspend")
    state.commit()
    assert case.written[-1].number == number(state)
assert case.codes() == ["HW-COMMIT-006"]
state.commit()
assert case.numbers() == [1, 2, 3, 4]
commits_module._available_bytes = available
say(done="memory")

# A folder that cannot be: training goes on, it is said once, and again when it works.
case = Case("blocked")
case.folder.write_text("a file")
state = case.begin(make(batch=0, history=[]))
for _ in range(3):
    state.commit()
assert case.codes() == ["HW-COMMIT-001"] and not case.written
case.folder.unlink()
state.commit()
assert case.numbers() == [4]
say(done="blocked")

# A folder removed under a running job: the lock in it is taken anew.
import shutil
shutil.rmtree(case.folder)
state.commit()
assert case.numbers() == [4, 5] and case.codes() == ["HW-COMMIT-001"]
from horowatt.elastic.counters import is_held
assert is_held(case.folder / "writer.lock")
# And a second writer on the same node stays away.
rival = Case("blocked")
other = make(batch=0, history=[])
rival.begin(other)
other.commit()
assert rival.numbers() == [] and rival.codes() == []
say(done="lock")

# Attributes: functions are fine, a lock is not; nothing is written meanwhile.
case = Case("attributes")
state = case.begin(make(batch=0, history=[], extra=lambda: 7))
state.commit()
state.extra = threading.Lock()
state.commit()
state.commit()
assert case.codes() == ["HW-COMMIT-007"] and "'extra'" in str(case.problems[0])
state.extra = {"ema": torch.ones(3, requires_grad=True), "half": torch.ones(2, dtype=torch.bfloat16)}
state.commit()
with torch.no_grad():
    state.extra["ema"].mul_(5)
assert case.numbers() == [1, 4]
again = Case("attributes").begin(make(batch=0, history=[], extra=None))
assert number(again) == 4 and again.extra["ema"].tolist() == [1.0] * 3 and again.extra["ema"].requires_grad
assert again.extra["half"].dtype is torch.bfloat16
say(done="attributes")

# A script that changed: an error that names what, or a remark.
with refused("HW-COMMIT-005", "model.0.weight is 5x4 in the script and 4x4 in the commit"):
    Case("attributes").begin(make(width=5, batch=0, history=[], extra=None))
with refused("HW-COMMIT-005", "optimizer is SGD in the script and AdamW in the commit"):
    Case("attributes").begin(make(kind=torch.optim.SGD, batch=0, history=[], extra=None))
changed = Case("attributes").begin(make(batch=0, history=[], novelty=11))
assert number(changed) == 4 and changed.novelty == 11 and not hasattr(changed, "extra")
say(done="changed")

# A folder that others may write to is not read; being there, its commits are not skipped either.
(root / "attributes").chmod(0o777)
with refused("HW-COMMIT-004", "other users may write to it"):
    Case("attributes").begin(make(batch=0, history=[]))
(root / "attributes").chmod(0o700)
with refused("HW-COMMIT-004", "does not exist", "not mounted"):
    Case("absent/below").begin(make(batch=0, history=[]))
say(done="strangers")

# Two states in one script.
case = Case("two")
for name in ("first", "second"):
    state = case.begin(make(batch=0, history=[]))
    for _ in range(3 if name == "first" else 2):
        step(state)
        state.commit()
assert case.commits.drain(60)
case = Case("two")
first, second = (case.begin(make(batch=0, history=[])) for _ in range(2))
assert (number(first), first.batch, number(second), second.batch) == (3, 3, 2, 2)
say(done="two")

# A full disk: one whole commit stays, training goes on, and it works again.
if "FULL" in os.environ:
    case = Case("full")
    case.folder = case.commits._folder = Path(os.environ["FULL"], "commits")
    state = case.begin(make(batch=0, history=[], ballast=b""))
    for size in (200, 200, 600, 1100, 200):
        state.ballast = os.urandom(size << 10)
        state.commit()
        assert case.commits.drain(60)
    # 600 fits only without the older of the two before; 1100 does not fit at all.
    assert case.numbers() == [1, 2, 3, 5], case.numbers()
    assert case.codes() == ["HW-DISK-001"], case.codes()
    assert not list(case.commits._folder.glob(".*"))
    say(done="full")
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of one megabyte, where this user may mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid() != 0:
        yield None
        return
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", path], check=False)
    yield path if mounted.returncode == 0 else None
    if mounted.returncode == 0:
        subprocess.run(["umount", path], check=True)


@pytest.mark.horovod
def test_whatever_goes_wrong_the_training_goes_on_and_it_is_said(
    tmp_path: Path, small_disk: Path | None
) -> None:
    """One worker, one case after another; each prints that it held."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + SCENARIOS],
        env={
            **os.environ,
            "COMMITS": str(tmp_path),
            "OMP_NUM_THREADS": "1",
            **({"FULL": str(small_disk)} if small_disk is not None else {}),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    held = [json.loads(line)["done"] for line in done.stdout.splitlines()]
    expected = ["apart", "never", "request", "slow", "memory", "blocked", "lock"]
    expected += ["attributes", "changed", "strangers", "two"]
    assert held == expected + (["full"] if small_disk is not None else [])
    assert done.stderr.count("durable commits work again: commit 4 is on disk") == 2
    assert (
        "attribute 'novelty' is not in the commit and keeps the value that the script gave it" in done.stderr
    )
    assert "attribute 'extra' of the commit is not in the script and is dropped" in done.stderr


# ------------------------------------------------------------------------------------------- files


def _snapshot(number: int = 1, **values: Any) -> Snapshot:
    snapshot = Snapshot(0, number, 1000.0, 2, 7)
    for name, value in values.items():
        snapshot.add("handler", name, type(value).__name__, value, live=False)
    return snapshot


def _write(folder: Path, snapshot: Snapshot) -> Path:
    with commit_files.open_folder(folder, create=True) as descriptor:
        commit_files.write_commit(descriptor, snapshot)
    return folder / file_name(snapshot.run, snapshot.number)


def _read(path: Path) -> commit_files.StoredCommit:
    with commit_files.open_folder(path.parent) as descriptor:
        source = FileSource(commit_files.open_commit(descriptor, path.parent, path.name))
    try:
        return commit_files.read_commit(source, path)
    finally:
        source.close()


def test_every_kind_of_tensor_comes_back(tmp_path: Path) -> None:
    """Values, types, shapes, sharing and the metadata of a model's state; and no file is larger for it."""
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool]
    kinds += [torch.uint8, torch.int16, torch.int64]
    tensors = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    tensors |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "sliced": torch.arange(10.0)[2:5],
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    large = torch.zeros(1 << 18)
    model = torch.nn.BatchNorm1d(3).state_dict()
    path = _write(tmp_path / "c", _snapshot(tensors=tensors, tied=[large, large.view_as(large)], model=model))
    assert path.stat().st_size < 2 * large.numel() * 4
    commit = _read(path)
    loaded = commit.load("handler", "tensors")
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert type(loaded[name]) is type(tensor), name
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(
            loaded[name].to_dense().to(torch.complex128), tensor.to_dense().to(torch.complex128)
        )
    assert loaded["parameter"].requires_grad
    first, second = commit.load("handler", "tied")
    assert first.data_ptr() == second.data_ptr()
    assert commit.load("handler", "model")._metadata == model._metadata
    assert (commit.index.number, commit.index.world_size, commit.index.steps) == (1, 2, 7)


def test_no_damage_goes_unnoticed(tmp_path: Path) -> None:
    """Each bit of a commit counts, and so does its end."""
    values = {"weights": torch.arange(50.0), "position": {"epoch": 3, "done": [1, 2, 3]}}
    path = _write(tmp_path / "c", _snapshot(state=values))
    whole = path.read_bytes()
    commit_files.read_commit(MemorySource(memoryview(whole)), path)
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(HorowattError) as caught:
            commit_files.read_commit(MemorySource(memoryview(damaged)), path)
        assert caught.value.code in {"HW-COMMIT-003", "HW-COMMIT-008"}, at
    for length in range(0, len(whole), 7):
        with pytest.raises(HorowattError) as caught:
            commit_files.read_commit(MemorySource(memoryview(whole)[:length]), path)
        assert caught.value.code == "HW-COMMIT-003", length


def test_only_the_last_two_are_kept_and_none_of_a_course_given_up(tmp_path: Path) -> None:
    """Older ones go, and so do newer ones; those of another state stay."""
    folder = tmp_path / "c"
    for number in (1, 2, 3, 9):
        _write(folder, _snapshot(number))
    other = Snapshot(1, 1, 0.0, 1, 0)
    _write(folder, other)
    with commit_files.open_folder(folder) as descriptor:
        assert commit_files.set_aside(descriptor, file_name(0, 2))
        commit_files.prune(descriptor, 0, 3)
    assert [path.name for path in _files(folder)] == [file_name(0, 1), file_name(0, 3), file_name(1, 1)]


def test_an_abandoned_write_leaves_nothing(tmp_path: Path) -> None:
    """What was there stays, and no half file."""
    folder = tmp_path / "c"
    _write(folder, _snapshot(1))
    with commit_files.open_folder(folder) as descriptor, pytest.raises(commit_files.Abandoned):
        commit_files.write_commit(descriptor, _snapshot(2, w=torch.ones(3)), lambda: True)
    assert [path.name for path in folder.iterdir()] == [file_name(0, 1)]


@pytest.mark.parametrize(
    "kind", ["link", "writable", "fifo", pytest.param("stranger", marks=pytest.mark.root)]
)
def test_nothing_of_strangers_is_read(tmp_path: Path, kind: str) -> None:
    """Links, special files, files that others write or own: refused before a byte of them is read."""
    path = _write(tmp_path / "c", _snapshot())
    if kind == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "writable":
        path.chmod(0o622)
    elif kind == "fifo":
        path.unlink()
        os.mkfifo(path, 0o600)
    else:
        os.chown(path, 12345, -1)
    with pytest.raises(NotAllowed) as caught:
        _read(path)
    assert caught.value.code == "HW-COMMIT-002"
