# SPDX-License-Identifier: Apache-2.0
"""The NVML boundary, on the real pynvml and the simulated library."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import node_specimens
import pynvml
import pytest
from node_specimens import CONFIG, GPUS

from horowatt.devices.gpu import GpuProcess
from horowatt.devices.nvml import GpuDevice, Nvml, open_nvml
from horowatt.devices.reading import Measured, Unmeasured, value_or_none
from horowatt.devices.simulated import (
    SimulatedGpu,
    SimulatorControl,
    create_state,
    simulation_environment,
)
from horowatt.errors import InvalidInput, NeedsOperator, NotAllowed
from horowatt.records import GpuReport
from horowatt.wire import decode, encode

library = node_specimens.library


@pytest.fixture
def control(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatorControl:
    """Two simulated GPUs under a virtual clock at 1000 s, and a pynvml that loaded nothing yet."""
    state = tmp_path / "state"
    create_state(CONFIG, state, "node-a", library=library, allow_nonroot=True, clock_s=0.0)
    for name, value in simulation_environment(library, state).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    control = SimulatorControl()
    control.set_clock(1000.0)
    return control


@pytest.fixture
def nvml(control: SimulatorControl) -> Iterator[Nvml]:
    with open_nvml() as nvml:
        yield nvml


@pytest.fixture
def gpu(nvml: Nvml) -> GpuDevice:
    return nvml.gpus()[0]


@contextmanager
def ordinary_user(control: SimulatorControl) -> Iterator[None]:
    """Act as a user who may not set limits, whoever runs the tests."""
    control.set_allow_nonroot(on=False)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_inventory_is_by_uuid(nvml: Nvml) -> None:
    """Each GPU is one object with its UUID, position and product name, and stays that object."""
    gpus = nvml.gpus()
    assert [(gpu.uuid, gpu.nvml_index, gpu.name) for gpu in gpus] == [
        (uuid, index, "test-gpu (simulated)") for index, uuid in enumerate(GPUS)
    ]
    assert all(gpu.simulated for gpu in gpus)
    assert nvml.gpus() == gpus
    assert nvml.driver_version()


def test_readings_are_in_si_units_and_say_their_source(control: SimulatorControl, gpu: GpuDevice) -> None:
    """Joules, watts and shares, each with the call that gave it."""
    assert gpu.energy_j() == Measured(50_000.0, "nvmlDeviceGetTotalEnergyConsumption")
    assert gpu.power_w() == Measured(50.0, "nvmlDeviceGetPowerUsage")
    limits = [
        gpu.enforced_limit_w(),
        gpu.requested_limit_w(),
        gpu.default_limit_w(),
        gpu.min_limit_w(),
        gpu.max_limit_w(),
    ]
    assert [value_or_none(limit) for limit in limits] == [400.0, 400.0, 400.0, 100.0, 400.0]
    assert gpu.processes() == ()
    worker = SimulatedGpu(gpu.uuid)
    worker.step(100e9, 0)
    control.set_clock(1050.0)
    assert gpu.processes() == (GpuProcess(pid=os.getpid(), memory_bytes=512 << 20),)
    assert gpu.power_instant_w() == Measured(300.0, "NVML_FI_DEV_POWER_INSTANT")
    assert value_or_none(gpu.utilization()) == 1.0
    assert value_or_none(gpu.memory_used_bytes()) == 512 << 20
    assert value_or_none(gpu.temperature_c()) == 66.0


def test_faults_say_what_to_do(
    control: SimulatorControl, nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the driver recommends comes first; repaired memory is no fault, nor is what cannot be asked."""
    gpu, older = nvml.gpus()
    assert gpu.fault() == ""
    control.set_memory_errors(gpu.uuid, 3)
    assert gpu.fault() == ""
    control.set_memory_errors(gpu.uuid, 3, remap_pending=True)
    assert gpu.fault() == "3 uncorrectable ECC errors pending: it needs a reset to repair its memory"
    control.set_error(gpu.uuid, "nvmlDeviceGetTotalEccErrors", 3)
    assert gpu.fault() == "needs a reset to repair its memory"
    control.set_memory_errors(gpu.uuid, 3, remap_pending=True, recovery_action=2)
    assert gpu.fault() == "needs a reboot of the node"
    control.set_error(older.uuid, "nvmlDeviceGetRemappedRows", 3)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetRetiredPagesPendingStatus", lambda _: 1)
    assert older.fault() == "needs a reset to repair its memory"
    control.set_lost(gpu.uuid, 16)
    assert gpu.report(None, 0.0).lost
    assert (gpu.lost, gpu.fault()) == (True, "needs a reset")


