# SPDX-License-Identifier: Apache-2.0
"""Counting steps and samples of real PyTorch training, in a process of its own each time."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from horowatt.elastic.counters import Counters, read_counters
from horowatt.elastic.throughput import DeclaredBatch, leading_dimension

PRELUDE = """
import sys
from pathlib import Path
from horowatt.elastic import horovod_fixes, import_hooks
from horowatt.elastic.counters import CountersWriter
from horowatt.elastic.throughput import DeclaredBatch, StepMeter
declared = {declared}
resumed = []
meter = StepMeter(CountersWriter(Path(sys.argv[1])), declared, None, lambda *times: resumed.append(times))
import_hooks.install({{
    **meter.hooks(),
    **horovod_fixes.worker_hooks(
        on_world=meter.enter_world, on_leave=lambda: None, uncounted=meter.uncounted
    ),
}})
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
data = TensorDataset(torch.randn(100, 4), torch.randint(0, 2, (100,)))
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def loss(batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
def step(batch):
    optimizer.zero_grad()
    loss(batch).backward()
    optimizer.step()
"""


def _count(tmp_path: Path, body: str, declared: str = "None") -> Counters:
    script = PRELUDE.format(declared=declared) + textwrap.dedent(body) + "\nmeter._counters.close()\n"
    subprocess.run([sys.executable, "-c", script, tmp_path / "counters"], check=True, timeout=120)
    counters = read_counters(tmp_path / "counters", os.getuid())
    assert counters is not None
    return counters


def test_steps_and_samples_of_a_plain_loop_are_exact(tmp_path: Path) -> None:
    """Two epochs of 100 samples in batches of 16 are 14 steps and 200 samples, short batches included."""
    counters = _count(
        tmp_path,
        """
        for epoch in range(2):
            for batch in DataLoader(data, batch_size=16, shuffle=True):
                step(batch)
        """,
    )
    assert (counters.steps, counters.samples, counters.epoch_samples) == (14, 200, 100)


def test_workers_of_the_loader_do_not_change_the_count(tmp_path: Path) -> None:
    """Batches that other processes load, persistently, count once."""
    counters = _count(
        tmp_path,
        """
        loader = DataLoader(data, batch_size=16, num_workers=2, persistent_workers=True)
        for epoch in range(2):
            for batch in loader:
                step(batch)
        """,
    )
    assert (counters.steps, counters.samples) == (14, 200)


def test_a_step_under_horovods_optimizer_counts_once(tmp_path: Path) -> None:
    """Neither the step inside the distributed step nor those of a state broadcast are training."""
    counters = _count(
        tmp_path,
        """
        import horovod.torch as hvd
        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_optimizer_state(optimizer, 0)
        for batch in DataLoader(data, batch_size=10):
            step(batch)
        assert len(resumed) == 1 and resumed[0][0] is None, resumed
        """,
    )
    assert (counters.steps, counters.samples, counters.rank, counters.world_size) == (10, 100, 0, 1)


def test_evaluation_does_not_count(tmp_path: Path) -> None:
    """Evaluations before, between and within epochs add nothing, with and without gradients."""
    counters = _count(
        tmp_path,
        """
        def evaluate(limit=None):
            with torch.no_grad():
                for number, batch in enumerate(DataLoader(data, batch_size=50)):
                    loss(batch)
                    if number == limit:
                        break
        def careless():
            for batch in DataLoader(data, batch_size=50):
                loss(batch)
        careless()
        evaluate()
        for epoch in range(2):
            for batch in DataLoader(data, batch_size=20):
                evaluate(0)
                careless()
                step(batch)
            evaluate()
        """,
    )
    assert (counters.steps, counters.samples, counters.epoch_samples) == (10, 200, 100)


def test_accumulated_and_prefetched_batches_count_once(tmp_path: Path) -> None:
    """All batches behind one step count, and a batch fetched ahead is neither lost nor doubled."""
    counters = _count(
        tmp_path,
        """
        for number, batch in enumerate(DataLoader(data, batch_size=10)):
            loss(batch).backward()
            if number % 5 == 4:
                optimizer.step()
        iterator = iter(DataLoader(data, batch_size=25))
        ahead = next(iterator)
        while ahead is not None:
            batch, ahead = ahead, next(iterator, None)
            step(batch)
        """,
    )
    assert (counters.steps, counters.samples) == (6, 200)


def test_a_step_that_raised_does_not_stop_the_counting(tmp_path: Path) -> None:
    """After an exception inside a step the next steps count as before."""
    counters = _count(
        tmp_path,
        """
        class Failing(torch.optim.SGD):
            fail = True
            def step(self, closure=None):
                if self.fail:
                    raise RuntimeError
                return super().step(closure)
        optimizer = Failing(model.parameters(), lr=0.1)
        loader = DataLoader(data, batch_size=50)
        for batch in loader:
            try:
                step(batch)
            except RuntimeError:
                pass
        Failing.fail = False
        for batch in loader:
            step(batch)
        """,
    )
    assert counters.steps == 2


def test_samples_without_a_loader_are_absent_not_zero(tmp_path: Path) -> None:
    """A script that slices its data by hand has steps but no samples, even if it evaluates by a loader."""
    body = """
        for number in range(5):
            step(data[:20])
            with torch.no_grad():
                for batch in DataLoader(data, batch_size=50):
                    loss(batch)
        """
    counters = _count(tmp_path, body)
    assert (counters.steps, counters.samples, counters.epoch_samples) == (5, None, None)
    declared = _count(tmp_path, body, "DeclaredBatch(20, total=False)")
    assert (declared.steps, declared.samples) == (5, 100)


def test_a_loader_is_believed_before_a_declaration(tmp_path: Path) -> None:
    """What can be counted is counted."""
    counters = _count(
        tmp_path,
        """
        for batch in DataLoader(data, batch_size=30):
            step(batch)
        """,
        "DeclaredBatch(64, total=True)",
    )
    assert (counters.steps, counters.samples) == (4, 100)


def test_streams_and_batches_of_other_shapes_count(tmp_path: Path) -> None:
    """Iterable data sets have samples but no length; dictionaries and opaque batches count too."""
    counters = _count(
        tmp_path,
        """
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(list(data))
        for batch in DataLoader(Stream(), batch_size=25):
            step(batch)
        class Opaque:
            def __init__(self, items): self.items = items
        for batch in DataLoader(data, batch_size=25, collate_fn=Opaque):
            step([torch.stack([x for x, _ in batch.items]), torch.stack([y for _, y in batch.items])])
        turned = lambda items: {"x": torch.stack([x for x, _ in items], dim=1)}
        for batch in DataLoader(TensorDataset(torch.randn(10, 40), torch.zeros(10)), 2, collate_fn=turned):
            step(data[:2])
        """,
    )
    assert (counters.steps, counters.samples) == (4 + 4 + 5, 100 + 100 + 10)


def test_a_script_without_torch_never_loads_it(tmp_path: Path) -> None:
    """Instrumentation imports nothing that the script does not import."""
    script = """
import sys
from pathlib import Path
from horowatt.elastic import horovod_fixes, import_hooks
from horowatt.elastic.counters import CountersWriter
from horowatt.elastic.throughput import StepMeter
meter = StepMeter(CountersWriter(Path(sys.argv[1])))
import_hooks.install(meter.hooks())
import json
assert not {"torch", "horovod", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script, tmp_path / "counters"], check=True, timeout=60)


@pytest.mark.parametrize("size", range(1, 6))
def test_the_shares_of_a_total_batch_add_up(size: int) -> None:
    """Whatever the width, the workers' samples of one step are the declared total."""
    total = DeclaredBatch(64, total=True)
    assert sum(total.of_worker(rank, size) for rank in range(size)) == 64
    assert DeclaredBatch(64, total=False).of_worker(0, size) == 64


class _Shaped:
    def __init__(self, *shape: int) -> None:
        self.shape = shape


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (_Shaped(8, 3), 8),
        (_Shaped(), None),
        ([_Shaped(8, 3), _Shaped(8)], 8),
        ((_Shaped(), [_Shaped(4)]), 4),
        ({"x": {"y": _Shaped(5)}}, 5),
        (["a", "b", "c"], 3),
        ([1, 2], 2),
        ([], None),
        ({}, None),
        ("text", None),
        (None, None),
        ([[[[[[_Shaped(3)]]]]]], None),
    ],
)
def test_the_leading_dimension_of_a_batch(batch: object, size: int | None) -> None:
    """The first thing with a first dimension tells the samples of a batch."""
    assert leading_dimension(batch) == size
