# SPDX-License-Identifier: Apache-2.0
"""Standbys: real Horovod jobs that go on training whatever becomes of the workers that are to join them."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched import Job

from horowatt.elastic.horovod_fixes import GLOO_TIMEOUT_S
from horowatt.records import LauncherState

pytestmark = pytest.mark.horovod

TRAIN = """
import os, sys, time
import horovod.torch as hvd
import torch
from pathlib import Path
from torch import nn

lease = os.environ["HOROWATT_LEASE_ID"]
Path(f"pid-{lease}").write_text(str(os.getpid()))
hvd.init()
print(f"set up as {hvd.rank()} of {hvd.size()}", flush=True)
if hvd.rank() == 0:
    with open("once", "a") as once:
        once.write(lease)
told = Path(f"do-{lease}").read_text() if Path(f"do-{lease}").exists() else ""
if told == "crash":
    raise ImportError("no such library on this node")
if told == "return":
    sys.exit(0)
if told == "hang":
    time.sleep(3600)
assert hvd.broadcast_object({"seed": 3}, root_rank=0) == {"seed": 3}
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

def step():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).pow(2).mean().backward()
    optimizer.step()

if told == "train":
    while True:
        step()
state = hvd.elastic.TorchState(model, optimizer, batch=0)

@hvd.elastic.run
def train(state):
    print(f"in {hvd.rank()} of {hvd.size()} at batch {state.batch}", flush=True)
    while not hvd.broadcast_object(Path("stop").exists()):
        step()
        state.batch += 1
        time.sleep(0.02)
        state.commit()

train(state)
weights = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
assert all(torch.equal(row, weights[0]) for row in weights), weights
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.clean_up()


def begin(job: Job, **environment: str) -> None:
    job.describe(sys.executable, job.script(TRAIN))
    job.publish("a")
    job.start(**environment)
    job.wait_applied(1)


def tell(job: Job, lease_id: str, what: str) -> None:
    (job.work / f"do-{lease_id}").write_text(what)


def steps(job: Job, lease_id: str = "a") -> int:
    counters = job.counters(lease_id)
    return counters.steps if counters is not None else 0


def wait_for_event(job: Job, kind: str, lease_id: str = "") -> dict[str, object]:
    def found() -> list[dict[str, object]]:
        return [event for event in job.events(kind) if event["lease_id"] == lease_id]

    job.wait_until(f"{kind} {lease_id}", lambda: bool(found()))
    return found()[-1]


def trains_on(job: Job) -> None:
    """Wait for more steps of the first worker, in the world it has."""
    before = steps(job)
    job.wait_until("more steps", lambda: steps(job) > before + 20)


def pid_of(job: Job, lease_id: str) -> int:
    path = job.work / f"pid-{lease_id}"
    job.wait_until(f"the start of {lease_id}", lambda: path.exists() and path.read_text() != "")
    return int(path.read_text())


def is_gone(pid: int) -> Callable[[], bool]:
    return lambda: not Path(f"/proc/{pid}").exists()


def finish(job: Job) -> None:
    job.stop_training()
    assert job.end().state is LauncherState.FINISHED, job.story()
    assert job.held() == set()


def test_a_standby_is_ready_before_anybody_stops_for_it(job: Job) -> None:
    """The job trains while its new workers set themselves up, as the ranks that they will have."""
    begin(job)
    generation = job.publish("a", "b", "c")
    started_s = wait_for_event(job, "standby-started", "c")["at_s"]
    job.wait_applied(generation)
    ready_s = [wait_for_event(job, "standby-ready", lease_id)["at_s"] for lease_id in "bc"]
    published = job.events("published")[-1]
    assert published["at_s"] >= max(ready_s)
    assert (published["generation"], published["width"]) == (generation, 3)
    assert job.events("interrupted")[0]["at_s"] >= published["at_s"] > started_s
    assert "set up as 1 of 3" in job.output("b")
    assert "set up as 2 of 3" in job.output("c")
    assert (job.work / "once").read_text() == "a"
    assert "rehearsal failed" not in job.output("b")
    # They go on where the first one is, not at the beginning.
    for lease_id in "bc":
        line = next(line for line in job.output(lease_id).splitlines() if line.startswith("in "))
        assert line.split(" at batch ")[0].endswith("of 3")
        assert int(line.split(" at batch ")[1]) > 0
    job.wait_applied(job.publish("c"))
    job.wait_until("the leave", lambda: job.held() == {"c"})
    # A survivor that had been a standby asks for its place like any other.
    job.wait_applied(job.publish("c", "d"))
    finish(job)


