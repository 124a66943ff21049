# SPDX-License-Identifier: Apache-2.0
"""The simulated NVML library, asked by the real pynvml and driven through its control functions."""

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import node_specimens
import pynvml
import pytest
from node_specimens import (
    BETA,
    CONTEXT_W,
    DEMAND_W,
    FLOOR_W,
    IDLE_W,
    LINK_BYTES_PER_S,
    LINK_W,
    SPEED_FLOP_PER_S,
)

from horowatt.devices.simulated import (
    SimulatedGpu,
    SimulatorConfig,
    SimulatorControl,
    create_state,
    simulation_environment,
)
from horowatt.errors import InvalidInput, NeedsOperator, NotFound

CONFIG = node_specimens.SIMULATOR
UUIDS = node_specimens.GPUS
library = node_specimens.library


@pytest.fixture
def control(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatorControl]:
    """Two GPUs under a virtual clock that stands at 0, loaded into a fresh pynvml."""
    state = tmp_path / "state"
    create_state(
        SimulatorConfig.parse(CONFIG), state, "node-a", library=library, allow_nonroot=True, clock_s=0.0
    )
    for name, value in simulation_environment(library, state).items():
        monkeypatch.setenv(name, value)
    control = SimulatorControl()
    monkeypatch.setattr(pynvml, "nvmlLib", pynvml.CDLL(str(library)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    pynvml.nvmlInit()
    yield control
    pynvml.nvmlShutdown()


@pytest.fixture
def gpu(control: SimulatorControl) -> SimulatedGpu:
    return SimulatedGpu(UUIDS[0])


def handle(index: int = 0) -> object:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def test_identity_says_simulated_and_is_stable(control: SimulatorControl) -> None:
    """Names carry "(simulated)"; UUIDs stay on one node and differ between nodes."""
    config = SimulatorConfig.parse(CONFIG)
    assert pynvml.nvmlDeviceGetCount() == 2
    assert pynvml.nvmlDeviceGetName(handle()) == "test-gpu (simulated)"
    seen = [pynvml.nvmlDeviceGetUUID(handle(index)) for index in range(2)]
    assert seen == list(config.uuids("node-a"))
    assert all(uuid.startswith("GPU-") for uuid in seen)
    assert not set(seen) & set(config.uuids("node-b"))
    by_uuid = pynvml.nvmlDeviceGetHandleByUUID(seen[1])
    assert pynvml.nvmlDeviceGetIndex(by_uuid) == 1


def test_energy_is_the_integral_of_power(control: SimulatorControl, gpu: SimulatedGpu) -> None:
    """Idle, context, computing and communicating each count for exactly as long as they last."""
    control.set_clock(10.0)
    gpu.attach()
    control.set_clock(12.0)
    step = gpu.step(3 * SPEED_FLOP_PER_S, 2 * LINK_BYTES_PER_S)
    assert (step.wait_s, step.compute_s, step.link_s, step.total_s) == (0.0, 3.0, 2.0, 5.0)
    control.set_clock(20.0)
    gpu.detach()
    control.set_clock(21.0)
    base_w = IDLE_W + CONTEXT_W
    expected_j = 10 * IDLE_W + 2 * base_w + 3 * DEMAND_W + 2 * LINK_W + 3 * base_w + 1 * IDLE_W
    assert control.true_energy_j(UUIDS[0]) == pytest.approx(expected_j, rel=1e-12)
    assert control.true_energy_j(UUIDS[1]) == pytest.approx(21 * IDLE_W, rel=1e-12)
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handle()) == pytest.approx(expected_j * 1e3, abs=1)


@pytest.mark.parametrize("seed", range(5))
def test_energy_does_not_depend_on_how_often_it_is_read(
    control: SimulatorControl, gpu: SimulatedGpu, seed: int
) -> None:
    """Readings at random moments change neither the integral nor the order of the counter."""
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    gpu.attach()
    clock_s, expected_j, last_mj = 0.0, 0.0, 0
    for _ in range(50):
        step = gpu.step(draw.uniform(0, 2) * SPEED_FLOP_PER_S, draw.uniform(0, 2) * LINK_BYTES_PER_S)
        pause_s = draw.uniform(0, 1)
        expected_j += DEMAND_W * step.compute_s + LINK_W * step.link_s + (IDLE_W + CONTEXT_W) * pause_s
        end_s = clock_s + step.total_s + pause_s
        while draw.random() < 0.8:
            clock_s = draw.uniform(clock_s, end_s)
            control.set_clock(clock_s)
            now_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle())
            # The counter lags by at most its period of 100 ms.
            assert now_mj <= control.true_energy_j(UUIDS[0]) * 1e3 <= now_mj + 100 * DEMAND_W + 1
            assert now_mj >= last_mj
            last_mj = now_mj
        clock_s = end_s
        control.set_clock(clock_s)
    assert control.true_energy_j(UUIDS[0]) == pytest.approx(expected_j, rel=1e-9)


