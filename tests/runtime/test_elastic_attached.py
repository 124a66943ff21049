# SPDX-License-Identifier: Apache-2.0
"""Workers of a user's own ``horovodrun``, attached by the job's discovery script."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from horowatt.elastic.attached import find_job, lease_of, main
from horowatt.elastic.counters import is_held, read_counters
from horowatt.elastic.folder import JobFolder
from horowatt.elastic.hostfile import publish
from horowatt.errors import HorowattError
from horowatt.records import BatchRule, LauncherKind, LaunchSpec, Lease, SlotsFile

SCRIPT = """
import os
import horovod.torch as hvd
import torch
hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
state = hvd.elastic.TorchState(model, optimizer, batch=0)
@hvd.elastic.run
def train(state):
    while state.batch < 5:
        model(torch.randn(8, 2)).sum().backward()
        optimizer.step()
        state.batch += 1
        state.commit()
train(state)
print("SEES", hvd.rank(), os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
"""


def _slots(job_id: str, gpus: tuple[str, ...], address: str = "127.0.0.1") -> SlotsFile:
    leases = tuple(
        Lease(
            lease_id=f"{job_id}-l{index}",
            job_id=job_id,
            node="n",
            address=address,
            gpu_uuid=gpu,
            gpu_type="t",
            slot_index=index,
            simulated=False,
        )
        for index, gpu in enumerate(gpus)
    )
    return SlotsFile(job_id=job_id, generation=1, uid=os.getuid(), leases=leases, published_at_s=0.0)


def _job(
    root: Path, job_id: str, gpus: tuple[str, ...], launcher: LauncherKind = LauncherKind.ATTACHED
) -> JobFolder:
    root.mkdir(parents=True)
    folder = JobFolder(root)
    uid, gid = os.getuid(), os.getgid()
    spec = LaunchSpec(
        job_id=job_id,
        name=job_id,
        tenant="t",
        uid=uid,
        gid=gid,
        username="u",
        launcher=launcher,
        command=("python", "t.py"),
        environment={},
        working_dir="/",
        virtual_env=None,
        min_width=1,
        max_width=4,
        batch_rule=BatchRule.PER_WORKER,
        batch_size=16,
    )
    publish(folder, spec, _slots(job_id, gpus), uid, gid)
    return folder


@pytest.mark.horovod
def test_two_jobs_on_one_host_each_see_their_own_gpus(tmp_path: Path) -> None:
    """Two users' horovodrun on one host: each worker gets its job's GPUs, is measured, and noted."""
    script = tmp_path / "t.py"
    script.write_text(SCRIPT)
    gpus = {"one": ("GPU-a", "GPU-b"), "two": ("GPU-c",)}
    jobs = {job_id: _job(tmp_path / job_id, job_id, gpus[job_id]) for job_id in gpus}
    horovodrun = Path(sys.executable).with_name("horovodrun")
    running = {
        job_id: subprocess.Popen(
            [
                horovodrun,
                "-np",
                str(len(gpus[job_id])),
                "--network-interface",
                "lo",
                "--host-discovery-script",
                job.discover_script,
                *(sys.executable, "-m", "horowatt.elastic.attached", "--"),
                *(sys.executable, script),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for job_id, job in jobs.items()
    }
    try:
        output = {job_id: process.communicate(timeout=150)[0] for job_id, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
    assert [process.returncode for process in running.values()] == [0, 0], output
    seen = {
        job_id: sorted(line.rpartition("SEES ")[2] for line in text.splitlines() if "SEES" in line)
        for job_id, text in output.items()
    }
    assert seen == {"one": ["0 GPU-a", "1 GPU-a,GPU-b"], "two": ["0 GPU-c"]}
    for job_id, job in jobs.items():
        for index in range(len(gpus[job_id])):
            folder = job.lease(f"{job_id}-l{index}")
            counters = read_counters(folder.counters, os.getuid())
            assert counters is not None
            assert (counters.steps, counters.samples) == (5, 80)
            assert json.loads(folder.exit_json.read_text()) == {"exit_code": 0}
            assert not is_held(folder.lock)
        events = [json.loads(line) for line in job.events.read_text().splitlines()]
        assert [event["kind"] for event in events].count("world") == len(gpus[job_id])


def test_a_worker_without_a_job_is_told_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a variable nor a horovodrun above: the error says what to do."""
    monkeypatch.delenv("HOROWATT_JOB_DIR", raising=False)
    assert main(["--", "true"]) == 125
    assert "error[HW-JOB-010]" in capsys.readouterr().err
    assert main([]) == 125
    assert "error[HW-JOB-011]" in capsys.readouterr().err


def test_only_a_job_folder_of_this_user_is_used(tmp_path: Path) -> None:
    """A folder that is not there, or is no job's, is refused."""
    for folder in (tmp_path / "absent", tmp_path):
        with pytest.raises(HorowattError) as caught:
            find_job(None, {"HOROWATT_JOB_DIR": str(folder)})
        assert caught.value.code == "HW-JOB-010"


@pytest.mark.parametrize("name", ["plain", "with space", "quote'\"$(x);"])
def test_the_job_is_found_by_the_script_of_the_horovodrun_above(name: str, tmp_path: Path) -> None:
    """The discovery script on an ancestor's command line leads to the job, however it is called."""
    import shlex

    job = _job(tmp_path / name, "j", ("GPU-a",))
    ask = "from horowatt.elastic.attached import find_job; print(find_job(None, {}).root)"
    above = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    option = ["--host-discovery-script", shlex.quote(str(job.discover_script))]
    for words in (option, ["=".join(option)]):
        done = subprocess.run(
            [sys.executable, "-c", above, ask, *words], capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout.strip() == str(job.root)


def test_a_local_rank_without_a_slot_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker for which the job has no lease does not run on somebody else's GPU."""
    monkeypatch.setattr("horowatt.elastic.attached.SLOT_PATIENCE_S", 0.0)
    job = _job(tmp_path / "j", "j", ("GPU-a",))
    monkeypatch.setenv("HOROWATT_JOB_DIR", str(job.root))
    monkeypatch.delenv("HOROVOD_LOCAL_RANK", raising=False)
    assert main(["--", "true"]) == 125
    assert "not started by horovodrun" in capsys.readouterr().err
    monkeypatch.setenv("HOROVOD_HOSTNAME", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "1")
    assert main(["--", "true"]) == 125
    assert "no slot for local rank 1" in capsys.readouterr().err


def test_leases_belong_to_local_ranks_in_the_order_of_their_slots() -> None:
    """Local rank 0 has the first slot of its host, by name or by address."""
    slots = _slots("j", ("GPU-a", "GPU-b"))
    backwards = SlotsFile(
        job_id="j", generation=1, uid=0, leases=tuple(reversed(slots.leases)), published_at_s=0.0
    )
    for host in ("127.0.0.1", "localhost"):
        found = [lease_of(backwards, host, rank) for rank in range(3)]
        assert [lease and lease.gpu_uuid for lease in found] == ["GPU-a", "GPU-b", None]


def test_signals_and_exit_codes_pass_through(tmp_path: Path) -> None:
    """The worker's exit code is noted and returned; a signal to the wrapper reaches the script."""
    job = _job(tmp_path / "j", "j", ("GPU-a",))
    environment = {
        **os.environ,
        "HOROWATT_JOB_DIR": str(job.root),
        "HOROVOD_HOSTNAME": "127.0.0.1",
        "HOROVOD_LOCAL_RANK": "0",
    }
    argv = [sys.executable, "-m", "horowatt.elastic.attached", "--"]
    exit_json = job.lease("j-l0").exit_json
    done = subprocess.run([*argv, "sh", "-c", "exit 7"], env=environment, check=False, timeout=60)
    assert (done.returncode, json.loads(exit_json.read_text())) == (7, {"exit_code": 7})
    with subprocess.Popen(
        [*argv, "sh", "-c", "echo up; exec sleep 600"], env=environment, stdout=subprocess.PIPE
    ) as wrapper:
        assert wrapper.stdout is not None
        assert wrapper.stdout.readline() == b"up\n"
        time.sleep(0.1)
        wrapper.terminate()
        assert wrapper.wait(60) == 128 + 15
    assert json.loads(exit_json.read_text()) == {"exit_code": -15}
