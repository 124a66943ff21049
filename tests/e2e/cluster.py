# SPDX-License-Identifier: Apache-2.0
"""A real one-machine cluster for end-to-end tests: service, agent and simulated GPUs as processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horowatt.client import ServiceClient
from horowatt.errors import HorowattError

ROOT = Path(__file__).resolve().parents[2]
HOROWATT = [str(Path(sys.executable).parent / "horowatt")]
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


def wait_for(condition: Callable[[], Any], *, timeout_s: float, what: str, every_s: float = 0.2) -> Any:
    """Return the first true value of ``condition``; fail the test when there is none in time."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(every_s)


@dataclass
class Cluster:
    """Processes and paths of one test cluster."""

    folder: Path
    inventory: Path
    config: Path | None
    simulator: Path
    node: str = "localhost"
    service: subprocess.Popen[bytes] | None = None
    agent: subprocess.Popen[bytes] | None = None
    log: list[Path] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        """The service's Unix socket."""
        return self.folder / "horowatt.sock"

    @property
    def run_dir(self) -> Path:
        """The agent's run directory."""
        return self.folder / "run"

    @property
    def client(self) -> ServiceClient:
        """A client of the service."""
        return ServiceClient(self.socket)

    def start_service(self) -> None:
        """Start the service and wait until it answers."""
        arguments = ["serve", "--state-dir", str(self.folder / "state"), "--socket", str(self.socket)]
        arguments += ["--http", "127.0.0.1:0", "--inventory", str(self.inventory)]
        if self.config is not None:
            arguments += ["--config", str(self.config)]
        self.service = self._spawn("service", arguments)
        wait_for(self._ready, timeout_s=START_TIMEOUT_S, what="the service to answer")

    def start_agent(self) -> None:
        """Start the agent and wait until the service sees its GPUs."""
        self.agent = self._spawn(
            "agent",
            [
                "agent",
                "--node",
                self.node,
                "--socket",
                str(self.socket),
                "--run-dir",
                str(self.run_dir),
                "--simulate",
                str(self.simulator),
            ],
        )
        wait_for(self._gpus_seen, timeout_s=START_TIMEOUT_S, what="the agent's GPUs to be seen")

    def _spawn(self, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        path = self.folder / f"{name}.log"
        self.log.append(path)
        with path.open("ab") as output:
            return subprocess.Popen(
                [*HOROWATT, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _ready(self) -> bool:
        assert self.service is not None
        if self.service.poll() is not None:
            raise AssertionError(f"the service ended: {(self.folder / 'service.log').read_text()}")
        try:
            self.client.get_json("/healthz")
        except HorowattError:
            return False
        return True

    def _gpus_seen(self) -> bool:
        assert self.agent is not None
        if self.agent.poll() is not None:
            raise AssertionError(f"the agent ended: {(self.folder / 'agent.log').read_text()}")
        return any(node.get("gpus") for node in self.nodes())

    def call(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command line and return what it printed."""
        return subprocess.run(
            [*HOROWATT, *arguments],
            env={**os.environ, "HOROWATT_SOCKET": str(self.socket)},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def submit(self, *arguments: str, cwd: Path | None = None) -> str:
        """Submit a job and return its id."""
        done = self.call("submit", "--quiet", *arguments, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, job_id: str) -> dict[str, Any]:
        """Return the view of a job."""
        return self._object(f"/v1/jobs/{job_id}")

    def nodes(self) -> list[dict[str, Any]]:
        """Return the views of the nodes."""
        nodes = self._object("/v1/nodes")["nodes"]
        assert isinstance(nodes, list)
        return nodes

    def energy(self) -> dict[str, Any]:
        """Return the energy report."""
        return self._object("/v1/energy")

    def decisions(self) -> list[dict[str, Any]]:
        """Return all decisions."""
        decisions = self._object("/v1/decisions", after="0")["decisions"]
        assert isinstance(decisions, list)
        return decisions

    def _object(self, path: str, **query: str) -> dict[str, Any]:
        value = self.client.get_json(path, query)
        assert isinstance(value, dict)
        return value

    def wait_phase(self, job_id: str, phase: str, timeout_s: float) -> dict[str, Any]:
        """Wait until a job is in a phase; fail at once when it ended in another."""

        def reached() -> dict[str, Any] | None:
            job = self.job(job_id)
            if job["phase"] == phase:
                return job
            if job["phase"] in {"finished", "failed", "cancelled"}:
                raise AssertionError(
                    f"{job_id} is {job['phase']}: {json.dumps(job['reason'])}\n{self.logs(job_id)}"
                )
            return None

        found = wait_for(reached, timeout_s=timeout_s, what=f"{job_id} to be {phase}")
        assert isinstance(found, dict)
        return found

    def logs(self, job_id: str) -> str:
        """Return the whole log of a job."""
        return self.call("logs", job_id).stdout

    def kill_service(self) -> None:
        """Kill the service without warning."""
        self._end(self.service, signal.SIGKILL)
        self.service = None

    def kill_agent(self) -> None:
        """Kill the agent without warning."""
        self._end(self.agent, signal.SIGKILL)
        self.agent = None

    @staticmethod
    def _end(process: subprocess.Popen[bytes] | None, number: signal.Signals) -> None:
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(number)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def job_processes(self) -> list[int]:
        """Return the launchers and workers of this cluster: they are started with their job folder."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(self.run_dir / "jobs").encode() in words:
                found.append(int(entry.name))
        return found

    def close(self) -> None:
        """Cancel what runs, stop all processes, and make sure that none is left."""
        try:
            for job in self._object("/v1/jobs")["jobs"]:
                self.client.request("POST", f"/v1/jobs/{job['job_id']}/cancel")
            wait_for(
                lambda: not self._object("/v1/jobs")["jobs"], timeout_s=STOP_TIMEOUT_S, what="jobs to end"
            )
        except (HorowattError, AssertionError):
            pass
        self._end(self.agent, signal.SIGTERM)
        self._end(self.service, signal.SIGTERM)
        for pid in self.job_processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@contextmanager
def running_cluster(
    folder: Path,
    *,
    inventory: Path = ROOT / "hostfiles" / "demo.toml",
    config: Path | None = ROOT / "hostfiles" / "demo.config.toml",
    simulator: Path = ROOT / "hostfiles" / "demo.simulator.toml",
) -> Iterator[Cluster]:
    """Yield a running cluster of one node with four simulated GPUs; end it afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(folder, inventory, config, simulator)
    try:
        cluster.start_service()
        cluster.start_agent()
        yield cluster
    except BaseException:
        for path in cluster.log:
            print(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}")
        raise
    finally:
        cluster.close()
        shutil.rmtree(folder / "run", ignore_errors=True)
