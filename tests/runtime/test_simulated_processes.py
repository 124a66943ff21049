# SPDX-License-Identifier: Apache-2.0
"""Simulated GPUs shared by several processes, some of which are killed at the worst moment."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import node_specimens
import pytest
from node_specimens import CONFIG, DEMAND_W, GPUS, IDLE_W, SPEED_FLOP_PER_S

from horowatt.devices.simulated import (
    SimulatedGpu,
    SimulatorConfig,
    SimulatorControl,
    create_state,
    simulation_environment,
)
from horowatt.errors import NeedsOperator

library = node_specimens.library


@pytest.fixture
def state(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two GPUs under a virtual clock that stands at 0, in the environment of this process."""
    path = tmp_path / "state"
    create_state(CONFIG, path, "node-a", library=library, clock_s=0.0)
    for name, value in simulation_environment(library, path).items():
        monkeypatch.setenv(name, value)
    return path


@contextmanager
def worker(body: str) -> Iterator[subprocess.Popen[str]]:
    """Run Python code with ``gpu`` at hand in a process of its own, and end it afterwards."""
    setup = (
        f"import sys\nfrom horowatt.devices.simulated import SimulatedGpu\ngpu = SimulatedGpu({GPUS[0]!r})\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", setup + body], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, f"the worker ended with {process.wait()}"
    return line


WORK_THEN_WAIT = "print(gpu.step(100e9, 0).total_s, flush=True)\nsys.stdin.read()\n"


def test_processes_see_the_same_gpus(state: Path) -> None:
    """Load that one process enters is drawn, listed and counted in every other."""
    control = SimulatorControl()
    with worker(WORK_THEN_WAIT) as process:
        assert float(line_of(process)) == 100.0
        control.set_clock(10.0)
        assert control.true_power_w(GPUS[0]) == pytest.approx(DEMAND_W)
        assert control.true_energy_j(GPUS[0]) == pytest.approx(10 * DEMAND_W)
        assert control.true_energy_j(GPUS[1]) == pytest.approx(10 * IDLE_W)


def test_kill_ends_the_load_of_a_worker(state: Path) -> None:
    """A worker that is killed in the middle of a step stops drawing, context and all."""
    control = SimulatorControl()
    with worker(WORK_THEN_WAIT) as process:
        line_of(process)
        control.set_clock(10.0)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert control.true_power_w(GPUS[0]) == pytest.approx(IDLE_W)
        control.set_clock(20.0)
        assert control.true_energy_j(GPUS[0]) == pytest.approx(10 * DEMAND_W + 10 * IDLE_W)


def test_worker_that_nobody_reaped_counts_as_gone(state: Path) -> None:
    """A dead worker whose parent has not waited for it holds no GPU."""
    control = SimulatorControl()
    with worker(WORK_THEN_WAIT) as process:
        line_of(process)
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert control.true_power_w(GPUS[0]) == pytest.approx(IDLE_W)


def test_steps_of_two_processes_follow_one_another(state: Path) -> None:
    """The GPU never does two steps at once: the second process waits, and power is not added."""
    control = SimulatorControl()
    gpu = SimulatedGpu(GPUS[0])
    gpu.step(2 * SPEED_FLOP_PER_S, 0)
    body = (
        "step = gpu.step(1e9, 0)\n"
        "print(step.wait_s, step.compute_s, step.total_s, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with worker(body) as process:
        assert line_of(process) == "2.0 1.0 3.0"
        control.set_clock(2.5)
        assert control.true_power_w(GPUS[0]) == pytest.approx(DEMAND_W)
        assert control.true_energy_j(GPUS[0]) == pytest.approx(2.5 * DEMAND_W)
    gpu.detach()


@pytest.mark.parametrize("seed", range(3))
def test_kill_at_any_instruction_leaves_the_state_whole(state: Path, seed: int) -> None:
    """Workers killed while they change the GPU leave no lock behind, and no energy is lost or added."""
    control = SimulatorControl()
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    body = (
        "print('ready', flush=True)\n"
        "while True:\n"
        "    gpu.step(1e9, 0)\n"
        "    gpu.detach()\n"
        "    gpu.attach()\n"
        "    gpu.detach()\n"
    )
    for round_number in range(1, 6):
        with worker(body) as process:
            line_of(process)
            time.sleep(draw.uniform(0, 0.02))
            process.send_signal(signal.SIGKILL)
            process.wait()
        # The clock stood still while the worker ran, so only idle time may have been booked.
        control.set_clock(10.0 * round_number)
        assert control.true_power_w(GPUS[0]) == pytest.approx(IDLE_W)
        assert control.true_energy_j(GPUS[0]) == pytest.approx(10 * round_number * IDLE_W)


def test_real_time_passes_without_a_virtual_clock(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle GPU uses idle power times the time that passed."""
    path = tmp_path / "live"
    before_s = time.monotonic()
    create_state(CONFIG, path, "node-a", library=library)
    created_s = time.monotonic()
    for name, value in simulation_environment(library, path).items():
        monkeypatch.setenv(name, value)
    control = SimulatorControl()
    time.sleep(0.05)
    first_s = time.monotonic()
    energy_j = control.true_energy_j(GPUS[0])
    last_s = time.monotonic()
    assert IDLE_W * (first_s - created_s) <= energy_j <= IDLE_W * (last_s - before_s)


def test_agent_that_starts_again_keeps_the_state(state: Path, library: Path) -> None:
    """The same GPUs keep their counters; other GPUs replace the file."""
    control = SimulatorControl()
    control.set_clock(10.0)
    assert not create_state(CONFIG, state, "node-a", library=library, clock_s=0.0)
    assert control.true_energy_j(GPUS[0]) == pytest.approx(10 * IDLE_W)
    other = SimulatorConfig((replace(CONFIG.gpu[0], idle_w=60.0),))
    assert create_state(other, state, "node-a", library=library, clock_s=0.0)
    assert SimulatorControl().true_energy_j(GPUS[0]) == 0.0


def test_every_user_may_enter_load(state: Path) -> None:
    """The state can be written by every tenant's workers, whatever the umask of the agent."""
    assert state.stat().st_mode & 0o777 == 0o666


def test_broken_state_file_is_refused(state: Path, library: Path) -> None:
    """A truncated or foreign file is an error that names it, and a new state replaces it."""
    for content in (b"", b"not a state file" * 1000):
        state.unlink()
        state.write_bytes(content)
        with pytest.raises(NeedsOperator, match="HW-SIM-005"):
            SimulatedGpu(GPUS[0])
    assert create_state(
        CONFIG, state, "node-a", clock_s=0.0, library=Path(os.environ["HOROWATT_NVML_LIBRARY"])
    )
    assert SimulatorControl().true_energy_j(GPUS[0]) == 0.0


def test_state_that_cannot_be_written_is_refused(library: Path, tmp_path: Path) -> None:
    """A folder that is not there is named, and nothing is left behind."""
    with pytest.raises(NeedsOperator, match="HW-SIM-005"):
        create_state(CONFIG, tmp_path / "none" / "state", "node-a", library=library)
    assert not (tmp_path / "none").exists()
