# SPDX-License-Identifier: Apache-2.0
"""Training steps on simulated GPUs take as long as the simulation says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from horowatt.devices.simulated import (
    SimulatedGpu,
    SimulatorConfig,
    SimulatorControl,
    build_library,
    create_state,
    simulation_environment,
)
from horowatt.elastic import occupancy
from horowatt.elastic.counters import read_counters
from horowatt.elastic.folder import JobFolder
from horowatt.elastic.hostfile import publish
from horowatt.elastic.occupancy import SimulatedOccupancy
from horowatt.records import BatchRule, LauncherKind, LaunchSpec, Lease, SlotsFile

SPEED_FLOP_PER_S, LINK_BYTES_PER_S = 1e6, 1e5
CONFIG = f"""
[[gpu]]
type = "test-gpu"
count = 1
idle_w = 50.0
context_w = 30.0
demand_w = 300.0
floor_w = 60.0
beta = 0.5
default_limit_w = 400.0
min_limit_w = 100.0
max_limit_w = 400.0
speed_flop_per_s = {SPEED_FLOP_PER_S}
link_bytes_per_s = {LINK_BYTES_PER_S}
link_w = 120.0
memory_bytes = 8589934592
"""
(UUID,) = SimulatorConfig.parse(CONFIG).uuids("n")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("library"))


def _simulate(library: Path, state: Path, clock_s: float | None) -> dict[str, str]:
    create_state(
        SimulatorConfig.parse(CONFIG), state, "n", library=library, allow_nonroot=True, clock_s=clock_s
    )
    return simulation_environment(library, state)


@pytest.fixture
def slept_s(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What steps waited, on a simulation and a host whose clocks stand still."""
    for name, value in _simulate(library, tmp_path / "state", 0.0).items():
        monkeypatch.setenv(name, value)
    waits: list[float] = []
    monkeypatch.setattr(occupancy, "_sleep", waits.append)
    monkeypatch.setattr(occupancy, "_now_s", lambda: 0.0)
    return waits


def test_a_step_waits_for_its_work_and_its_communication(slept_s: list[float]) -> None:
    """6 operations per parameter and sample, and 2(n-1)/n times 4 bytes per parameter."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(10, 10))], lr=0.1)
    alone = SimulatedOccupancy(SimulatedGpu(UUID), lambda: 1)
    alone.after_step(optimizer, 32)
    assert slept_s == [], "the host prepares the next step while the GPU works"
    alone.close()
    assert slept_s == [pytest.approx(6 * 100 * 32 / SPEED_FLOP_PER_S)]
    together = SimulatedOccupancy(SimulatedGpu(UUID), lambda: 4)
    together.after_step(optimizer, 8)
    together.close()
    assert slept_s[1] == pytest.approx(6 * 100 * 8 / SPEED_FLOP_PER_S + 1.5 * 4 * 100 / LINK_BYTES_PER_S)


def test_unknown_samples_are_said_once(slept_s: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """A step of unknown size takes the time of one sample, and the log says so once."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(50))], lr=0.1)
    gpu = SimulatedOccupancy(SimulatedGpu(UUID), lambda: 1)
    gpu.after_step(optimizer, None)
    gpu.after_step(optimizer, None)
    gpu.close()
    assert slept_s == [pytest.approx(6 * 50 / SPEED_FLOP_PER_S)] * 2
    assert capsys.readouterr().err.count("declare a batch size") == 1


def test_a_step_without_new_samples_only_communicates(slept_s: list[float]) -> None:
    """The second optimizer of a batch does not compute the batch again."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(50))], lr=0.1)
    gpu = SimulatedOccupancy(SimulatedGpu(UUID), lambda: 2)
    gpu.after_step(optimizer, 0)
    gpu.close()
    assert slept_s == [pytest.approx(4 * 50 / LINK_BYTES_PER_S)]


def test_a_worker_on_a_simulated_gpu_occupies_it(library: Path, tmp_path: Path) -> None:
    """A script that knows nothing of it trains at the GPU's speed, and the GPU draws power for it."""
    environment = _simulate(library, tmp_path / "state", None)
    (tmp_path / "job").mkdir()
    folder = JobFolder(tmp_path / "job")
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
        working_dir="/",
        virtual_env=None,
        min_width=1,
        max_width=1,
        batch_rule=BatchRule.PER_WORKER,
        batch_size=50,
    )
    lease = Lease(
        lease_id="l",
        job_id="j",
        node="n",
        address="127.0.0.1",
        gpu_uuid=UUID,
        gpu_type="test-gpu",
        slot_index=0,
        simulated=True,
    )
    slots = SlotsFile(job_id="j", generation=1, uid=uid, leases=(lease,), published_at_s=0.0)
    publish(folder, spec, slots, uid, gid)
    (tmp_path / "t.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(100, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(4):\n"
        "    model(torch.randn(50, 100)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    argv = ["-m", "horowatt.elastic.start", "--job-dir", folder.root, "--lease", "l", "--", "python", "t.py"]
    subprocess.run(
        [sys.executable, *argv], cwd=tmp_path, env={**os.environ, **environment}, check=True, timeout=120
    )
    counters = read_counters(folder.lease("l").counters, uid)
    assert counters is not None
    assert (counters.steps, counters.samples) == (4, 200)
    step_s = 6 * 101 * 50 / SPEED_FLOP_PER_S
    assert counters.first_step_end_s is not None
    assert counters.last_step_end_s is not None
    # Three steps lie between the two ends, and no machine makes them faster than the simulated GPU.
    assert counters.last_step_end_s - counters.first_step_end_s >= 3 * step_s
    os.environ |= environment
    try:
        assert SimulatorControl().true_energy_j(UUID) > 4 * step_s * 300.0
    finally:
        for name in environment:
            del os.environ[name]
