# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits with a wide network and small batches: a script bound by communication.

Each step exchanges the gradients of 300,000 parameters for a few samples, so more workers help it
little. Otherwise it is an ordinary Horovod Elastic script, and it runs alone as well:

    python examples/digits_wide.py --epochs 5
"""

import argparse
import math
import sys

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

TEST_SHARE = 0.2
BATCHES_PER_COMMIT = 5


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per worker and step")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="for one worker")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def pick_device():
    """Return this worker's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank())
    return torch.device("cuda")


def load_data(seed, device):
    """Return the training set, and the test images and labels; the same on every worker."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    num_test = int(len(images) * TEST_SHARE)
    test, train = order[:num_test], order[num_test:]
    images, labels = images.to(device), labels.to(device)
    return TensorDataset(images[train], labels[train]), images[test], labels[test]


def make_model():
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def learning_rate(arguments):
    """Return the learning rate for the present number of workers: square-root scaling."""
    return arguments.learning_rate * math.sqrt(hvd.size())


@hvd.elastic.run
def train(state, loader, arguments):
    # After a resize this is entered again: the sampler then holds what the epoch has left.
    while state.epoch < arguments.epochs:
        state.model.train()
        for number, (images, labels) in enumerate(loader):
            state.optimizer.zero_grad()
            functional.cross_entropy(state.model(images), labels).backward()
            state.optimizer.step()
            state.sampler.record_batch(number, len(images))
            state.batch += 1
            if state.batch % BATCHES_PER_COMMIT == 0:
                state.commit()
        if hvd.rank() == 0:
            print(f"epoch {state.epoch + 1}/{arguments.epochs} on {hvd.size()} workers", flush=True)
        state.epoch += 1
        state.batch = 0
        state.sampler.set_epoch(state.epoch)
        state.commit()


def accuracy(model, images, labels):
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()


def main():
    arguments = parse_arguments()
    hvd.init()
    torch.manual_seed(arguments.seed)
    device = pick_device()
    dataset, test_images, test_labels = load_data(arguments.seed, device)
    sampler = hvd.elastic.ElasticSampler(dataset, seed=arguments.seed)
    loader = DataLoader(dataset, batch_size=arguments.batch_size, sampler=sampler)

    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate(arguments), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)

    def on_reset():
        # The batch of all workers together has changed, and the learning rate follows it.
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(arguments)

    state.register_reset_callbacks([on_reset])
    train(state, loader, arguments)
    if hvd.rank() == 0:
        print(f"accuracy={accuracy(model, test_images, test_labels):.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
