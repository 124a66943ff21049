# SPDX-License-Identifier: Apache-2.0
"""The example scripts: they learn, they repeat, they run alone and under the launcher."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from horowatt.elastic.folder import JobFolder
from horowatt.elastic.hostfile import publish
from horowatt.records import (
    BatchRule,
    LauncherKind,
    LauncherState,
    LauncherStatus,
    LaunchSpec,
    Lease,
    SlotsFile,
)
from horowatt.wire import decode

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
PATIENCE_S = 200.0


def _accuracy(output: str) -> float:
    found = re.fullmatch(r"accuracy=(0\.\d{4}|1\.0000)", output.splitlines()[-1])
    assert found is not None, output
    return float(found[1])


def _alone(script: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, EXAMPLES / script, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    ).stdout


@pytest.mark.horovod
@pytest.mark.parametrize("script", ["digits_mlp.py", "digits_wide.py"])
def test_an_example_learns_alone(script: str) -> None:
    """Without any launcher an example trains to a good accuracy, which it prints last."""
    assert _accuracy(_alone(script)) >= 0.95


@pytest.mark.horovod
def test_an_example_repeats_itself() -> None:
    """The same seed gives the same accuracy, another seed another split."""
    first = _alone("digits_mlp.py", "--epochs", "3")
    assert _alone("digits_mlp.py", "--epochs", "3") == first
    assert _accuracy(_alone("digits_mlp.py", "--epochs", "3", "--seed", "5")) != _accuracy(first)


def test_examples_are_ordinary_scripts() -> None:
    """Nothing in them knows of Horowatt."""
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert len(scripts) >= 2
    for script in scripts:
        assert "import horowatt" not in script.read_text()
        assert "from horowatt" not in script.read_text()


@pytest.mark.horovod
def test_an_example_learns_while_it_is_resized(tmp_path: Path) -> None:
    """Grown and shrunk by the launcher, an example reaches the accuracy that it reaches alone."""
    folder = JobFolder(tmp_path)
    uid, gid = os.getuid(), os.getgid()
    spec = LaunchSpec(
        job_id="j",
        name="j",
        tenant="t",
        uid=uid,
        gid=gid,
        username="u",
        launcher=LauncherKind.HOROWATT,
        command=("python", str(EXAMPLES / "digits_mlp.py"), "--epochs", "60"),
        environment={"OMP_NUM_THREADS": "1"},
        working_dir=str(tmp_path),
        virtual_env=None,
        min_width=1,
        max_width=2,
        batch_rule=BatchRule.PER_WORKER,
        batch_size=None,
    )
    generations = (("a",), ("a", "b"), ("b",))

    def state() -> LauncherStatus | None:
        try:
            return decode(folder.launcher_json.read_bytes(), LauncherStatus)
        except FileNotFoundError:
            return None

    launcher: subprocess.Popen[bytes] | None = None
    try:
        for generation, lease_ids in enumerate(generations, start=1):
            leases = tuple(
                Lease(
                    lease_id=lease_id,
                    job_id="j",
                    node="n",
                    address="127.0.0.1",
                    gpu_uuid=f"GPU-{lease_id}",
                    gpu_type="t",
                    slot_index=index,
                    simulated=False,
                )
                for index, lease_id in enumerate(lease_ids)
            )
            slots = SlotsFile(job_id="j", generation=generation, uid=uid, leases=leases, published_at_s=0.0)
            publish(folder, spec, slots, uid, gid)
            launcher = launcher or subprocess.Popen(
                [sys.executable, "-m", "horowatt.elastic.launcher", tmp_path]
            )
            deadline_s = time.monotonic() + PATIENCE_S
            while (said := state()) is None or said.generation_applied < generation:
                assert time.monotonic() < deadline_s, folder.launcher_log.read_text()
                assert launcher.poll() is None, folder.launcher_log.read_text()
                time.sleep(0.05)
        assert launcher is not None
        launcher.wait(PATIENCE_S)
    finally:
        if launcher is not None and launcher.poll() is None:
            launcher.terminate()
            launcher.wait(60)
    said = state()
    assert said is not None
    assert said.state is LauncherState.FINISHED, said
    assert _accuracy(folder.lease("b").output_log.read_text()) >= 0.95
