# SPDX-License-Identifier: Apache-2.0
"""The command line against the real service, as processes: submit, look, cancel, report, restart."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HOROWATT = [sys.executable, "-m", "horowatt_allocator.cli.main"]
INVENTORY = 'name = "lab"\n[[node]]\nname = "n1"\nnum_gpus = 4\n'
CONFIG = '[[tenant]]\nname = "team $(x)"\nusers = ["*"]\n'
START_TIMEOUT_S = 60.0


@dataclass
class Service:
    """A service in a folder of its own; the path is short because Unix socket paths must be."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        (self.folder / "lab.toml").write_text(INVENTORY)
        (self.folder / "config.toml").write_text(CONFIG)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *HOROWATT, "serve", "--inventory", str(self.folder / "lab.toml"),
                    "--config", str(self.folder / "config.toml"), "--state-dir", str(self.folder / "state"),
                    "--socket", str(self.folder / "s.sock"), "--http", "off",
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        end = time.monotonic() + START_TIMEOUT_S
        while self.call("ps").returncode != 0:
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < end
            time.sleep(0.1)

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def call(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HOROWATT_")}
        return subprocess.run(
            [*HOROWATT, *arguments], env={**kept, "HOROWATT_SOCKET": str(self.folder / "s.sock")}, cwd=cwd,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def json(self, *arguments: str) -> dict[str, Any]:
        done = self.call(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert isinstance(document, dict)
        assert document["schema_version"] == 1
        return document


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        running = Service(Path(folder))
        running.start()
        try:
            yield running
        finally:
            assert running.stop() == 0


def submit(service: Service, *flags: str, name: str = "job") -> str:
    done = service.call(
        "submit", "-q", "--tenant", "team $(x)", "--name", name, *flags, "--", "python", "t.py"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_job_goes_from_submit_to_cancelled(service: Service) -> None:
    """A submitted job is listed with its reason, explained, cancelled twice, and then ended."""
    job_id = submit(service, "--max", "4", "--epochs", "3", "--deadline", "2h", name="first; `x`")
    [job] = [job for job in service.json("ps")["jobs"] if job["job_id"] == job_id]
    assert (job["name"], job["tenant"], job["phase"]) == ("first; `x`", "team $(x)", "queued")
    assert job["legal_widths"] == [1, 2, 3, 4]
    assert job["reason"]["code"]
    assert job["command"] == ["python", "t.py"]
    shown = service.call("explain", job_id).stdout
    assert "first; `x`" in shown
    assert "deadline:" in shown
    for _ in range(2):
        [cancelled] = service.json("cancel", job_id)["jobs"]
        assert cancelled["phase"] == "cancelled"
    assert job_id not in {job["job_id"] for job in service.json("ps")["jobs"]}
    assert job_id in {job["job_id"] for job in service.json("ps", "--all")["jobs"]}


def test_a_cancelled_job_ends_wait_with_an_error(service: Service) -> None:
    """--wait does not return success for a job that somebody cancelled."""
    process = subprocess.Popen(
        [
            *HOROWATT, "submit", "--wait", "--json", "--tenant", "team $(x)", "--name", "waited",
            "--", "python", "t",
        ],
        env={**os.environ, "HOROWATT_SOCKET": str(service.folder / "s.sock")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    end = time.monotonic() + START_TIMEOUT_S
    while service.call("cancel", "waited").returncode != 0:
        assert time.monotonic() < end
    out, err = process.communicate(timeout=60)
    assert process.returncode == 125
    assert json.loads(out)["job"]["phase"] == "cancelled"
    assert "HW-CLI-011" in err


def test_an_idempotency_key_makes_one_job(service: Service) -> None:
    """The same submission with the same key is the same job; another one is refused."""
    first = submit(service, "--idempotency-key", "k", name="once")
    assert submit(service, "--idempotency-key", "k", name="once") == first
    done = service.call(
        "submit",
        "-q",
        "--tenant",
        "team $(x)",
        "--idempotency-key",
        "k",
        "--name",
        "other",
        "--",
        "python",
        "t.py",
    )
    assert done.returncode == 126
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["explain", "none"], 127),
        (["logs", "none"], 127),
        (["cancel", "none"], 127),
        (["submit", "--tenant", "nobody", "--", "python", "t.py"], 126),
        (["submit", "--tenant", "team $(x)", "--batch-size", "-1", "--", "python", "t.py"], 126),
        (["submit", "--tenant", "team $(x)", "--flexibility", "2", "--", "python", "t.py"], 126),
        (["explain", "../../healthz"], 127),
    ],
)
def test_refusals_are_errors_with_a_code(service: Service, arguments: list[str], code: int) -> None:
    """What the service refuses has a code, an exit code of its kind, and leaves stdout empty."""
    done = service.call(*arguments)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "error[HW-" in done.stderr
    assert "Traceback" not in done.stderr


def test_nodes_before_any_agent(service: Service) -> None:
    """A node that was never heard of is shown as such."""
    [node] = service.json("nodes")["nodes"]
    assert (node["name"], node["gpus"]) == ("n1", [])
    assert "unseen" in service.call("nodes").stdout


def test_report_of_a_cluster_without_energy(service: Service, tmp_path: Path) -> None:
    """A report can be had before the first joule, and says that the sum cannot be checked."""
    done = service.call("report", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "cannot be checked" in done.stdout
    assert "No energy was booked" in (tmp_path / "out" / "energy.html").read_text()


def test_log_of_a_job_that_never_ran_is_empty(service: Service) -> None:
    """A job without output has an empty log, and -f ends at once when it was cancelled."""
    job_id = submit(service, name="silent")
    assert service.call("logs", job_id).stdout == ""
    service.call("cancel", job_id)
    done = service.call("logs", "-f", job_id)
    assert (done.returncode, done.stdout) == (0, "")


def test_jobs_survive_a_restart_of_the_service(service: Service) -> None:
    """A job submitted before a restart is there after it."""
    job_id = submit(service, name="kept")
    assert service.stop() == 0
    assert service.call("ps").returncode == 125
    service.start()
    assert job_id in {job["job_id"] for job in service.json("ps")["jobs"]}


def test_a_bad_inventory_ends_serve_with_bad_input(tmp_path: Path) -> None:
    """The service refuses a broken inventory by its code before it opens anything."""
    (tmp_path / "i.toml").write_text('name = "x"\n')
    done = subprocess.run(
        [*HOROWATT, "serve", "--inventory", str(tmp_path / "i.toml"), "--state-dir", str(tmp_path / "s"),
         "--socket", str(tmp_path / "x"), "--http", "off"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 126
    assert "HW-INV-003" in done.stderr