def test_limit_slows_and_lowers_power(control: SimulatorControl, gpu: SimulatedGpu) -> None:
    """A limit below the demand is the power, and costs speed by the curve; one above costs nothing."""
    pynvml.nvmlDeviceSetPowerManagementLimit(handle(), 350_000)
    assert gpu.step(SPEED_FLOP_PER_S, 0).compute_s == pytest.approx(1.0)
    pynvml.nvmlDeviceSetPowerManagementLimit(handle(), 200_000)
    step = gpu.step(SPEED_FLOP_PER_S, LINK_BYTES_PER_S)
    assert step.compute_s == pytest.approx(((200 - FLOOR_W) / (DEMAND_W - FLOOR_W)) ** -BETA)
    assert step.link_s == pytest.approx(1.0)
    assert control.true_power_w(UUIDS[0]) == pytest.approx(200.0)
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle()) & 0x4
    control.set_clock(step.compute_s + 0.5)
    assert control.true_power_w(UUIDS[0]) == pytest.approx(LINK_W)
    control.set_clock(step.total_s)
    used_j = 200 * step.compute_s + LINK_W
    assert control.true_energy_j(UUIDS[0]) == pytest.approx(used_j, rel=1e-12)


def test_limit_set_during_a_step_changes_power_at_once(control: SimulatorControl, gpu: SimulatedGpu) -> None:
    """Energy before and after the change is booked at the power of each."""
    gpu.step(4 * SPEED_FLOP_PER_S, 0)
    control.set_clock(1.0)
    pynvml.nvmlDeviceSetPowerManagementLimit(handle(), 100_000)
    control.set_clock(4.0)
    assert control.true_energy_j(UUIDS[0]) == pytest.approx(DEMAND_W + 3 * 100, rel=1e-12)


def test_limits_are_validated_and_need_permission(control: SimulatorControl) -> None:
    """Out of range is an invalid argument; a user other than root needs the simulation's consent."""
    for milliwatts in (99_999, 400_001, 0):
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            pynvml.nvmlDeviceSetPowerManagementLimit(handle(), milliwatts)
    control.set_allow_nonroot(on=False)
    root = os.geteuid() == 0
    if root:
        pynvml.nvmlDeviceSetPowerManagementLimit(handle(), 300_000)
        os.seteuid(65534)
    try:
        with pytest.raises(pynvml.NVMLError_NoPermission):
            pynvml.nvmlDeviceSetPowerManagementLimit(handle(), 200_000)
    finally:
        if root:
            os.seteuid(0)
    assert pynvml.nvmlDeviceGetPowerManagementLimit(handle()) == (300_000 if root else 400_000)


def test_out_of_band_limit_lowers_what_is_enforced_only(control: SimulatorControl, gpu: SimulatedGpu) -> None:
    """A BMC's limit binds power and speed, and leaves the requested limit as it was."""
    control.set_out_of_band_limit(UUIDS[0], 150.0)
    assert pynvml.nvmlDeviceGetPowerManagementLimit(handle()) == 400_000
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(handle()) == 150_000
    gpu.step(SPEED_FLOP_PER_S, 0)
    assert control.true_power_w(UUIDS[0]) == pytest.approx(150.0)
    control.set_out_of_band_limit(UUIDS[0], None)
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(handle()) == 400_000
    with pytest.raises(InvalidInput, match="HW-SIM-009"):
        control.set_out_of_band_limit(UUIDS[0], FLOOR_W)


