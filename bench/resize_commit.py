# SPDX-License-Identifier: Apache-2.0
"""What a durable commit costs the training: the same steps with and without one being written, interleaved.

    python bench/resize_commit.py [--json FILE] [--megabytes 300] [--rounds 11] [--folder DIR]

Trains a network whose parameters and Adam state are 300 MB, one worker, one CPU thread, and calls
``state.commit()`` as scripts do. A round is one commit and some steps: in some rounds that commit goes to
disk, in others it stays in memory, as Horovod has it. The difference, for the same number of steps, is how
long the training was blocked: in ``commit()`` itself, and because the writing thread takes turns with it.
It is compared with a blocking save of the same state to the same folder: ``torch.save`` and ``fsync``.

Prints ``figure  measured  target`` and writes JSON beside it; exits 1 when the target is missed, or when the
machine is so busy that rounds of the same kind differ by more than what is measured.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

TARGET_SHARE = 0.10
NOISE = 3.0
"""By how much of the target rounds may differ from each other: the median of several is closer."""
STEPS = 8
"""Least number of steps in a round; a round with a commit to disk lasts until it is there."""


class Training:
    """One worker with a state of a given size."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        # Before torch is imported: it reads this once.
        os.environ["OMP_NUM_THREADS"] = "1"
        from horowatt.elastic import import_hooks
        from horowatt.elastic.commits import DurableCommits, Written

        self.written: list[Written] = []
        self.commits = DurableCommits(folder, every_s=float("inf"), on_written=self.written.append)
        import_hooks.install(self.commits.hooks())
        import horovod.torch as hvd
        import torch

        self._torch = torch
        torch.set_num_threads(1)
        hvd.init()
        # Adam holds two values for each parameter, of four bytes like the parameter itself.
        width = round((megabytes * 1e6 / 12 / 4) ** 0.5)
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        self.state = hvd.elastic.TorchState(model, optimizer, batch=0)
        self._inputs = torch.randn(16, width)
        self.step()
        self._run = hvd.elastic.run

    def step(self) -> None:
        """Make one optimizer step."""
        self.state.optimizer.zero_grad()
        self.state.model(self._inputs).pow(2).mean().backward()
        self.state.optimizer.step()
        self.state.batch += 1

    def round(self, *, durable: bool) -> tuple[int, float, float]:
        """Train one round; return its steps, how long they took, and its commit alone, seconds."""
        if durable:
            self.commits.request("bench")
        begin_s = time.perf_counter()
        self.state.commit()
        commit_s = time.perf_counter() - begin_s
        steps = 0
        while steps < STEPS or not self.commits.drain(0.0):
            self.step()
            steps += 1
        return steps, time.perf_counter() - begin_s - commit_s, commit_s

    def blocking_save(self, folder: Path) -> float:
        """Save what a commit holds as scripts do, wait until it is on disk, and return the time, seconds."""
        model, optimizer = self.state.model.state_dict(), self.state.optimizer.state_dict()
        path = folder / "blocking"
        begin_s = time.perf_counter()
        with path.open("wb") as stream:
            self._torch.save({"model": model, "optimizer": optimizer, "batch": self.state.batch}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        took_s = time.perf_counter() - begin_s
        path.unlink()
        return took_s

    def measure(self, folder: Path, rounds: int) -> dict[str, list[float]]:
        """Interleave rounds of both kinds with blocking saves; return all times, seconds."""
        names = ("blocked", "plain_step", "durable_step", "durable_round", "save", "in_commit")
        times_s: dict[str, list[float]] = {name: [] for name in names}

        def train(_: object) -> None:
            for durable in (False, True):
                self.round(durable=durable)
            for _turn in range(rounds):
                # Between two plain rounds, so that a drift of the machine cancels out.
                before = self.round(durable=False)
                steps, train_s, commit_s = self.round(durable=True)
                after = self.round(durable=False)
                plain_step_s = [took_s / count for count, took_s, _ in (before, after)]
                plain_commit_s = (before[2] + after[2]) / 2
                in_commit_s = commit_s - plain_commit_s
                times_s["blocked"].append(train_s - steps * statistics.mean(plain_step_s) + in_commit_s)
                times_s["plain_step"] += plain_step_s
                times_s["durable_step"].append(train_s / steps)
                times_s["durable_round"].append(train_s)
                times_s["in_commit"].append(in_commit_s)
                times_s["save"].append(self.blocking_save(folder))

        self._run(train)(self.state)
        return times_s


def main() -> int:
    """Measure and print; return 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, default=Path("resize-commit.json"))
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            training = Training(folder / "commits", options.megabytes)
            times_s = training.measure(folder, options.rounds)
        sys.stderr.write(said.getvalue())
    written = training.written[1:]
    save_s = statistics.median(times_s["save"])
    blocked_s = statistics.median(times_s["blocked"])
    share = blocked_s / save_s
    # How much rounds of the same kind differ, over a round as long as those with a commit to disk.
    pairs = zip(times_s["plain_step"][::2], times_s["plain_step"][1::2], strict=True)
    length = statistics.median(times_s["durable_round"]) / statistics.median(times_s["plain_step"])
    spread_s = length * statistics.median(abs(one - two) for one, two in pairs)
    print(
        f"{written[0].num_bytes / 1e6:.0f} MB: blocking save {save_s:.3f} s, durable commit on disk after "
        f"{statistics.median(one.write_s for one in written):.3f} s; training blocked {blocked_s:.3f} s, of "
        f"these {statistics.median(one.blocked_s for one in written):.4f} s in commit(); plain rounds "
        f"differ by {spread_s:.3f} s"
    )
    # A machine too busy to tell does not reach the target either.
    reached = spread_s <= TARGET_SHARE * save_s * NOISE and share <= TARGET_SHARE
    print(f"durable-commit-blocked-share  {share:.3f}  {TARGET_SHARE}")
    if spread_s > TARGET_SHARE * save_s * NOISE:
        print("too busy to tell: rounds of the same kind differ by more than what is measured")
    figures = [
        {
            "figure": "durable-commit-blocked-share",
            "measured": share,
            "target": TARGET_SHARE,
            "reached": reached,
        }
    ]
    report = {
        "figures": figures,
        "times_s": times_s,
        "write_s": [one.write_s for one in written],
        "blocked_in_commit_s": [one.blocked_s for one in written],
        "num_bytes": written[0].num_bytes,
    }
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(not reached)


if __name__ == "__main__":
    sys.exit(main())