def test_memory_is_that_of_processes_and_of_nobody(control: SimulatorControl, gpu: GpuDevice) -> None:
    """Both are in what is used; only processes name theirs. An old driver answers the old question."""
    worker = SimulatedGpu(gpu.uuid)
    worker.attach()
    worker.use_memory(3 << 30)
    control.set_ownerless_memory(gpu.uuid, 1 << 30)
    assert gpu.processes() == (GpuProcess(pid=os.getpid(), memory_bytes=3 << 30),)
    assert gpu.graphics_processes() == ()
    assert gpu.memory_used_bytes() == Measured(float(4 << 30), "nvmlDeviceGetMemoryInfo_v2")
    assert value_or_none(gpu.memory_total_bytes()) == 8 << 30
    assert value_or_none(gpu.sm_clock_mhz()) == 210
    worker.detach()
    assert value_or_none(gpu.memory_used_bytes()) == 1 << 30
    with pytest.raises(InvalidInput):
        worker.use_memory(1)


def test_report_carries_everything_and_survives_the_wire(nvml: Nvml) -> None:
    """A healthy GPU has no absent value, and the record reads back as it was."""
    report = nvml.gpus()[1].report(None, 123.0)
    assert report == GpuReport(
        uuid=GPUS[1],
        nvml_index=1,
        gpu_type="test-gpu",
        simulated=True,
        energy_j=50_000.0,
        power_w=50.0,
        limit_w=400.0,
        default_limit_w=400.0,
        min_limit_w=100.0,
        max_limit_w=400.0,
        can_set_limit=True,
        lost=False,
        sampled_at_s=123.0,
    )
    assert decode(encode(report), GpuReport) == report
    assert nvml.gpus()[1].report("a100", 0.0).gpu_type == "a100"


def test_missing_counter_is_absent_and_never_zero(control: SimulatorControl, gpu: GpuDevice) -> None:
    """A GPU without an energy counter says so; its other values stay, and it is not asked again."""
    control.set_error(gpu.uuid, "nvmlDeviceGetTotalEnergyConsumption", 3)
    report = gpu.report(None, 0.0)
    assert report.energy_j is None
    assert report.unmeasured == {"energy_j": "nvmlDeviceGetTotalEnergyConsumption: Not Supported"}
    assert report.power_w == 50.0
    assert not report.lost
    control.set_error(gpu.uuid, "nvmlDeviceGetTotalEnergyConsumption", 0)
    assert isinstance(gpu.energy_j(), Unmeasured)


def test_passing_trouble_is_asked_again(control: SimulatorControl, gpu: GpuDevice) -> None:
    """An unknown error or a lost permission makes one reading absent, not the next one."""
    for code in (999, 4, 10):
        control.set_error(gpu.uuid, "nvmlDeviceGetPowerUsage", code)
        assert isinstance(gpu.power_w(), Unmeasured)
        assert isinstance(gpu.power_instant_w(), Unmeasured)
        control.set_error(gpu.uuid, "nvmlDeviceGetPowerUsage", 0)
        assert gpu.power_w() == Measured(50.0, "nvmlDeviceGetPowerUsage")


def test_counter_that_drops_to_zero_is_a_failed_reading(control: SimulatorControl, gpu: GpuDevice) -> None:
    """A 0 after a value is no reading; the counter is believed again when it counts again."""
    assert isinstance(gpu.energy_j(), Measured)
    control.set_counter_reads_zero(gpu.uuid, on=True)
    assert gpu.energy_j() == Unmeasured("the energy counter read 0 after 50000.0 J")
    control.set_counter_reads_zero(gpu.uuid, on=False)
    assert value_or_none(gpu.energy_j()) == 50_000.0
    control.reset_counter(gpu.uuid)
    control.set_clock(1001.0)
    assert value_or_none(gpu.energy_j()) == 50.0


