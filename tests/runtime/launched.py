# SPDX-License-Identifier: Apache-2.0
"""A job in a temporary folder under a real Horowatt launcher, resized by publishing slots files."""

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from horowatt.elastic.counters import Counters, is_held, read_counters
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

PATIENCE_S = 150.0
"""Only how long a broken test waits; nothing is asserted about time."""
ENDED = frozenset({LauncherState.FINISHED, LauncherState.FAILED, LauncherState.LOST, LauncherState.STOPPED})


class Job:
    """One job in a temporary folder, and its launcher."""

    def __init__(self, tmp_path: Path, name: str = "job") -> None:
        self.work = tmp_path / "work"
        self.work.mkdir()
        self.folder = JobFolder(tmp_path / name)
        self.folder.root.mkdir(mode=0o700)
        self.launcher: subprocess.Popen[bytes] | None = None
        self.spec: LaunchSpec | None = None
        self._generation = 0

    def describe(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        min_width: int = 1,
        max_width: int = 4,
    ) -> None:
        self.spec = LaunchSpec(
            job_id="j",
            name="j",
            tenant="t",
            uid=os.getuid(),
            gid=os.getgid(),
            username="u",
            launcher=LauncherKind.HOROWATT,
            command=command,
            environment={"OMP_NUM_THREADS": "1", **(environment or {})},
            working_dir=str(self.work),
            virtual_env=None,
            min_width=min_width,
            max_width=max_width,
            batch_rule=BatchRule.PER_WORKER,
            batch_size=None,
        )

    def script(self, text: str, name: str = "train.py") -> str:
        (self.work / name).write_text(textwrap.dedent(text))
        return name

    def publish(self, *lease_ids: str) -> int:
        assert self.spec is not None
        self._generation += 1
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
        slots = SlotsFile(
            job_id="j",
            generation=self._generation,
            uid=os.getuid(),
            leases=leases,
            published_at_s=time.time(),
        )
        publish(self.folder, self.spec, slots, os.getuid(), os.getgid())
        return self._generation

    def start(self, attempt: int = 1, **environment: str) -> subprocess.Popen[bytes]:
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "horowatt.elastic.launcher", self.folder.root, "--attempt", str(attempt)],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
        )
        return self.launcher

    def status(self) -> LauncherStatus | None:
        try:
            return decode(self.folder.launcher_json.read_bytes(), LauncherStatus)
        except FileNotFoundError:
            return None

    def wait_until(self, what: str, true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not true():
            status = self.status()
            over = status is not None and status.state in ENDED
            if time.monotonic() > deadline_s or (over and not true()):
                pytest.fail(f"{what} did not happen\n{self.story()}")
            time.sleep(0.05)

    def wait_applied(self, generation: int) -> None:
        """Wait until the workers train at a generation: they are in its world, and made a step there."""

        def applied() -> bool:
            status = self.status()
            if status is None or status.generation_applied != generation:
                return False
            slots = decode(self.folder.slots_json.read_bytes(), SlotsFile)
            found = [self.counters(lease.lease_id) for lease in slots.leases]
            return any(counters is not None and counters.first_step_end_s for counters in found)

        self.wait_until(f"generation {generation}", applied)

    def end(self) -> LauncherStatus:
        assert self.launcher is not None
        self.launcher.wait(PATIENCE_S)
        status = self.status()
        assert status is not None
        assert status.state in ENDED, self.story()
        return status

    def counters(self, lease_id: str) -> Counters | None:
        return read_counters(self.folder.lease(lease_id).counters, os.getuid())

    def held(self) -> set[str]:
        leases = self.folder.leases
        return (
            {entry.name for entry in leases.iterdir() if is_held(entry / "lock")}
            if leases.exists()
            else set()
        )

    def exit_code(self, lease_id: str) -> int:
        path = self.folder.lease(lease_id).exit_json
        # Written by the launcher, an instant after the worker gave its lock up by ending.
        self.wait_until(f"the exit of {lease_id}", path.exists)
        code = json.loads(path.read_text())["exit_code"]
        assert isinstance(code, int)
        return code

    def output(self, lease_id: str) -> str:
        return self.folder.lease(lease_id).output_log.read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = self.folder.events.read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def story(self) -> str:
        logs = [self.folder.launcher_json, self.folder.launcher_log, self.folder.events]
        logs += sorted(self.folder.leases.glob("*/output.log"))
        return "\n".join(f"--- {log}\n{log.read_text()}" for log in logs if log.exists())

    def stop_training(self) -> None:
        (self.work / "stop").touch()

    def clean_up(self) -> None:
        if self.launcher is not None and self.launcher.poll() is None:
            self.launcher.terminate()
            try:
                self.launcher.wait(30)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
                self.launcher.wait()