def test_power_reading_follows_true_power_over_about_a_second(
    control: SimulatorControl, gpu: SimulatedGpu
) -> None:
    """The reading rises from 10 to 90 % within 0.88 s, and its integral equals the energy."""
    gpu.attach()
    control.set_clock(60.0)
    base_w = IDLE_W + CONTEXT_W
    assert pynvml.nvmlDeviceGetPowerUsage(handle()) == pytest.approx(base_w * 1e3, abs=1)
    gpu.step(30 * SPEED_FLOP_PER_S, 0)
    start_j = control.true_energy_j(UUIDS[0])
    assert pynvml.nvmlDeviceGetFieldValues(handle(), [186])[0].value.uiVal == DEMAND_W * 1e3
    readings_w = []
    for tick in range(4001):
        control.set_clock(60.0 + tick / 100)
        readings_w.append(pynvml.nvmlDeviceGetPowerUsage(handle()) / 1e3)
    step_w = DEMAND_W - base_w
    rise = [index for index, watts in enumerate(readings_w) if 0.1 < (watts - base_w) / step_w < 0.9]
    rising_s = sum(1 for index in rise if index < 1000) / 100
    assert rising_s == pytest.approx(0.88, abs=0.02)
    integral_j = sum((a + b) / 2 / 100 for a, b in itertools.pairwise(readings_w))
    assert integral_j == pytest.approx(control.true_energy_j(UUIDS[0]) - start_j, rel=1e-3)


def test_stepping_again_replaces_what_is_left(control: SimulatorControl, gpu: SimulatedGpu) -> None:
    """A process has one step at a time, so one that does not wait cannot pile up load."""
    gpu.step(100 * SPEED_FLOP_PER_S, 0)
    control.set_clock(1.0)
    assert gpu.step(SPEED_FLOP_PER_S, 0).wait_s == 0.0
    control.set_clock(3.0)
    expected_j = 2 * DEMAND_W + 1 * (IDLE_W + CONTEXT_W)
    assert control.true_energy_j(UUIDS[0]) == pytest.approx(expected_j)


@pytest.mark.parametrize(("flop", "link_bytes"), [(-1.0, 0.0), (float("nan"), 0.0), (0.0, float("inf"))])
def test_impossible_steps_are_refused(gpu: SimulatedGpu, flop: float, link_bytes: float) -> None:
    """Negative, NaN and infinite work never reaches the device."""
    with pytest.raises(InvalidInput, match="HW-SIM-009"):
        gpu.step(flop, link_bytes)


def test_processes_and_memory_are_listed(control: SimulatorControl, gpu: SimulatedGpu) -> None:
    """An attached process shows with its id and memory, and only on its own GPU."""
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(handle()) == []
    gpu.attach()
    (process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(handle())
    assert process.pid == os.getpid()
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle())
    assert memory.used == process.usedGpuMemory
    assert memory.used + memory.free == memory.total == 8 << 30
    assert pynvml.nvmlDeviceGetMemoryInfo(handle(), version=pynvml.nvmlMemory_v2).used == memory.used
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(handle(1)) == []
    assert pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle()) == []


def test_utilization_is_the_share_of_busy_time(control: SimulatorControl, gpu: SimulatedGpu) -> None:
    """A GPU under constant load reads 100 %, one without load 0 %."""
    assert pynvml.nvmlDeviceGetUtilizationRates(handle()).gpu == 0
    gpu.step(100 * SPEED_FLOP_PER_S, 0)
    control.set_clock(50.0)
    assert pynvml.nvmlDeviceGetUtilizationRates(handle()).gpu == 100
    assert pynvml.nvmlDeviceGetUtilizationRates(handle(1)).gpu == 0


def test_field_values_agree_with_functions(control: SimulatorControl, gpu: SimulatedGpu) -> None:
    """Each field has its own result, and says what the function of the same name says."""
    control.set_clock(7.0)
    fields = pynvml.nvmlDeviceGetFieldValues(
        handle(), [83, 191, 185, 187, 188, 189, 190, 192, 9999, (186, 1)]
    )
    energy_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle())
    assert energy_mj > 0
    assert [field.value.ullVal for field in fields[:2]] == [energy_mj, energy_mj]
    assert fields[2].value.uiVal == pynvml.nvmlDeviceGetPowerUsage(handle())
    assert [field.value.uiVal for field in fields[3:8]] == [100_000, 400_000, 400_000, 400_000, 400_000]
    assert [field.nvmlReturn for field in fields] == [0] * 8 + [pynvml.NVML_ERROR_NOT_SUPPORTED] * 2


