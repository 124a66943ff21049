# SPDX-License-Identifier: Apache-2.0
"""The demo's cluster: a service and an agent on this machine, in a folder of their own."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horowatt.client import ServiceClient
from horowatt.errors import HorowattError, NeedsOperator, RetryLater
from horowatt_allocator.cli.demonstration.processes import Household
from horowatt_allocator.cli.views import JobView, items, send
from horowatt_allocator.records.energy import EnergyReport
from horowatt_allocator.reports.energy_json import parse_report

START_TIMEOUT_S = 60.0
CANCEL_TIMEOUT_S = 25.0
_POLL_S = 0.2
HOROWATT = (sys.executable, "-m", "horowatt_allocator.cli.main")
"""The command line of this very package, whatever ``PATH`` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFiles:
    """What the cluster is made of. ``simulator`` is None on real GPUs."""

    folder: Path
    inventory: Path
    config: Path
    simulator: Path | None
    node: str

    @property
    def socket(self) -> Path:
        """The service's Unix socket; the folder's path is short because socket paths must be."""
        return self.folder / "horowatt.sock"


class DemoCluster:
    """Starts the processes and speaks with the service as users do."""

    def __init__(self, files: ClusterFiles, household: Household) -> None:
        self.files = files
        self.household = household
        self.client = ServiceClient(files.socket)

    def start_service(self) -> None:
        """Start ``horowatt serve`` and wait until it answers."""
        self._start(
            "service",
            [
                *(
                    "serve",
                    "--state-dir",
                    str(self.files.folder / "state"),
                    "--socket",
                    str(self.files.socket),
                ),
                *("--http", "127.0.0.1:0", "--inventory", str(self.files.inventory)),
                *("--config", str(self.files.config)),
            ],
        )
        self._wait(self._answers, "service", "answer")

    def start_agent(self) -> int:
        """Start ``horowatt agent``, wait until the service sees its GPUs and return their number."""
        arguments = ["agent", "--node", self.files.node, "--socket", str(self.files.socket)]
        arguments += ["--run-dir", str(self.files.folder / "run"), "--stop-jobs"]
        if self.files.simulator is not None:
            arguments += ["--simulate", str(self.files.simulator)]
        self._start("agent", arguments)
        self._wait(lambda: self.num_gpus() > 0, "agent", "report its GPUs")
        return self.num_gpus()

    def num_gpus(self) -> int:
        """Return how many GPUs the service sees."""
        return sum(len(items(node, "gpus")) for node in items(send(self.client, "GET", "/v1/nodes"), "nodes"))

    def http_address(self) -> str | None:
        """Return where the read-only HTTP side is, as the service printed it."""
        found = re.findall(r"http://\S+:\d+", self.household.tail("service", num_lines=1000))
        return found[-1] if found else None

    def submit(self, flags: Sequence[str], command: Sequence[str], folder: Path) -> str:
        """Submit a job through the command line and return its id."""
        return self._call(["submit", "--quiet", *flags, "--", *command], folder).strip()

    def log(self, job_id: str) -> str:
        """Return all that a job printed, through the command line."""
        return self._call(["logs", "--raw", job_id], self.files.folder)

    def job(self, job_id: str) -> JobView:
        """Return one job."""
        return JobView.from_json(send(self.client, "GET", f"/v1/jobs/{job_id}"))

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs, ended ones included, in order of submission."""
        return items(send(self.client, "GET", "/v1/jobs", query={"all": "true"}), "jobs")

    def decisions(self, after: int) -> list[dict[str, Any]]:
        """Return the decisions after a number."""
        query = {"after": str(after)}
        return items(send(self.client, "GET", "/v1/decisions", query=query), "decisions")

    def energy(self) -> EnergyReport:
        """Return the energy report."""
        return parse_report(self.client.request("GET", "/v1/energy"))

    def check_alive(self) -> None:
        """Check that service and agent run.

        Raises:
            NeedsOperator: ``HW-DEMO-003`` with the end of the log of the one that ended.
        """
        for name in ("service", "agent"):
            process = self.household.processes.get(name)
            if process is not None and process.poll() is not None:
                raise self._ended(name, process.returncode)

    def stop(self) -> None:
        """Cancel the jobs, wait for their end, then end the agent and the service."""
        # Without a service the processes are ended all the same, by the household.
        with contextlib.suppress(HorowattError):
            self._cancel_jobs()
        self.household.terminate("agent")
        self.household.terminate("service")

    def _cancel_jobs(self) -> None:
        def active() -> list[JobView]:
            return [job for job in map(JobView, self.jobs()) if not job.ended]

        for job in active():
            send(self.client, "POST", f"/v1/jobs/{job.job_id}/cancel")
        end_s = time.monotonic() + CANCEL_TIMEOUT_S
        while active() and time.monotonic() < end_s:
            self.household.reap_strays()
            time.sleep(_POLL_S)

    def _start(self, name: str, arguments: Sequence[str]) -> None:
        log = self.files.folder / f"{name}.log"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.household.start(name, [*HOROWATT, *arguments], log=log, environment=environment)

    def _wait(self, done: Callable[[], bool], name: str, what: str) -> None:
        end_s = time.monotonic() + START_TIMEOUT_S
        while not done():
            self.check_alive()
            if time.monotonic() > end_s:
                raise NeedsOperator(
                    "HW-DEMO-003",
                    f"the {name} did not {what} within {START_TIMEOUT_S:.0f} s",
                    because=self.household.tail(name) or "its log is empty",
                    hint="run 'horowatt doctor'",
                )
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        try:
            self.client.request("GET", "/healthz")
        except RetryLater:
            return False
        return True

    def _ended(self, name: str, code: int) -> NeedsOperator:
        return NeedsOperator(
            "HW-DEMO-003",
            f"the {name} ended with exit code {code}",
            because=self.household.tail(name) or "its log is empty",
            hint="run 'horowatt doctor'; 'horowatt demo --keep' keeps the logs",
        )

    def _call(self, arguments: Sequence[str], folder: Path) -> str:
        done = subprocess.run(
            [*HOROWATT, *arguments],
            env={**os.environ, "HOROWATT_SOCKET": str(self.files.socket)},
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=START_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise HorowattError(
                "HW-DEMO-004",
                f"'horowatt {arguments[0]}' failed with exit code {done.returncode}",
                because=done.stderr.strip()[-2000:],
                hint="this is the same command that users run; its own error says what to do",
            )
        return done.stdout
