# SPDX-License-Identifier: Apache-2.0
"""Each sample once, gradients by samples, batch rules: in worlds of real Horovod processes."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horowatt.elastic.folder import JobFolder
from horowatt.elastic.hostfile import publish
from horowatt.elastic.sampling import LrRule, Settings, plan
from horowatt.errors import InvalidInput
from horowatt.records import BatchRule, LauncherKind, LauncherStatus, LaunchSpec, Lease, SlotsFile
from horowatt.wire import decode

PATIENCE_S = 150.0
"""Only how long a broken test waits; nothing is asserted about time."""


# ------------------------------------------------------------------------------------------- plan


@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 40), st.booleans())
def test_a_plan_deals_each_sample_once_in_equal_steps(
    remaining: int, width: int, batch: int, drop: bool
) -> None:
    """All workers make the same steps, shares differ by at most one, weights are those of the samples."""
    made = plan(remaining, width, batch, drop_last=drop)
    dealt: list[int] = []
    uneven = set()
    for step in range(made.steps):
        shares = [made.share(step, rank) for rank in range(width)]
        size = made.size(step)
        assert sum(shares) == size > 0
        assert max(shares) - min(shares) <= 1
        assert sum(made.weight(step, rank) for rank in range(width)) == pytest.approx(width)
        if len(set(shares)) > 1:
            uneven.add(step)
        begin, end = made.done(step), made.done(step + 1)
        drawn: list[int] = []
        for rank in range(width):
            positions = made.positions(step, rank)
            assert len(positions) == max(1, shares[rank]), "padding is one sample"
            assert all(begin <= position < end for position in positions)
            drawn += positions if shares[rank] else []
        assert sorted(drawn) == list(range(begin, end))
        dealt += drawn
    assert sorted(dealt) == list(range(made.dealt))
    assert made.dealt == (remaining // batch * batch if drop else remaining)
    assert made.first_uneven == min(uneven, default=made.steps)


@given(st.integers(1, 120), st.integers(1, 30), st.data())
def test_resizes_in_the_middle_leave_nothing_out(samples: int, batch: int, data: st.DataObject) -> None:
    """However often the width changes, what is processed stays a prefix and ends at the whole epoch."""
    processed = 0
    while processed < samples:
        width = data.draw(st.integers(1, 5))
        made = plan(samples - processed, width, batch * width)
        steps = data.draw(st.integers(1, made.steps))
        before = processed
        processed += made.done(steps)
        assert before < processed <= samples


def test_settings_come_from_the_job_and_its_environment() -> None:
    """Variables name the rules; a typing error ends the job instead of training by another rule."""
    assert Settings.of_job(None, {}) == Settings()
    found = Settings.of_job(None, {"HOROWATT_LR_RULE": "sqrt", "HOROWATT_LR_WIDTH": "4"})
    assert (found.lr_rule, found.lr_width) == (LrRule.SQRT, 4)
    assert found.lr_rule.factor(9) == 3.0
    for wrong in ({"HOROWATT_LR_RULE": "Linear"}, {"HOROWATT_LR_WIDTH": "0"}, {"HOROWATT_LOSS": "x"}):
        with pytest.raises(InvalidInput) as caught:
            Settings.of_job(None, wrong)
        assert caught.value.code == "HW-DATA-001"


# ----------------------------------------------------------------------------------- fixed worlds

WORLD = """
import contextlib, copy, io, os, random, sys
from pathlib import Path
from horowatt.elastic import horovod_fixes, import_hooks, sampling
from horowatt.elastic.counters import CountersWriter
from horowatt.elastic.throughput import StepMeter
from horowatt.records import BatchRule
counters = CountersWriter(Path(sys.argv[1]) / ("counters-" + os.environ["HOROVOD_RANK"]))
meter = StepMeter(counters)
import_hooks.install(import_hooks.merged(
    meter.hooks(),
    horovod_fixes.worker_hooks(on_world=meter.enter_world, on_leave=lambda: None, uncounted=meter.uncounted),
    sampling.hooks(sampling.Settings.of_job(None, os.environ)),
))
import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler
from horowatt import training
torch.set_num_threads(1)
hvd.init()
RANK, WIDTH = hvd.rank(), hvd.size()
everybody = hvd.allgather_object

class Numbers(Dataset):
    def __init__(self, samples): self.samples = samples
    def __len__(self): return self.samples
    def __getitem__(self, index):
        return torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64), index

