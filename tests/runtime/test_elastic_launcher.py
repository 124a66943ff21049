# SPDX-License-Identifier: Apache-2.0
"""Real jobs under the Horowatt launcher: real Horovod processes, resized by publishing slots files."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import PATIENCE_S, Job

from horowatt.elastic.counters import is_held
from horowatt.records import (
    LauncherState,
    LauncherStatus,
)

TRAIN = """
import atexit, json, os, sys, time
import horovod.torch as hvd
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, Dataset
from horowatt.training import is_padding

SAMPLES, BATCH, PAUSE_S = 60, 4, float(os.environ.get("PAUSE_S", "0.02"))
lease = os.environ["HOROWATT_LEASE_ID"]
Path(f"pid-{lease}").write_text(str(os.getpid()))
atexit.register(lambda: Path(f"atexit-{lease}").write_text("ran"))

class Numbers(Dataset):
    def __len__(self): return SAMPLES
    def __getitem__(self, index): return torch.full((4,), float(index)), index

hvd.init()
torch.manual_seed(hvd.rank())
data = Numbers()
sampler = hvd.elastic.ElasticSampler(data, seed=3)
loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batches=0)
seen = open(f"seen-{lease}", "a", buffering=1)

@hvd.elastic.run
def train(state):
    while True:
        for number, (x, index) in enumerate(loader):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
            sampler.record_batch(number, len(index))
            state.batches += 1
            indices = [] if is_padding() else index.tolist()
            record = {"epoch": state.epoch, "batches": state.batches, "indices": indices}
            seen.write(json.dumps(record) + "\\n")
            time.sleep(PAUSE_S)
            if os.environ.get("UPDATES_ONLY"):
                state.check_host_updates()
            elif not os.environ.get("NEVER_COMMIT"):
                state.commit()
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        if not os.environ.get("NEVER_COMMIT"):
            state.commit()
        if hvd.broadcast_object(Path("stop").exists()):
            break

train(state)
weights = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
assert all(torch.equal(row, weights[0]) for row in weights), weights
if hvd.rank() == 0:
    print("identical on", len(weights), flush=True)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.clean_up()


def _train(job: Job, *leases: str, **environment: str) -> None:
    job.describe("python", job.script(TRAIN), environment=environment)
    job.publish(*leases)


def _check_data(job: Job) -> None:
    """Each epoch that was trained to its end saw every sample exactly once."""
    epochs: dict[int, Counter[int]] = defaultdict(Counter)
    for path in job.work.glob("seen-*"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            epochs[record["epoch"]].update(record["indices"])
    assert epochs
    for epoch, counts in epochs.items():
        assert counts == Counter(range(60)), (epoch, counts)


@pytest.mark.horovod
def test_a_job_grows_and_shrinks_while_it_trains(job: Job) -> None:
    """1, 2, 3, 1 workers: nothing is trained twice or left out, replicas agree, leavers leave in order."""
    _train(job, "a")
    job.start()
    job.wait_applied(1)
    assert job.held() == {"a"}
    job.wait_applied(job.publish("a", "b"))
    assert job.held() == {"a", "b"}
    job.wait_applied(job.publish("a", "b", "c"))
    assert job.held() == {"a", "b", "c"}
    job.wait_applied(job.publish("c"))
    job.wait_until("release", lambda: job.held() == {"c"})
    for leaver in ("a", "b"):
        assert job.exit_code(leaver) == 0
        assert (job.work / f"atexit-{leaver}").read_text() == "ran"
        assert "slot was taken back" in job.output(leaver)
    job.stop_training()
    status = job.end()
    assert (status.state, status.exit_code, status.generation_applied) == (LauncherState.FINISHED, 0, 4)
    assert job.held() == set()
    assert "identical on 1" in job.output("c")
    _check_data(job)
    for lease_id in ("a", "b", "c"):
        counters = job.counters(lease_id)
        assert counters is not None
        records = [json.loads(line) for line in (job.work / f"seen-{lease_id}").read_text().splitlines()]
        assert counters.steps == len(records)
        assert counters.samples == sum(len(record["indices"]) for record in records)
        assert counters.epoch_samples == 60
    assert [(event["generation"], event["width"]) for event in job.events("published")] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 1),
    ]
    assert Counter(event["world_size"] for event in job.events("world")) == {1: 2, 2: 2, 3: 3}
    resumed = [event for event in job.events("resumed") if event["world_size"] == 2]
    assert {event["lease_id"]: event["last_step_end_s"] is None for event in resumed} == {
        "a": False,
        "b": True,
    }
    assert all(event["first_step_end_s"] > (event["last_step_end_s"] or 0) for event in resumed)
    assert {event["lease_id"]: event["exit_code"] for event in job.events("worker-exit")} == dict.fromkeys(
        "abc", 0
    )


