# SPDX-License-Identifier: Apache-2.0
"""The job that ``measure.py`` resizes: an ordinary Horovod elastic script, on the GPU where there is one."""

import os
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

BALLAST_BYTES = 1 << 30
"""Held on the GPU, so that what a worker that left gives back is not lost in the noise."""
STEP_S = 0.02

hvd.init()
torch.manual_seed(1)
on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")
ballast = torch.ones(BALLAST_BYTES if on_gpu else 1, dtype=torch.uint8, device=device)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)
Path(f"pid-{os.environ['HOROWATT_LEASE_ID']}").write_text(str(os.getpid()), encoding="ascii")


@hvd.elastic.run
def train(state: "hvd.elastic.TorchState") -> None:
    """Train until the file ``stop`` is there, which rank 0 looks for."""
    while True:
        optimizer.zero_grad()
        inputs = torch.randn(64, 256, device=device)
        nn.functional.cross_entropy(
            model(inputs), torch.zeros(64, dtype=torch.long, device=device)
        ).backward()
        optimizer.step()
        state.step += 1
        time.sleep(STEP_S)
        state.commit()
        if state.step % 10 == 0 and hvd.broadcast_object(Path("stop").exists()):
            break


train(state)
weights = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
assert all(torch.equal(row, weights[0]) for row in weights)
print("identical on", len(weights), "after", state.step, "steps on", device, flush=True)