def inputs_of(indices):
    return torch.stack([Numbers(1000)[index][0] for index in indices])

def linear():
    torch.manual_seed(5)
    return nn.Linear(4, 2).double()

def loss_of(model, x, index):
    out = model(index % 7) if isinstance(model, nn.Embedding) else model(x)
    return (out.pow(2) + out).sum(dim=1).mean()

def loader_of(samples, batch, **options):
    data = Numbers(samples)
    sampler = hvd.elastic.ElasticSampler(data, seed=3)
    return sampler, DataLoader(data, batch_size=batch, sampler=sampler, **options)

def order(samples, epoch):
    indices = list(range(samples))
    random.Random(3 + epoch).shuffle(indices)
    return indices
"""


def _run_world(tmp_path: Path, width: int, body: str, **variables: str) -> None:
    """Run a script on ``width`` workers of one static world, and require all of them to succeed."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    slots = get_host_assignments(parse_hosts(f"localhost:{width}"), width)
    server = RendezvousServer()
    port = server.start()
    server.init(slots)
    script = tmp_path / "world.py"
    script.write_text(WORLD + textwrap.dedent(body))
    common = {
        **os.environ,
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_CYCLE_TIME": "0.2",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    workers: list[subprocess.Popen[bytes]] = []
    output = tmp_path / "output"
    try:
        for slot in slots:
            place = {
                f"HOROVOD_{name}": str(getattr(slot, name.lower()))
                for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
            }
            command = [sys.executable, str(script), str(tmp_path)]
            with output.open("ab") as file:
                workers.append(
                    subprocess.Popen(command, env={**common, **place}, stdout=file, stderr=subprocess.STDOUT)
                )
        deadline_s = time.monotonic() + PATIENCE_S
        # One that fails leaves the others waiting for it.
        while not any(worker.poll() for worker in workers) and time.monotonic() < deadline_s:
            if all(worker.poll() == 0 for worker in workers):
                break
            time.sleep(0.05)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        server.stop()
        server._httpd.server_close()
    assert [worker.returncode for worker in workers] == [0] * width, output.read_text()


EPOCHS = """
# Ten samples: each is drawn once, all workers make the same steps, padding is known as such.
for workers in (0, 2):
    sampler, loader = loader_of(10, 2, num_workers=workers, persistent_workers=workers > 0)
    for epoch in range(2):
        drawn, steps = [], 0
        for number, (x, index) in enumerate(loader):
            steps += 1
            drawn += [] if training.is_padding() else index.tolist()
            sampler.record_batch(number, 1000)
        assert len(set(everybody((steps, len(loader), sampler.processed_num)))) == 1
        assert steps == len(loader) == -(-10 // (2 * WIDTH)) and sampler.processed_num == 10
        assert sorted(sum(everybody(drawn), [])) == list(range(10)), drawn
        assert set(sampler.state_dict()) == {"epoch", "processed_num"}
        sampler.set_epoch(epoch + 1)

# What an incomplete last step is dropped leaves, is left out and not counted as trained.
sampler, loader = loader_of(23, 4, drop_last=True)
for number, (x, index) in enumerate(loader):
    assert len(index) == 4
    sampler.record_batch(number, len(index))
assert sampler.processed_num == 23 // (4 * WIDTH) * 4 * WIDTH

# Batches made by something of the user's own, whose padding cannot be known.
class Pairs:
    def __init__(self, sampler): self.sampler = sampler
    def __iter__(self):
        indices = list(self.sampler)
        return iter([indices[at:at + 2] for at in range(0, len(indices), 2)])
sampler, _ = loader_of(10, 2)
drawn = []
for number, (x, index) in enumerate(DataLoader(sampler.dataset, batch_sampler=Pairs(sampler))):
    drawn += index.tolist()
    sampler.record_batch(number, len(index))
    assert sampler.processed_num == min(10, len(drawn) * WIDTH)
assert set(sum(everybody(drawn), [])) == set(range(10)) and len(drawn) == -(-10 // WIDTH)

# Workers whose loaders disagree use the batch of rank 0, and say so.
sampler, loader = loader_of(12, 3 if RANK == 0 else 5)
if RANK == 0:
    next(iter(loader))
state = hvd.elastic.TorchState(linear(), sampler=sampler)
state.sync()
said = io.StringIO()
with contextlib.redirect_stderr(said):
    drawn = [index.tolist() for _, index in loader]
assert sorted(sum(everybody(sum(drawn, [])), [])) == list(range(12)) and len(drawn[0]) == 3
assert ("batch size 3 of rank 0" in said.getvalue()) == (RANK > 0)

# A sampler that does not know of resizes is spoken of, once.
os.environ["HOROVOD_ELASTIC"] = "1"
stock = DataLoader(Numbers(8), sampler=DistributedSampler(Numbers(8), num_replicas=WIDTH, rank=RANK))
said = io.StringIO()
with contextlib.redirect_stderr(said):
    list(stock), list(stock)
assert said.getvalue().count("DistributedSampler") == 1
"""

GRADIENTS = """
# Gradients are those of one process with the whole batch, however they are reduced.
def train(samples, batch, accumulate=1, ahead=0, make=linear, spoil=False, tolerance=1e-12, sums=False,
          **options):
    dealer.settings = sampling.Settings(loss=sampling.Loss.SUM if sums else sampling.Loss.MEAN)
    model = make()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(),
        backward_passes_per_step=accumulate, **options)
    sampler, loader = loader_of(samples, batch)
    trained, steps, expected = 0, 0, None
    batches, queue = iter(loader), []
    while True:
        while len(queue) <= ahead and (found := next(batches, None)) is not None:
            queue.append(found)
        if not queue:
            break
        x, index = queue.pop(0)
        padding = trained + RANK >= samples
        indices = sum(everybody([] if padding else index.tolist()), [])
        assert sorted(indices) == sorted(order(samples, 0)[trained:trained + len(indices)])
        trained += len(indices)
        steps += 1
        alone = copy.deepcopy(model)
        whole = loss_of(alone, inputs_of(indices), torch.tensor(indices))
        if sums:
            whole = whole * len(indices) / WIDTH
        gradient = [g.to_dense() for g in torch.autograd.grad(whole, list(alone.parameters()))]
        expected = gradient if expected is None else [a + b for a, b in zip(expected, gradient)]
        loss = loss_of(model, x, index) * (len(index) if sums else 1)
        (loss * float("nan") if spoil and padding else loss).backward()
        sampler.record_batch(0, 0)
        assert sampler.processed_num == trained, (sampler.processed_num, trained)
        if steps % accumulate == 0:
            optimizer.synchronize()
            for parameter, gradient in zip(model.parameters(), expected):
                assert torch.allclose(parameter.grad.to_dense(), gradient, rtol=0, atol=tolerance)
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
            expected = None
    assert trained == samples and not dealer._armed
    return samples

dealer = sampling.dealer()
embedding = lambda: nn.Embedding.from_pretrained(torch.arange(14.0).double().reshape(7, 2) / 9,
                                                 freeze=False, sparse=True)
total = sum([
    train(23, 4),
    train(13, 4, spoil=True),
    train(23, 4, ahead=1),
    train(13, 4, ahead=1, spoil=True),
    train(25, 4, ahead=2, spoil=True),
    train(23, 2, accumulate=2),
    train(13, 4, sums=True, spoil=True),
    train(23, 4, groups=1),
    train(13, 4, make=embedding, spoil=True),
    train(13, 4, make=embedding, sparse_as_dense=True),
    train(23, 4, compression=hvd.Compression.fp16, tolerance=3e-2),
])
assert sum(everybody(counters.samples)) == total, (everybody(counters.samples), total)
train(1, 4, ahead=1, spoil=True)
"""

TOTAL = """
# A fixed batch of all workers gives the parameters of one process, also where the width does not divide it.
def single(samples, total, epochs):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        for at in range(0, samples, total):
            indices = order(samples, epoch)[at:at + total]
            optimizer.zero_grad()
            loss_of(model, inputs_of(indices), torch.tensor(indices)).backward()
            optimizer.step()
    return list(model.parameters())

def same(model, expected):
    for parameter, other in zip(model.parameters(), expected):
        assert torch.allclose(parameter, other, rtol=0, atol=1e-10)

def parts():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

for samples, total in ((23, 7), (9, 2), (24, 6)):
    dealer.settings = sampling.Settings(batch_rule=BatchRule.TOTAL, batch_size=total)
    model, optimizer = parts()
    sampler, loader = loader_of(samples, max(1, total // WIDTH))
    for epoch in range(2):
        for number, (x, index) in enumerate(loader):
            optimizer.zero_grad()
            loss_of(model, x, index).backward()
            optimizer.step()
            sampler.record_batch(number, len(index))
            assert sampler.processed_num == min(samples, (number + 1) * total)
        sampler.set_epoch(epoch + 1)
    same(model, single(samples, total, 2))
dealer.settings = sampling.Settings()

# The same with the loader of Horowatt's own, through a restored commit.
model, optimizer = parts()
loader = training.ElasticLoader(Numbers(23), global_batch=7, seed=3, num_workers=WIDTH % 2)
state = hvd.elastic.TorchState(model, optimizer, loader=loader)
state.sync()
restored = False
while loader.epoch < 2:
    assert len(loader) == -(-(23 - loader.processed) // 7)
    for x, index in loader:
        optimizer.zero_grad()
        loss_of(model, x, index).backward()
        before = loader.processed
        optimizer.step()
        assert loader.processed - before == loader.num_samples_in_step == training.num_samples_in_step()
        assert (not loader.is_padding) == (RANK < loader.num_samples_in_step)
        if loader.processed == 14 and not restored:
            state.restore()
            state.sync()
            assert loader.processed == 7
            restored = True
            break
        if not restored:
            state.commit()
    else:
        loader.set_epoch(loader.epoch + 1)
same(model, single(23, 7, 2))
from horowatt.errors import InvalidInput
for wrong in ({}, {"batch_size": 2, "global_batch": 4}, {"batch_size": 0}):
    try:
        training.ElasticLoader(Numbers(3), **wrong)
    except InvalidInput as error:
        assert error.code == "HW-DATA-002"
    else:
        raise AssertionError(wrong)
"""


@pytest.mark.horovod
@pytest.mark.parametrize("width", [1, 2, 3])
def test_worlds_train_each_sample_once_as_one_process_would(tmp_path: Path, width: int) -> None:
    """Ledger, gradients, counters and parameters on real workers are those of a single process."""
    _run_world(tmp_path, width, GRADIENTS + TOTAL + EPOCHS)


# -------------------------------------------------------------------------------- learning rates

RATES = """
# The width is changed below Horovod, whose world stays one of a single worker.
mpi_ops = sys.modules["horovod.torch.mpi_ops"]
def resize(width, state, sync=True):
    mpi_ops.size = lambda: width
    state.on_reset()
    if sync:
        state.sync()
def rates(group): return [round(group[key], 9) for key in ("lr", "initial_lr")]

for momentum in (0.0, 0.9):
    mpi_ops.size = lambda: 2
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler.optimizer = optimizer
    state = hvd.elastic.TorchState(model, optimizer)
    state.sync()
    assert rates(optimizer.param_groups[0]) == [0.1, 0.1]
    resize(4, state)
    group = optimizer.param_groups[0]
    assert rates(group) == [0.2, 0.2] and scheduler.base_lrs == [0.2] == scheduler.get_last_lr()
    scheduler.step()
    assert rates(group) == [0.1, 0.2]
    state.save()
    resize(1, state)
    assert rates(optimizer.param_groups[0]) == [0.025, 0.05] and scheduler.base_lrs == [0.05]
    # A commit of width 4 is restored at width 2, in this process and in a new one.
    state.restore()
    resize(2, state)
    assert rates(optimizer.param_groups[0]) == [0.05, 0.1] and scheduler.base_lrs == [0.1]
    saved = optimizer.state_dict()
    mpi_ops.size = lambda: 8
    optimizer.load_state_dict(saved)
    state.sync()
    assert rates(optimizer.param_groups[0]) == [0.2, 0.4]

# A script that does it itself, in a callback, is left alone.
mpi_ops.size = lambda: 2
optimizer = torch.optim.SGD(linear().parameters(), lr=0.2)
state = hvd.elastic.TorchState(linear(), optimizer)
state.sync()
def on_reset():
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * mpi_ops.size()
state.register_reset_callbacks([on_reset])
said = io.StringIO()
with contextlib.redirect_stderr(said):
    resize(3, state), resize(6, state)
assert optimizer.param_groups[0]["lr"] == 0.1 * 6
assert said.getvalue().count("reset callback") == 1
"""


@pytest.mark.horovod
def test_learning_rates_follow_the_width_by_the_rule(tmp_path: Path) -> None:
    """Rates, schedulers and restored commits have the rate of the present width; callbacks win."""
    _run_world(tmp_path, 1, RATES, HOROWATT_LR_RULE="linear")


# ---------------------------------------------------------------------------------- elastic jobs

TRAIN = """
from horowatt.elastic import sampling
sampling.dealer()
import json, os, time, uuid
import horovod.torch as hvd
import torch
from horowatt import training
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, Dataset

lease = os.environ["HOROWATT_LEASE_ID"]
Path(f"pid-{lease}").write_text(str(os.getpid()))

class Numbers(Dataset):
    def __len__(self): return 61
    def __getitem__(self, index): return torch.full((4,), index / 61), index

hvd.init()
torch.manual_seed(hvd.rank())
sampler = hvd.elastic.ElasticSampler(Numbers(), seed=3)
loader = DataLoader(Numbers(), batch_size=2, sampler=sampler)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, made=0)
ledger = open(f"ledger-{lease}", "a", buffering=1)
def note(**record):
    ledger.write(json.dumps({"at": time.time(), "epoch": state.epoch, **record}) + "\\n")

@hvd.elastic.run
def train(state):
    world = hvd.broadcast_object(uuid.uuid4().hex)
    note(world=world, begin=sampler.processed_num, width=hvd.size(), rank=hvd.rank())
    while True:
        for number, (x, index) in enumerate(loader):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            before = sampler.processed_num
            note(world=world, before=before, after=before + training.num_samples_in_step(),
                 indices=[] if training.is_padding() else index.tolist(),
                 rate=optimizer.param_groups[0]["lr"])
            optimizer.step()
            sampler.record_batch(number, len(index))
            state.made += 1
            time.sleep(0.02)
            if state.made % 3 == 0:
                note(world=world, commits=sampler.processed_num)
                state.commit()
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        note(world=world, commits=0)
        state.commit()
        if hvd.broadcast_object(Path("stop").exists()):
            break

train(state)
weights = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
assert all(torch.equal(row, weights[0]) for row in weights), weights
"""


class Job:
    """One job under the Horowatt launcher, in a temporary folder."""

    def __init__(self, tmp_path: Path) -> None:
        self.work = tmp_path / "work"
        self.work.mkdir()
        (self.work / "train.py").write_text(TRAIN)
        self.folder = JobFolder(tmp_path / "job")
        self.folder.root.mkdir(mode=0o700)
        self.spec = LaunchSpec(
            job_id="j",
            name="j",
            tenant="t",
            uid=os.getuid(),
            gid=os.getgid(),
            username="u",
            launcher=LauncherKind.HOROWATT,
            command=("python", "train.py"),
            environment={"OMP_NUM_THREADS": "1", "HOROWATT_LR_RULE": "linear"},
            working_dir=str(self.work),
            virtual_env=None,
            min_width=1,
            max_width=4,
            batch_rule=BatchRule.PER_WORKER,
            batch_size=None,
        )
        self.generation = 0
        self.launcher: subprocess.Popen[bytes] | None = None

    def publish(self, *lease_ids: str) -> None:
        self.generation += 1
        leases = tuple(
            Lease(
                lease_id=lease_id,
                job_id="j",
                node="n",
                address="127.0.0.1",
                gpu_uuid=f"CPU-n-{lease_id}",
                gpu_type="t",
                slot_index=index,
                simulated=False,
            )
            for index, lease_id in enumerate(lease_ids)
        )
        slots = SlotsFile(
            job_id="j",
            generation=self.generation,
            uid=os.getuid(),
            leases=leases,
            published_at_s=time.time(),
        )
        publish(self.folder, self.spec, slots, os.getuid(), os.getgid())

    def start(self) -> None:
        command = [sys.executable, "-m", "horowatt.elastic.launcher", str(self.folder.root), "--attempt", "1"]
        self.launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def records(self) -> list[dict[str, Any]]:
        """Return the lines of all ledgers in the order of their times, each with its lease."""
        lines = []
        for path in self.work.glob("ledger-*"):
            whole = path.read_text().rpartition("\n")[0]
            lines += [{"lease": path.name, **json.loads(line)} for line in whole.splitlines()]
        return sorted(lines, key=lambda record: record["at"])

    def wait_until_it_trains_at(self, width: int, steps: int = 4) -> None:
        def trains() -> bool:
            records = self.records()
            begun = [record for record in records if "begin" in record]
            if not begun or begun[-1]["width"] != width:
                return False
            world = begun[-1]["world"]
            made = [record for record in records if record["world"] == world and "before" in record]
            return len(made) >= steps * width

        self.wait(trains, f"training at width {width}")

    def wait(self, true: Callable[[], bool], what: str) -> None:
        assert self.launcher is not None
        deadline_s = time.monotonic() + PATIENCE_S
        while not true():
            if time.monotonic() > deadline_s or self.launcher.poll() is not None:
                pytest.fail(f"{what} did not happen\n{self.story()}")
            time.sleep(0.05)

    def end(self) -> LauncherStatus:
        (self.work / "stop").touch()
        assert self.launcher is not None
        self.launcher.wait(PATIENCE_S)
        return decode(self.folder.launcher_json.read_bytes(), LauncherStatus)

    def story(self) -> str:
        logs = [
            self.folder.launcher_log,
            self.folder.events,
            *sorted(self.folder.leases.glob("*/output.log")),
        ]
        return "\n".join(f"--- {log}\n{log.read_text()}" for log in logs if log.exists())

    def clean_up(self) -> None:
        if self.launcher is not None and self.launcher.poll() is None:
            self.launcher.terminate()
            try:
                self.launcher.wait(30)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
                self.launcher.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.clean_up()


def _order(epoch: int) -> list[int]:
    indices = list(range(61))
    random.Random(3 + epoch).shuffle(indices)  # noqa: S311 - the order that Horovod's sampler makes
    return indices


def _check_ledger(records: list[dict[str, Any]], crashed: set[int]) -> dict[int, list[int]]:
    """Go through all worlds and return what was trained for good, by epoch.

    Each step of a world must have trained exactly the next slice of the epoch's order, and each world must
    begin where the one before it ended; after a crash, at the last commit of one who survived it.

    Args:
        crashed: Numbers of the worlds that ended in a crash.
    """
    worlds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        worlds[record["world"]].append(record)
    trained: dict[int, list[int]] = defaultdict(list)
    expected = {(0, 0)}
    for number, lines in enumerate(worlds.values()):
        begins = {(line["epoch"], line["begin"]) for line in lines if "begin" in line}
        width = next(line["width"] for line in lines if "begin" in line)
        assert len(begins) == 1, (number, begins)
        assert begins <= expected, (number, begins, expected)
        ((epoch, place),) = begins
        # What came after the last commit is trained again.
        for later in [later for later in trained if later >= epoch]:
            trained[later] = trained[later][: place if later == epoch else 0]
        steps: dict[tuple[int, int, int], list[dict[str, Any]]] = defaultdict(list)
        for line in lines:
            if "before" in line:
                steps[line["epoch"], line["before"], line["after"]].append(line)
                assert line["rate"] == pytest.approx(0.001 * width)
        for at, (step, parts) in enumerate(sorted(steps.items())):
            if place == 61:
                epoch, place = epoch + 1, 0
            begin, end = step[1:]
            assert step[:2] == (epoch, place), (number, step, epoch, place)
            dealt = sorted(index for part in parts for index in part["indices"])
            if number not in crashed or at < len(steps) - 1:
                assert len(parts) == width
                assert dealt == sorted(_order(epoch)[begin:end]), (number, step)
            trained[epoch] += _order(epoch)[begin:end]
            place = end
        if number in crashed:
            commits = [line for line in lines if "commits" in line]
            expected = {
                [(line["epoch"], line["commits"]) for line in commits if line["lease"] == lease][-1]
                for lease in {line["lease"] for line in commits}
            }
        else:
            expected = {(epoch, place), (epoch + 1, 0)} if place == 61 else {(epoch, place)}
    return trained


@pytest.mark.horovod
def test_no_sample_is_left_out_or_trained_twice_through_resizes_and_a_crash(job: Job) -> None:
    """1, 2, 3 workers, one of them killed, a new one, 1 worker: the ledger is exact, and rates follow."""
    job.publish("a")
    job.start()
    job.wait_until_it_trains_at(1)
    job.publish("a", "b")
    job.wait_until_it_trains_at(2)
    job.publish("a", "b", "c")
    job.wait_until_it_trains_at(3)
    os.kill(int((job.work / "pid-b").read_text()), signal.SIGKILL)
    job.wait_until_it_trains_at(2)
    job.publish("a", "c", "d")
    job.wait_until_it_trains_at(3)
    job.publish("d")
    job.wait_until_it_trains_at(1)
    status = job.end()
    assert status.exit_code == 0, job.story()
    records = job.records()
    widths = [record["width"] for record in records if record.get("rank") == 0 and "begin" in record]
    assert widths == [1, 2, 3, 2, 3, 1]
    trained = _check_ledger(records, crashed={2})
    assert len(trained) == max(trained) + 1
    assert all(sorted(indices) == list(range(61)) for indices in trained.values())