@pytest.mark.parametrize("code", [15, 16])
def test_lost_gpu_leaves_others_intact(control: SimulatorControl, nvml: Nvml, code: int) -> None:
    """One GPU off the bus is reported lost with its reasons, and the other one as ever."""
    lost, intact = nvml.gpus()
    control.set_lost(lost.uuid, code)
    report = lost.report("a100", 0.0)
    assert report.lost
    assert report.energy_j is report.power_w is report.limit_w is None
    assert set(report.unmeasured) >= {"energy_j", "power_w", "limit_w"}
    assert not report.can_set_limit
    assert intact.report("a100", 0.0).unmeasured == {}
    again = nvml.gpus()
    assert again == (lost, intact)
    assert lost.lost
    assert 0 in nvml.unreachable
    control.set_lost(lost.uuid, 0)
    assert nvml.gpus() == (lost, intact)
    recovered = lost.report("a100", 0.0)
    assert (recovered.lost, recovered.power_w, recovered.can_set_limit) == (False, 50.0, True)


def test_gpu_lost_before_the_first_look_is_named(control: SimulatorControl, nvml: Nvml) -> None:
    """A GPU whose UUID was never read cannot be listed, but is not passed over in silence."""
    control.set_lost(GPUS[0])
    assert [gpu.uuid for gpu in nvml.gpus()] == [GPUS[1]]
    assert nvml.unreachable == {0: "GPU is lost"}


def test_limit_is_set_and_read_back(control: SimulatorControl, gpu: GpuDevice) -> None:
    """What comes back is the limit in force, which may be lower than the one asked for."""
    assert value_or_none(gpu.set_limit_w(250.0)) == 250.0
    assert value_or_none(gpu.requested_limit_w()) == 250.0
    control.set_out_of_band_limit(gpu.uuid, 150.0)
    assert value_or_none(gpu.set_limit_w(300.0)) == 150.0
    assert value_or_none(gpu.requested_limit_w()) == 300.0


@pytest.mark.parametrize("watts", [99.0, 401.0, 0.0, -5.0, float("nan"), float("inf"), 1e12])
def test_impossible_limits_are_refused(gpu: GpuDevice, watts: float) -> None:
    """A limit out of range is an error that names the range, and changes nothing."""
    with pytest.raises(InvalidInput, match="100 to 400 W") as caught:
        gpu.set_limit_w(watts)
    assert caught.value.code == "HW-NVML-002"
    assert value_or_none(gpu.requested_limit_w()) == 400.0


def test_limits_need_permission(control: SimulatorControl, gpu: GpuDevice) -> None:
    """Without permission setting is refused, the report says it cannot be done, and readings go on."""
    with ordinary_user(control):
        report = gpu.report(None, 0.0)
        assert not report.can_set_limit
        assert report.unmeasured == {}
        with pytest.raises(NotAllowed, match="HW-NVML-104"):
            gpu.set_limit_w(200.0)
    assert value_or_none(gpu.requested_limit_w()) == 400.0


def test_refused_limit_tells_the_next_report(control: SimulatorControl, gpu: GpuDevice) -> None:
    """A permission that is lost while the agent runs is noticed at the first refusal."""
    assert gpu.can_set_limit()
    with ordinary_user(control), pytest.raises(NotAllowed):
        gpu.set_limit_w(200.0)
    assert not gpu.can_set_limit()


def test_asking_for_permission_changes_nothing(control: SimulatorControl, gpu: GpuDevice) -> None:
    """Finding out whether limits can be set leaves a limit that somebody else set as it is."""
    pynvml.nvmlDeviceSetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByIndex(0), 321_000)
    assert gpu.can_set_limit()
    assert value_or_none(gpu.requested_limit_w()) == 321.0


def test_limit_on_a_lost_gpu_is_refused(control: SimulatorControl, gpu: GpuDevice) -> None:
    """Setting a limit on a lost GPU is an error with NVML's code, and marks the GPU lost."""
    control.set_lost(gpu.uuid)
    with pytest.raises(NeedsOperator, match="HW-NVML-015"):
        gpu.set_limit_w(200.0)
    assert gpu.lost


