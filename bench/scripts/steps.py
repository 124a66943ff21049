# SPDX-License-Identifier: Apache-2.0
"""An ordinary Horovod Elastic script that notes the end of each of its steps: what pauses are read from.

It runs unchanged under plain ``horovodrun`` and under the Horowatt launcher, until it is ended. Each
process appends lines ``<CLOCK_MONOTONIC, s> <world size> <step>`` to ``FOLDER/steps-<pid>``; the clock is
the same for all processes of a machine. ``--setup-s`` stands for what scripts do between ``hvd.init`` and
training (opening data, building a large model), ``--device-s`` for the part of a step that a CPU waits
for its accelerator.
"""

import argparse
import os
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 32
SAMPLES = 4096
BYTES_PER_PARAMETER = 12
"""A float32 and the two moments of Adam."""
BROADCAST_STEP = 3
BROADCASTS = 3


def parse_arguments():
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--setup-s", type=float, default=3.0)
    parser.add_argument("--device-s", type=float, default=0.005)
    parser.add_argument("--commit-every", type=int, default=1, help="steps")
    parser.add_argument("--state-mb", type=float, default=0.0, help="model and optimizer, 10^6 bytes")
    parser.add_argument("--bandwidth", action="store_true", help="time broadcasts of as many bytes")
    parser.add_argument("--busy-s", type=float, default=0.0, help="CPU time of a step beside the model's")
    return parser.parse_args()


def make_model(state_mb):
    """Return a network whose parameters and Adam moments are about ``state_mb`` in all."""
    side = int((state_mb * 1e6 / BYTES_PER_PARAMETER / 4) ** 0.5)
    if not side:
        return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 2))
    layers = [nn.Linear(FEATURES, side)]
    for _ in range(4):
        layers += [nn.ReLU(), nn.Linear(side, side)]
    return nn.Sequential(*layers, nn.Linear(side, 2))


def write(descriptor, text):
    """Append one line whole, so that nothing is lost when the process is killed."""
    os.write(descriptor, text.encode() + b"\n")


def busy(seconds):
    """Spend CPU time as a step's Python does."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def time_broadcasts(folder, num_bytes):
    """Note how long a broadcast of ``num_bytes`` takes in this world."""
    tensor = torch.ones(int(num_bytes) // 4)
    for _ in range(BROADCASTS):
        hvd.allreduce(torch.zeros(1), name="together")
        begin_s = time.monotonic()
        hvd.broadcast_(tensor, root_rank=0, name="bandwidth")
        taken_s = time.monotonic() - begin_s
        with (folder / f"broadcasts-{os.getpid()}").open("a") as log:
            log.write(f"{hvd.rank()} {hvd.size()} {tensor.numel() * 4} {taken_s:.6f}\n")


@hvd.elastic.run
def train(state, loader, options, log):
    """Train until the process is ended."""
    in_world = 0
    while True:
        for number, (inputs, labels) in enumerate(loader):
            state.optimizer.zero_grad()
            functional.cross_entropy(state.model(inputs), labels).backward()
            time.sleep(options.device_s)
            busy(options.busy_s)
            state.optimizer.step()
            state.sampler.record_batch(number, len(inputs))
            state.step += 1
            write(log, f"{time.monotonic():.6f} {hvd.size()} {state.step}")
            in_world += 1
            if options.bandwidth and in_world == BROADCAST_STEP and hvd.size() > 1:
                time_broadcasts(options.folder, options.state_mb * 1e6)
            if state.step % options.commit_every == 0:
                state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


def main():
    """Set up, and train."""
    options = parse_arguments()
    hvd.init()
    torch.manual_seed(1)
    time.sleep(options.setup_s)
    inputs = torch.randn(SAMPLES, FEATURES)
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    sampler = hvd.elastic.ElasticSampler(data, seed=1)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = make_model(options.state_mb)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0)
    options.folder.mkdir(parents=True, exist_ok=True)
    log = os.open(options.folder / f"steps-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    train(state, loader, options, log)


if __name__ == "__main__":
    main()