@pytest.mark.horovod
def test_updates_without_commits_rewind_nothing_and_replicas_agree(job: Job) -> None:
    """A script that only asks for updates keeps its place, and weight decay does not split replicas."""
    _train(job, "a", UPDATES_ONLY="1")
    job.start()
    job.wait_applied(1)
    job.wait_applied(job.publish("a", "b"))
    job.wait_applied(job.publish("b"))
    job.wait_applied(job.publish("b", "c"))
    job.stop_training()
    assert job.end().state is LauncherState.FINISHED
    assert "identical on 2" in job.output("b")
    for lease_id in ("a", "b", "c"):
        lines = (job.work / f"seen-{lease_id}").read_text().splitlines()
        batches = [json.loads(line)["batches"] for line in lines]
        assert batches == list(range(batches[0], batches[0] + len(batches)))
    _check_data(job)


@pytest.mark.horovod
def test_a_publication_during_a_resize_is_not_lost(job: Job) -> None:
    """Slots that are published while the job is still busy with the last ones are used all the same."""
    _train(job, "a")
    job.start()
    job.wait_applied(1)
    second = job.publish("a", "b")
    job.wait_until(
        "assignment", lambda: any(event["generation"] == second for event in job.events("published"))
    )
    job.wait_applied(job.publish("a", "b", "c"))
    assert job.held() == {"a", "b", "c"}
    job.stop_training()
    assert job.end().state is LauncherState.FINISHED


@pytest.mark.horovod
def test_the_job_goes_on_when_one_worker_is_killed(job: Job) -> None:
    """One of two workers killed: the other trains on, the lease is free, a new one joins."""
    _train(job, "a", "b")
    job.start()
    job.wait_applied(1)
    os.kill(int((job.work / "pid-a").read_text()), signal.SIGKILL)
    job.wait_until(
        "recovery",
        lambda: any(event["lease_id"] == "b" and event["world_size"] == 1 for event in job.events("resumed")),
    )
    assert job.held() == {"b"}
    assert job.exit_code("a") == -signal.SIGKILL
    job.wait_applied(job.publish("b", "c"))
    job.stop_training()
    status = job.end()
    assert (status.state, status.exit_code) == (LauncherState.FINISHED, 0)
    assert "identical on 2" in job.output("b")


@pytest.mark.horovod
def test_killing_the_launcher_leaves_no_worker_behind(job: Job) -> None:
    """A launcher killed outright frees every lease, and the next attempt may start on the same ones."""
    _train(job, "a", "b")
    job.start()
    job.wait_applied(1)
    assert job.launcher is not None
    job.launcher.kill()
    job.launcher.wait()
    deadline_s = time.monotonic() + PATIENCE_S
    while job.held() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert job.held() == set()
    assert not is_held(job.folder.launcher_lock)
    job.stop_training()
    job.start(attempt=2)
    status = job.end()
    assert (status.state, status.attempt) == (LauncherState.FINISHED, 2)