def test_stale_handle_is_resolved_by_uuid(gpu: GpuDevice) -> None:
    """After a driver reload the old handle is invalid; the GPU is found again by its UUID."""
    gpu._handle = pynvml.c_nvmlDevice_t()
    assert gpu.power_w() == Measured(50.0, "nvmlDeviceGetPowerUsage")


def test_shutdown_by_somebody_else_is_mended(gpu: GpuDevice) -> None:
    """Another library in this process may shut NVML down; readings go on."""
    pynvml.nvmlShutdown()
    assert gpu.power_w() == Measured(50.0, "nvmlDeviceGetPowerUsage")


def test_driver_older_than_the_binding(gpu: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The binding's mismatch error, which is no NVMLError, makes the process list absent."""

    def mismatch(_handle: object) -> None:
        raise pynvml.NVMLLibraryMismatchError("unversioned function")

    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", mismatch)
    assert gpu.processes() == Unmeasured("nvmlDeviceGetComputeRunningProcesses: unversioned function")


def test_function_that_the_driver_lacks_is_absent(gpu: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A symbol that is missing from an old library is an absent value, not a crash."""

    def missing(_handle: object) -> None:
        pynvml._nvmlGetFunctionPointer("nvmlDeviceGetSomethingNew")

    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", missing)
    assert gpu.utilization() == Unmeasured("nvmlDeviceGetUtilizationRates: Function Not Found")


@pytest.mark.parametrize("code", [4, 9, 18, 999])
def test_init_errors_say_what_to_do(control: SimulatorControl, code: int) -> None:
    """Each reason why NVML does not start has its own code and a hint."""
    control.set_init_error(code)
    with pytest.raises(NeedsOperator) as caught:
        open_nvml()
    assert caught.value.code == f"HW-NVML-{code:03d}"
    assert caught.value.hint
    control.set_init_error(0)
    with open_nvml() as nvml:
        assert len(nvml.gpus()) == 2


def test_no_library_offers_simulated_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a driver the hint names the simulator."""

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.delenv("HOROWATT_NVML_LIBRARY", raising=False)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "CDLL", absent)
    with pytest.raises(NeedsOperator) as caught:
        open_nvml()
    assert caught.value.code == "HW-NVML-012"
    assert "--simulate hostfiles/demo.simulator.toml" in caught.value.hint


def test_library_that_cannot_be_loaded_is_named(
    control: SimulatorControl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wrong HOROWATT_NVML_LIBRARY is an error with its path, not a silent fallback."""
    monkeypatch.setenv("HOROWATT_NVML_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(NeedsOperator, match="HW-NVML-102"):
        open_nvml()


def test_second_library_in_one_process_is_refused(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """The binding keeps one library per process, so asking for another one is an error."""
    monkeypatch.setenv("HOROWATT_NVML_LIBRARY", "/elsewhere/libnvidia-ml.so.1")
    with pytest.raises(NeedsOperator, match="HW-NVML-103"):
        open_nvml()


@pytest.mark.parametrize("broken", ["stale", "missing"])
def test_stale_binding_is_refused(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """The abandoned packages of the same module name are told apart, and the way out is named."""
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml") if broken == "stale" else None)
    with pytest.raises(NeedsOperator) as caught:
        open_nvml()
    assert caught.value.code == "HW-NVML-101"
    assert "nvidia-ml-py" in caught.value.hint


def test_closing_twice_is_harmless(control: SimulatorControl) -> None:
    """A second close does not take NVML away from another user in the process."""
    first, second = open_nvml(), open_nvml()
    first.close()
    first.close()
    assert len(second.gpus()) == 2
    second.close()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


@pytest.mark.parametrize("reading", [Measured(0.0, "x"), Unmeasured("x")])
def test_zero_is_a_value_and_absence_is_none(reading: Measured | Unmeasured) -> None:
    """A measured 0 stays 0, and only an absent value is None."""
    assert value_or_none(reading) == (0.0 if isinstance(reading, Measured) else None)
