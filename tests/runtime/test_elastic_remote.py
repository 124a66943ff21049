# SPDX-License-Identifier: Apache-2.0
"""The helper that runs a worker on another node, driven through its pipes as ssh would."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from horowatt.elastic.counters import is_held
from horowatt.elastic.folder import JobFolder
from horowatt.elastic.hostfile import publish
from horowatt.records import BatchRule, LauncherKind, LaunchSpec, Lease, SlotsFile

LEASE = Lease(
    lease_id="l0",
    job_id="j",
    node="n2",
    address="127.0.0.1",
    gpu_uuid="GPU-0",
    gpu_type="t",
    slot_index=0,
    simulated=False,
)


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    (tmp_path / "job").mkdir()
    made = JobFolder(tmp_path / "job")
    uid, gid = os.getuid(), os.getgid()
    spec = LaunchSpec(
        job_id="j",
        name="j",
        tenant="t",
        uid=uid,
        gid=gid,
        username="u",
        launcher=LauncherKind.HOROWATT,
        command=("python", "t.py"),
        environment={},
        working_dir=str(tmp_path),
        virtual_env=None,
        min_width=1,
        max_width=4,
        batch_rule=BatchRule.PER_WORKER,
        batch_size=None,
    )
    publish(
        made,
        spec,
        SlotsFile(job_id="j", generation=1, uid=uid, leases=(LEASE,), published_at_s=0.0),
        uid,
        gid,
    )
    return made


class Helper:
    """The helper process, as seen from the launcher's end of ssh."""

    def __init__(self, folder: JobFolder, script: str, **environment: str) -> None:
        (folder.root.parent / "t.py").write_text(script)
        self.folder = folder.lease("l0")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "horowatt.elastic.remote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        start = [sys.executable, "-m", "horowatt.elastic.start"]
        self.tell(
            json.dumps(
                {
                    "job_dir": str(folder.root),
                    "lease_id": "l0",
                    "argv": [*start, "--job-dir", str(folder.root), "--lease", "l0"],
                    "command": ["python", "t.py", "a b", "$(x)"],
                    "environment": {"PATH": os.environ["PATH"], **environment},
                    "working_dir": str(folder.root.parent),
                }
            )
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def wait_up(self) -> None:
        deadline_s = time.monotonic() + 60
        while not (self.folder.output_log.exists() and "up" in self.folder.output_log.read_text()):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)

    def end(self) -> dict[str, object]:
        assert self.process.stdout is not None
        answer = self.process.stdout.read().splitlines()[-1]
        self.process.wait(60)
        end = json.loads(answer)
        assert isinstance(end, dict)
        return end


@pytest.fixture
def helpers() -> Iterator[list[Helper]]:
    made: list[Helper] = []
    yield made
    for helper in made:
        helper.process.kill()
        helper.process.wait()
        for pipe in (helper.process.stdin, helper.process.stdout):
            assert pipe is not None
            pipe.close()


def test_a_worker_runs_on_its_node_and_its_end_is_told(folder: JobFolder, helpers: list[Helper]) -> None:
    """Output and exit code lie on the worker's node; the launcher is told how it ended."""
    script = "import os, sys; print(sys.argv[1:], os.environ['VALUE'], flush=True); raise ValueError('no')"
    helper = Helper(folder, script, VALUE="s3cret")
    helpers.append(helper)
    end = helper.end()
    assert (end["exit_code"], end["steps"], end["joined"]) == (1, 0, False)
    assert str(end["tail"]).endswith("ValueError: no\n")
    assert "['a b', '$(x)'] s3cret" in helper.folder.output_log.read_text()
    assert json.loads(helper.folder.exit_json.read_text()) == {"exit_code": 1}


def test_a_worker_ends_with_the_connection(folder: JobFolder, helpers: list[Helper]) -> None:
    """When ssh goes away, because the launcher was killed or the network broke, so does the worker."""
    helper = Helper(folder, "import time; print('up', flush=True); time.sleep(600)")
    helpers.append(helper)
    helper.wait_up()
    assert is_held(helper.folder.lock)
    assert helper.process.stdin is not None
    helper.process.stdin.close()
    assert helper.end()["exit_code"] == -signal.SIGTERM
    assert not is_held(helper.folder.lock)


def test_a_killed_helper_takes_its_worker_along(folder: JobFolder, helpers: list[Helper]) -> None:
    """Not even kill -9 of the helper leaves a worker behind."""
    helper = Helper(folder, "import time; print('up', flush=True); time.sleep(600)")
    helpers.append(helper)
    helper.wait_up()
    helper.process.kill()
    deadline_s = time.monotonic() + 60
    while is_held(helper.folder.lock) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_held(helper.folder.lock)


def test_signals_are_passed_on(folder: JobFolder, helpers: list[Helper]) -> None:
    """The launcher's signals reach a worker that ignores the milder ones."""
    script = (
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "print('up', flush=True)\nwhile True: time.sleep(0.1)"
    )
    helper = Helper(folder, script)
    helpers.append(helper)
    helper.wait_up()
    helper.tell("alive")
    helper.tell("SIGTERM")
    deadline_s = time.monotonic() + 60
    while "asked" not in helper.folder.output_log.read_text() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    helper.tell("SIGKILL")
    assert helper.end()["exit_code"] == -signal.SIGKILL


def test_a_worker_that_cannot_be_started_says_why(folder: JobFolder, helpers: list[Helper]) -> None:
    """A node without the working directory is told apart from a lost connection."""
    helper = Helper(folder, "pass")
    helpers.append(helper)
    helper.end()
    process = subprocess.run(
        [sys.executable, "-m", "horowatt.elastic.remote"],
        input=json.dumps(
            {
                "job_dir": str(folder.root),
                "lease_id": "l0",
                "argv": ["true"],
                "command": [],
                "environment": {},
                "working_dir": "/no/such/folder",
            }
        ).encode()
        + b"\n",
        capture_output=True,
        check=True,
        timeout=60,
    )
    end = json.loads(process.stdout)
    assert end["exit_code"] == 127
    assert "error[HW-JOB-003]" in end["tail"]