@pytest.mark.horovod
def test_a_job_that_is_stopped_ends_in_order(job: Job) -> None:
    """SIGTERM ends the workers and then the launcher, which says that it was stopped."""
    _train(job, "a", "b")
    job.start()
    job.wait_applied(1)
    second = subprocess.run(
        [sys.executable, "-m", "horowatt.elastic.launcher", job.folder.root],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (second.returncode, "error[HW-JOB-008]" in second.stderr) == (125, True)
    assert job.launcher is not None
    job.launcher.terminate()
    assert job.end().state is LauncherState.STOPPED
    assert job.held() == set()


@pytest.mark.horovod
def test_a_worker_that_does_not_leave_is_ended(job: Job) -> None:
    """A script that never looks for updates loses its withdrawn worker after a grace period."""
    _train(job, "a", "b", NEVER_COMMIT="1", PAUSE_S="0.01")
    job.start(HOROWATT_RELEASE_GRACE_S="1")
    job.wait_applied(1)
    job.publish("b")
    job.wait_until("release", lambda: job.held() == {"b"})
    assert job.exit_code("a") == -signal.SIGTERM
    job.wait_until("recovery", lambda: any(event["world_size"] == 1 for event in job.events("resumed")))
    job.stop_training()
    assert job.end().state is LauncherState.FINISHED


def _run(job: Job, *command: str, leases: tuple[str, ...] = ("a",), **environment: str) -> LauncherStatus:
    job.describe(*command, environment=environment)
    job.publish(*leases)
    job.start()
    return job.end()


@pytest.mark.horovod
def test_a_script_that_crashes_at_import_has_failed(job: Job) -> None:
    """Every worker raises: the job failed, and the message ends with the exception."""
    status = _run(job, "python", job.script("import nowhere"), leases=("a", "b"))
    assert (status.state, status.code, status.exit_code) == (LauncherState.FAILED, "HW-JOB-005", 1)
    assert status.message.endswith("ModuleNotFoundError: No module named 'nowhere'")
    (failed,) = job.events("failed")
    assert failed["traceback"].startswith("Traceback")
    assert failed["lease_id"] in ("a", "b")
    assert "horowatt" not in failed["traceback"]


@pytest.mark.horovod
@pytest.mark.parametrize(
    ("command", "content", "code", "exit_code"),
    [
        (("python", "absent.py"), None, "HW-JOB-001", 127),
        (("no-such-program",), None, "HW-JOB-001", 127),
        (("python", "train.py"), "#!/bin/sh\necho hello there\n", "HW-JOB-002", 126),
        (("python", "train.py"), "print('nothing to do')", "HW-JOB-004", 0),
        (("python", "train.py"), "raise SystemExit(42)", "HW-JOB-005", 42),
    ],
)
def test_a_bad_script_fails_with_a_clear_reason(
    job: Job, command: tuple[str, ...], content: str | None, code: str, exit_code: int
) -> None:
    """Missing, not Python, without training, with an exit code of its own: each is told apart."""
    if content is not None:
        job.script(content)
    status = _run(job, *command)
    assert (status.state, status.code, status.exit_code) == (LauncherState.FAILED, code, exit_code)
    assert status.message
    assert job.held() == set()


@pytest.mark.horovod
def test_a_missing_environment_fails_before_anything_runs(job: Job) -> None:
    """A working directory that is not there is a reason of its own."""
    job.describe("python", "t.py")
    job.publish("a")
    job.work.rmdir()
    job.start()
    status = job.end()
    assert (status.state, status.code) == (LauncherState.FAILED, "HW-JOB-003")


@pytest.mark.horovod
def test_no_shell_ever_sees_a_name(tmp_path: Path) -> None:
    """Spaces, quotes, ';' and '$()' in folders, scripts, arguments and variables arrive as they are."""
    nasty = "a b'c\"d;$(touch pwned) `touch pwned`"
    job = Job(tmp_path, name=nasty)
    try:
        name = job.script("import os, sys; print([sys.argv, os.environ['NASTY']])", f"{nasty}.py")
        status = _run(job, "python", name, nasty, "", "--x=$HOME", NASTY=nasty)
        assert status.code == "HW-JOB-004", job.story()
        assert job.output("a").strip() == str([[name, nasty, "", "--x=$HOME"], nasty])
        assert not list(tmp_path.rglob("pwned"))
    finally:
        job.clean_up()


@pytest.mark.horovod
def test_a_program_that_is_not_python_is_run_unmeasured(job: Job) -> None:
    """Exit code 0 of a program whose steps cannot be counted is a job that finished."""
    assert _run(job, "env").state is LauncherState.FINISHED
    assert "CUDA_VISIBLE_DEVICES=GPU-a" in job.output("a")
    assert "HOROVOD_HOSTNAME=a" in job.output("a")


@pytest.mark.horovod
def test_what_a_worker_leaves_behind_is_ended(job: Job) -> None:
    """A slot is not free while a child of its worker runs, so such children end with the worker."""
    job.script("import subprocess; print(subprocess.Popen(['sleep', '600'], close_fds=False).pid)")
    _run(job, "python", "train.py")
    child = int(job.output("a"))
    assert job.held() == set()
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
