# SPDX-License-Identifier: Apache-2.0
"""What counting costs: the same training loop with and without Horowatt's instrumentation, interleaved.

    python bench/throughput_overhead.py

Trains the network of ``examples/digits_mlp.py`` on its data, through a ``DataLoader`` and Horovod's
optimizer with one worker and one CPU thread, in many short rounds: plain, counting, plain. Prints one line
``figure  measured  target`` with the median of the ratios of CPU time per step; exits 1 when it misses the
target. On a busy machine the ratio is known to about a percent only; the line above it tells how much the
plain rounds differ from each other. What is counted runs with cold caches, once per step, so steps shorter
than these pay a larger share.
"""
# ruff: noqa: SLF001 - taking the instrumentation off again is not something the product does

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, TensorDataset, dataloader

from horowatt.elastic.counters import CountersWriter
from horowatt.elastic.throughput import StepMeter

TARGET_RATIO = 1.01
WARM_UP_ROUNDS = 10


def make_round(batch_size: int) -> Callable[[], float]:
    """Return a function that trains one epoch and returns the CPU time per step, seconds."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    data = TensorDataset(images, torch.tensor(digits.target))
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def train() -> float:
        begin_s = time.process_time()
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        return (time.process_time() - begin_s) / len(loader)

    return train


class Instrumentation:
    """Horowatt's hooks, which can be put on and taken off."""

    def __init__(self, counters: CountersWriter) -> None:
        self._plain = dataloader._BaseDataLoaderIter.__next__
        for name, hook in StepMeter(counters).hooks().items():
            hook(sys.modules[name])
        self._counting = dataloader._BaseDataLoaderIter.__next__
        registries = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
        self._hooks = [(registry, dict(registry)) for registry in registries]

    def put(self, *, on: bool) -> None:
        """Instrument PyTorch, or leave it as it came."""
        dataloader._BaseDataLoaderIter.__next__ = self._counting if on else self._plain
        for registry, hooks in self._hooks:
            registry.clear()
            if on:
                registry.update(hooks)


def main() -> int:
    """Measure and print; return 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--triples", type=int, default=200, help="rounds with counting")
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    train = make_round(options.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        counters = CountersWriter(Path(folder) / "counters")
        instrumentation = Instrumentation(counters)
        ratios, controls, counted_s, plain_s = [], [], [], []
        for _ in range(WARM_UP_ROUNDS):
            train()
        for _ in range(options.triples):
            # Counting stands between two plain rounds, so that a drift of the machine cancels out.
            times_s = []
            for on in (False, True, False):
                instrumentation.put(on=on)
                times_s.append(train())
            before_s, between_s, after_s = times_s
            ratios.append(2 * between_s / (before_s + after_s))
            controls.append(after_s / before_s)
            counted_s.append(between_s)
            plain_s += [before_s, after_s]
        assert counters.steps > 0
    ratio, control = statistics.median(ratios), statistics.median(controls)
    print(
        f"CPU time per step: {statistics.median(plain_s) * 1e6:.1f} us without, "
        f"{statistics.median(counted_s) * 1e6:.1f} us with counting; "
        f"the plain rounds differ from each other by a factor of {control:.4f}"
    )
    print(f"throughput-overhead  {ratio:.4f}  {TARGET_RATIO}")
    return int(ratio > TARGET_RATIO)


if __name__ == "__main__":
    sys.exit(main())
