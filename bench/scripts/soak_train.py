# SPDX-License-Identifier: Apache-2.0
"""The job of the soak: dropout, momentum and weight decay, and a ledger of all that it does.

Each process appends JSON lines to ``FOLDER/ledger-<lease>-<pid>``, each in one write, so that a killed
process loses none. A line says what is about to be done, because only that can be known of a process that
is killed while it does it; whether it counts follows from where the next world begins.
"""

import argparse
import hashlib
import json
import os
import sys
import time
import uuid
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from horowatt.training import is_padding

FEATURES = 16


class Numbers(Dataset):
    """Samples that carry their own index."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(count, FEATURES, generator=generator)
        self.labels = (self.inputs.sum(dim=1) > 0).long()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index], index


class Ledger:
    """The lines of one process."""

    def __init__(self, folder):
        lease = os.environ["HOROWATT_LEASE_ID"]
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(folder / f"ledger-{lease}-{os.getpid()}", flags)

    def write(self, kind, **fields):
        """Append one line."""
        os.write(self._file, json.dumps({"kind": kind, "at_s": time.time(), **fields}).encode() + b"\n")


def digest(model, optimizer):
    """Return a hash of all parameters and of the optimizer's state."""
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.detach().numpy().tobytes())
        for _, value in sorted(optimizer.state.get(parameter, {}).items()):
            if torch.is_tensor(value):
                hashed.update(value.numpy().tobytes())
    return hashed.hexdigest()[:16]


@hvd.elastic.run
def train(state, loader, options, ledger):
    """Train until the file ``stop`` is there at the end of an epoch."""
    world = hvd.broadcast_object(str(uuid.uuid4()), name="world")
    ledger.write(
        "world",
        world=world,
        step=state.step,
        epoch=state.epoch,
        rank=hvd.rank(),
        size=hvd.size(),
        digest=digest(state.model, state.optimizer),
    )
    while not state.done:
        for number, (inputs, labels, indices) in enumerate(loader):
            mine = [] if is_padding() else indices.tolist()
            ledger.write("step", world=world, step=state.step, epoch=state.epoch, indices=mine)
            state.optimizer.zero_grad()
            functional.cross_entropy(state.model(inputs), labels).backward()
            time.sleep(options.device_s)
            state.optimizer.step()
            state.sampler.record_batch(number, len(indices))
            state.step += 1
            if state.step % options.commit_every == 0:
                state.commit()
                ledger.write(
                    "commit", world=world, step=state.step, digest=digest(state.model, state.optimizer)
                )
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.done = bool(hvd.broadcast_object((options.folder / "stop").exists(), name="stop"))
        state.commit()
        ledger.write("commit", world=world, step=state.step, digest=digest(state.model, state.optimizer))


def main():
    """Train, then compare the parameters of all workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=601)
    parser.add_argument("--device-s", type=float, default=0.015)
    parser.add_argument("--commit-every", type=int, default=5, help="steps")
    options = parser.parse_args()
    hvd.init()
    # Replicas that are not synchronised differ from the start.
    torch.manual_seed(1000 + os.getpid())
    data = Numbers(options.samples)
    sampler = hvd.elastic.ElasticSampler(data, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0, done=False)
    ledger = Ledger(options.folder)
    train(state, loader, options, ledger)
    ledger.write("end", step=state.step, rank=hvd.rank(), size=hvd.size(), digest=digest(model, optimizer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