def test_every_function_that_tools_ask_for_answers(control: SimulatorControl) -> None:
    """What Zeus, CodeCarbon and nvitop call is there: an answer, or Not Supported."""
    device = handle()
    assert pynvml.nvmlSystemGetDriverVersion().endswith("simulated")
    assert pynvml.nvmlSystemGetNVMLVersion()
    assert pynvml.nvmlSystemGetCudaDriverVersion() > 0
    assert pynvml.nvmlDeviceGetArchitecture(device) == pynvml.NVML_DEVICE_ARCH_AMPERE
    assert pynvml.nvmlDeviceGetPciInfo(device).busId == "00000000:01:00.0"
    assert pynvml.nvmlDeviceGetHandleByPciBusId("00000000:02:00.0")
    assert pynvml.nvmlDeviceGetTemperature(device, 0) == pynvml.nvmlDeviceGetTemperatureV(device, 0) > 0
    assert pynvml.nvmlDeviceGetClockInfo(device, 0) < pynvml.nvmlDeviceGetMaxClockInfo(device, 0)
    assert pynvml.nvmlDeviceGetPowerManagementLimitConstraints(device) == [100_000, 400_000]
    assert pynvml.nvmlDeviceGetPowerManagementDefaultLimit(device) == 400_000
    assert pynvml.nvmlDeviceGetPersistenceMode(device) == 1
    assert pynvml.nvmlDeviceGetPerformanceState(device) == 8
    assert pynvml.nvmlDeviceGetComputeMode(device) == 0
    for ask in (pynvml.nvmlDeviceGetMigMode, pynvml.nvmlDeviceGetSerial, pynvml.nvmlDeviceGetFanSpeed):
        with pytest.raises(pynvml.NVMLError_NotSupported):
            ask(device)


def test_bad_handles_and_versions_are_refused(control: SimulatorControl) -> None:
    """Handles that were never handed out, and structs of another version, get NVML's own errors."""
    for call in (
        lambda: pynvml.nvmlDeviceGetHandleByIndex(2),
        lambda: pynvml.nvmlDeviceGetPowerUsage(None),
        lambda: pynvml.nvmlDeviceGetPowerUsage(pynvml.c_nvmlDevice_t()),
    ):
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            call()
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByUUID("GPU-none")
    with pytest.raises(pynvml.NVMLError) as caught:
        pynvml.nvmlDeviceGetMemoryInfo(handle(), version=0x03000028)
    assert caught.value.value == 25


def test_calls_before_init_are_refused(control: SimulatorControl) -> None:
    """After the last shutdown NVML answers Uninitialized, and a new init mends it."""
    device = handle()
    pynvml.nvmlShutdown()
    try:
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            pynvml.nvmlDeviceGetPowerUsage(device)
    finally:
        pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetPowerUsage(device) > 0


def test_lost_gpu_refuses_everything(control: SimulatorControl, gpu: SimulatedGpu) -> None:
    """A lost GPU fails every call, drops its load, and its neighbour does not notice."""
    device = handle()
    gpu.step(100 * SPEED_FLOP_PER_S, 0)
    control.set_lost(UUIDS[0])
    for call in (pynvml.nvmlDeviceGetPowerUsage, pynvml.nvmlDeviceGetUUID):
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            call(device)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        handle()
    with pytest.raises(NeedsOperator, match="HW-SIM-007"):
        gpu.step(1.0, 0.0)
    assert pynvml.nvmlDeviceGetPowerUsage(handle(1)) > 0
    control.set_lost(UUIDS[0], 0)
    assert control.true_power_w(UUIDS[0]) == pytest.approx(IDLE_W)


def test_counter_reset_keeps_the_truth(control: SimulatorControl) -> None:
    """After a driver reload the counter starts at 0 and the limit is the default again."""
    pynvml.nvmlDeviceSetPowerManagementLimit(handle(), 200_000)
    control.set_clock(100.0)
    control.reset_counter(UUIDS[0])
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handle()) == 0
    assert pynvml.nvmlDeviceGetPowerManagementLimit(handle()) == 400_000
    control.set_clock(102.0)
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handle()) == pytest.approx(2e3 * IDLE_W, abs=1)
    assert control.true_energy_j(UUIDS[0]) == pytest.approx(102 * IDLE_W)


def test_clock_goes_forward_only(control: SimulatorControl) -> None:
    """A virtual clock never goes back, so energy never shrinks."""
    control.set_clock(5.0)
    with pytest.raises(InvalidInput, match="HW-SIM-009"):
        control.set_clock(4.0)


def test_unknown_gpu_and_missing_simulation_are_named(
    control: SimulatorControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker on a GPU that is not there, or without a simulation, is told what is wrong."""
    with pytest.raises(NotFound, match="HW-SIM-006"):
        SimulatedGpu("GPU-none")
    monkeypatch.delenv("HOROWATT_SIM_STATE")
    with pytest.raises(NeedsOperator, match="HOROWATT_SIM_STATE is not set"):
        SimulatedGpu(UUIDS[0])