@pytest.mark.parametrize(
    ("told", "code"),
    [("crash", "HW-JOB-005"), ("return", "HW-JOB-015"), ("train", "HW-JOB-015")],
)
def test_a_standby_that_fails_costs_the_job_nothing(job: Job, told: str, code: str) -> None:
    """The old world is never interrupted, the head learns why, and another slot serves as well."""
    begin(job)
    tell(job, "bad", told)
    job.publish("a", "bad", "b")
    failed = wait_for_event(job, "standby-failed", "bad")
    assert failed["code"] == code, failed
    assert job.exit_code("bad") != 0
    trains_on(job)
    assert job.events("interrupted") == []
    if told == "crash":
        assert "no such library" in str(failed["why"])
        # The other standby of that grant need not start again.
        job.wait_applied(job.publish("a", "b"))
        assert len([event for event in job.events("standby-started") if event["lease_id"] == "b"]) == 1
    finish(job)


def test_a_standby_that_is_never_ready_is_given_up(job: Job) -> None:
    """After a while its grant counts as failed, and the old world has not noticed."""
    begin(job, HOROWATT_STANDBY_PATIENCE_S="3")
    tell(job, "b", "hang")
    job.publish("a", "b")
    assert wait_for_event(job, "standby-failed", "b")["code"] == "HW-JOB-016"
    wait_for_event(job, "worker-exit", "b")
    trains_on(job)
    assert job.events("interrupted") == []
    finish(job)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_newcomer_that_does_not_join_takes_nobody_along(job: Job, number: signal.Signals) -> None:
    """When it hangs or dies after the publication, the old world starts again at once, without it."""
    begin(job, HOROWATT_JOIN_DEADLINE_S="3")
    job.publish("a", "b")
    wait_for_event(job, "standby-started", "b")
    pid = pid_of(job, "b")
    job.wait_until("ready", lambda: bool(job.events("standby-ready")))
    os.kill(pid, signal.SIGSTOP)
    wait_for_event(job, "assigned")
    job.wait_until("the assignment", lambda: job.events("assigned")[-1]["width"] == 2)
    os.kill(pid, number)
    restarted = wait_for_event(job, "world-restarted")
    assert restarted["restarts"] == 1
    job.wait_until("the new world", lambda: job.events("assigned")[-1]["at_s"] > restarted["at_s"])
    job.wait_until("its end", is_gone(pid))
    trains_on(job)
    status = job.status()
    assert status is not None
    assert status.state is LauncherState.RUNNING
    finish(job)


def test_the_death_of_one_of_four_is_noticed_by_all_at_once(job: Job) -> None:
    """Also by those that wait for another survivor; without that they sit out Gloo's time-out of minutes."""
    job.describe(sys.executable, job.script(TRAIN))
    job.publish("a", "b", "c", "d")
    job.start()
    job.wait_applied(1)
    trains_on(job)
    killed_s = time.time()
    os.kill(pid_of(job, "b"), signal.SIGKILL)
    job.wait_until("a world of three", lambda: job.events("assigned")[-1]["width"] == 3)
    resumed = [event for event in job.events("assigned") if event["width"] == 3]
    # Not a matter of speed: half the time-out tells being told from running into it.
    assert resumed[0]["at_s"] - killed_s < GLOO_TIMEOUT_S / 2
    trains_on(job)
    finish(job)


def test_standbys_end_with_their_grant_and_with_their_launcher(job: Job) -> None:
    """A grant that is taken back was never there; and nobody but the launcher knows of standbys."""
    begin(job)
    for lease_id in ("b", "c"):
        tell(job, lease_id, "hang")
    job.publish("a", "b")
    pid = pid_of(job, "b")
    job.publish("a")
    job.wait_until("its end", is_gone(pid))
    trains_on(job)
    assert job.events("interrupted") == []
    job.publish("a", "c", "d")
    pids = [pid_of(job, "c"), pid_of(job, "d")]
    assert job.launcher is not None
    job.launcher.kill()
    job.launcher.wait()
    deadline_s = time.monotonic() + 30
    while not all(is_gone(pid)() for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert json.loads(job.folder.launcher_json.read_bytes())["state"] == "running"
