# SPDX-License-Identifier: Apache-2.0
"""One GPU as NVML shows it: readings that may be absent, and its power limit."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from horowatt.devices.reading import Measured, Reading, Unmeasured, value_or_none
from horowatt.errors import HorowattError, InvalidInput, NeedsOperator, NotAllowed
from horowatt.records import GpuReport

SIMULATED_MARK = "(simulated)"
"""Part of the product name of every simulated GPU."""

_UNINITIALIZED = 1
_INVALID_ARGUMENT = 2
_NOT_SUPPORTED = 3
_NO_PERMISSION = 4
_FUNCTION_NOT_FOUND = 13
_GPU_IS_LOST = 15
_RESET_REQUIRED = 16

_MW_PER_W = 1000.0
_MJ_PER_J = 1000.0
_FIELD_POWER_INSTANT = 186
_FIELD_RECOVERY_ACTION = 230
_CLOCK_SM = 1
_UNCORRECTED = 1
_VOLATILE = 0
_TEMPERATURE_GPU = 0
_VALUE_TYPE_UNSIGNED_LONG_LONG = 3

_LOSSES = {_GPU_IS_LOST: "fell off the bus", _RESET_REQUIRED: "needs a reset"}
_RECOVERY_ACTIONS = {
    1: "needs a reset",
    2: "needs a reboot of the node",
    3: "needs its peer-to-peer traffic stopped",
    4: "needs to be drained and reset",
    5: "needs its NVLink domain recovered",
    6: "needs a reset of its bus",
    7: "needs a reboot of the node",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process with a context on a GPU.

    Attributes:
        pid: In the namespace of the driver's answer; need not be one that this process can see.
        memory_bytes: Device memory in use; None when the driver does not tell it.
    """

    pid: int
    memory_bytes: int | None


class GpuDevice:
    """One GPU (a whole board).

    Attributes:
        uuid: The GPU's identity; indices change with reboots and with CUDA_VISIBLE_DEVICES.
        nvml_index: Position in NVML's list now.
        name: Product name.
        lost: True when the last call found that the GPU fell off the bus or needs a reset.
        loss: Which of the two, in words that follow the GPU's name; empty when it is not lost.
    """

    def __init__(self, pynvml: Any, handle: Any, *, uuid: str, nvml_index: int, name: str) -> None:
        self._pynvml = pynvml
        self._handle = handle
        self.uuid = uuid
        self.nvml_index = nvml_index
        self.name = name
        self.lost = False
        self.loss = ""
        self._unsupported: dict[str, str] = {}
        self._last_energy_mj = 0
        self._can_set_limit: bool | None = None

    @property
    def simulated(self) -> bool:
        """True when the GPU is one of ours: figures of it must say so wherever they are shown."""
        return SIMULATED_MARK in self.name

    def energy_j(self) -> Reading:
        """Return the energy used since the driver was loaded, joules.

        A 0 after a reading above 0 is a failed reading, not an empty counter: taken as a value, the
        whole life of the GPU would be booked as one interval when the counter comes back.
        """
        function = "nvmlDeviceGetTotalEnergyConsumption"
        raw = self._ask(function, self._pynvml.nvmlDeviceGetTotalEnergyConsumption)
        if isinstance(raw, Unmeasured):
            return raw
        energy_mj = int(raw)
        if energy_mj == 0 and self._last_energy_mj > 0:
            return Unmeasured(f"the energy counter read 0 after {self._last_energy_mj / _MJ_PER_J:.1f} J")
        self._last_energy_mj = energy_mj
        return Measured(energy_mj / _MJ_PER_J, function)

    def power_w(self) -> Reading:
        """Return the board power, watts: an average of about 1 s on most boards since Ampere."""
        return self._number("nvmlDeviceGetPowerUsage", scale=_MW_PER_W)

    def power_instant_w(self) -> Reading:
        """Return the board power over the shortest window that the GPU offers, watts."""
        source = "NVML_FI_DEV_POWER_INSTANT"
        raw = self._field(source, _FIELD_POWER_INSTANT)
        return raw if isinstance(raw, Unmeasured) else Measured(float(raw) / _MW_PER_W, source)

    def enforced_limit_w(self) -> Reading:
        """Return the limit in force after all limiters (out-of-band included), watts."""
        return self._number("nvmlDeviceGetEnforcedPowerLimit", scale=_MW_PER_W)

    def requested_limit_w(self) -> Reading:
        """Return the limit that was last set through the driver, watts."""
        return self._number("nvmlDeviceGetPowerManagementLimit", scale=_MW_PER_W)

    def default_limit_w(self) -> Reading:
        """Return the limit after a driver load, watts."""
        return self._number("nvmlDeviceGetPowerManagementDefaultLimit", scale=_MW_PER_W)

    def min_limit_w(self) -> Reading:
        """Return the lowest limit that may be set, watts."""
        return self._constraint(0)

    def max_limit_w(self) -> Reading:
        """Return the highest limit that may be set, watts."""
        return self._constraint(1)

    def utilization(self) -> Reading:
        """Return the share of time in which at least one kernel ran, 0 to 1 (not occupancy)."""
        function = "nvmlDeviceGetUtilizationRates"
        raw = self._ask(function, self._pynvml.nvmlDeviceGetUtilizationRates)
        return raw if isinstance(raw, Unmeasured) else Measured(float(raw.gpu) / 100.0, function)

    def memory_used_bytes(self) -> Reading:
        """Return the device memory in use, bytes; what the driver keeps for itself is not counted.

        Drivers before 510 count that in, about half a GiB on large boards.
        """
        return self._memory("used")

    def memory_total_bytes(self) -> Reading:
        """Return the device memory there is, bytes."""
        return self._memory("total")

    def sm_clock_mhz(self) -> Reading:
        """Return the clock of the multiprocessors, MHz."""
        function = "nvmlDeviceGetClockInfo"
        raw = self._ask(function, lambda handle: self._pynvml.nvmlDeviceGetClockInfo(handle, _CLOCK_SM))
        return raw if isinstance(raw, Unmeasured) else Measured(float(raw), function)

    def temperature_c(self) -> Reading:
        """Return the temperature of the GPU, degrees Celsius."""
        function = "nvmlDeviceGetTemperature"
        raw = self._ask(
            function, lambda handle: self._pynvml.nvmlDeviceGetTemperature(handle, _TEMPERATURE_GPU)
        )
        return raw if isinstance(raw, Unmeasured) else Measured(float(raw), function)

    def processes(self) -> tuple[GpuProcess, ...] | Unmeasured:
        """Return the processes with a compute context on the GPU.

        Inside a container the driver may name none that run outside, so an empty answer proves little.
        """
        return self._processes("nvmlDeviceGetComputeRunningProcesses")

    def graphics_processes(self) -> tuple[GpuProcess, ...] | Unmeasured:
        """Return the processes that draw with the GPU, such as the display server."""
        return self._processes("nvmlDeviceGetGraphicsRunningProcesses")

    def fault(self) -> str:
        """Return what a person must do before this GPU may be used, or an empty string.

        Asked are the recovery action that the driver recommends (which sums up its Xid messages; from
        release 560 on), row remapping, and page retirement of boards before Ampere. Uncorrectable
        errors that need no action any more are no fault: the memory they hit is out of use.
        """
        if self.lost:
            return self.loss
        action = self._field("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", _FIELD_RECOVERY_ACTION)
        if not isinstance(action, Unmeasured) and int(action) != 0:
            return _RECOVERY_ACTIONS.get(int(action), f"needs the recovery action {int(action)} of NVML")
        rows = self._ask("nvmlDeviceGetRemappedRows", self._pynvml.nvmlDeviceGetRemappedRows)
        _, _, remap_pending, remap_failed = (0, 0, 0, 0) if isinstance(rows, Unmeasured) else rows
        if remap_failed:
            return "could not repair its memory and must be replaced"
        pages = self._ask(
            "nvmlDeviceGetRetiredPagesPendingStatus", self._pynvml.nvmlDeviceGetRetiredPagesPendingStatus
        )
        if not remap_pending and (isinstance(pages, Unmeasured) or not pages):
            return ""
        errors = self._ask(
            "nvmlDeviceGetTotalEccErrors",
            lambda handle: self._pynvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _VOLATILE),
        )
        if isinstance(errors, Unmeasured) or not errors:
            return "needs a reset to repair its memory"
        many = f"{errors} uncorrectable ECC errors" if errors > 1 else "1 uncorrectable ECC error"
        return f"{many} pending: it needs a reset to repair its memory"

    def can_set_limit(self) -> bool:
        """Tell whether this process may set the GPU's power limit.

        NVML has no call that only asks, and neither user 0 nor a capability decides it alone (root
        in a container may lack the right). So the limit that is set already is set once more, to
        the same value: that changes nothing and answers as a change would. The answer is kept,
        since rights of a process do not come back; a failure for other reasons is asked again.
        """
        if self._can_set_limit is not None:
            return self._can_set_limit
        pynvml = self._pynvml
        requested_mw = self._ask(
            "nvmlDeviceGetPowerManagementLimit", pynvml.nvmlDeviceGetPowerManagementLimit
        )
        if isinstance(requested_mw, Unmeasured):
            return False
        try:
            pynvml.nvmlDeviceSetPowerManagementLimit(self._handle, int(requested_mw))
        except pynvml.NVMLError as error:
            if error.value in (_NO_PERMISSION, _NOT_SUPPORTED, _FUNCTION_NOT_FOUND):
                self._can_set_limit = False
            return False
        self._can_set_limit = True
        return True

    def set_limit_w(self, watts: float) -> Reading:
        """Set the power limit and return the one then in force, watts.

        The two differ when something outside the driver (a BMC) holds the GPU lower, so callers
        compare what they asked for with what they got.

        Raises:
            InvalidInput: ``HW-NVML-002`` when the limit is outside of what the GPU allows.
            NotAllowed: ``HW-NVML-104`` when this process may not set limits, or the GPU has none.
            NeedsOperator: ``HW-NVML-<NVML code>`` when the GPU is lost or refuses otherwise.
        """
        if not math.isfinite(watts) or watts <= 0:
            raise self._limit_out_of_range(watts)
        try:
            # The call's second version reports success whatever happens (nvidia-ml-py up to 13.615).
            self._retrying(
                lambda handle: self._pynvml.nvmlDeviceSetPowerManagementLimit(
                    handle, round(watts * _MW_PER_W)
                ),
                retry_invalid_argument=False,
            )
        except self._pynvml.NVMLError as error:
            raise self._limit_error(error, watts) from error
        return self.enforced_limit_w()

    def report(self, gpu_type: str | None, now_s: float) -> GpuReport:
        """Read everything the head wants to know; never raises for one GPU's trouble.

        Args:
            gpu_type: Type as the inventory knows it; None takes the product name without its
                "(simulated)", which the record says apart.
            now_s: Unix time of the reading, seconds.
        """
        self.lost, self.loss = False, ""
        readings = {
            "energy_j": self.energy_j(),
            "power_w": self.power_w(),
            "limit_w": self.enforced_limit_w(),
            "default_limit_w": self.default_limit_w(),
            "min_limit_w": self.min_limit_w(),
            "max_limit_w": self.max_limit_w(),
        }
        can_set_limit = self.can_set_limit()
        return GpuReport(
            uuid=self.uuid,
            nvml_index=self.nvml_index,
            gpu_type=gpu_type if gpu_type is not None else self.name.replace(SIMULATED_MARK, "").strip(),
            simulated=self.simulated,
            energy_j=value_or_none(readings["energy_j"]),
            power_w=value_or_none(readings["power_w"]),
            limit_w=value_or_none(readings["limit_w"]),
            default_limit_w=value_or_none(readings["default_limit_w"]),
            min_limit_w=value_or_none(readings["min_limit_w"]),
            max_limit_w=value_or_none(readings["max_limit_w"]),
            can_set_limit=can_set_limit,
            lost=self.lost,
            sampled_at_s=now_s,
            unmeasured={
                name: reading.reason for name, reading in readings.items() if isinstance(reading, Unmeasured)
            },
        )

    def _number(self, function: str, *, scale: float) -> Reading:
        raw = self._ask(function, getattr(self._pynvml, function))
        return raw if isinstance(raw, Unmeasured) else Measured(float(raw) / scale, function)

    def _constraint(self, position: int) -> Reading:
        function = "nvmlDeviceGetPowerManagementLimitConstraints"
        raw = self._ask(function, getattr(self._pynvml, function))
        return raw if isinstance(raw, Unmeasured) else Measured(float(raw[position]) / _MW_PER_W, function)

    def _field(self, name: str, field: int) -> Any:
        """Return the value of one of NVML's fields, or ``Unmeasured``."""

        def read(handle: Any) -> Any:
            value = self._pynvml.nvmlDeviceGetFieldValues(handle, [field])[0]
            if value.nvmlReturn != 0:
                raise self._pynvml.NVMLError(value.nvmlReturn)
            wide = value.valueType == _VALUE_TYPE_UNSIGNED_LONG_LONG
            return value.value.ullVal if wide else value.value.uiVal

        return self._ask(name, read)

    def _memory(self, part: str) -> Reading:
        function = "nvmlDeviceGetMemoryInfo_v2"
        pynvml = self._pynvml
        raw = self._ask(
            function, lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        )
        if isinstance(raw, Unmeasured):
            function = "nvmlDeviceGetMemoryInfo"
            raw = self._ask(function, pynvml.nvmlDeviceGetMemoryInfo)
        return raw if isinstance(raw, Unmeasured) else Measured(float(getattr(raw, part)), function)

    def _processes(self, function: str) -> tuple[GpuProcess, ...] | Unmeasured:
        raw = self._ask(function, getattr(self._pynvml, function))
        if isinstance(raw, Unmeasured):
            return raw
        return tuple(
            GpuProcess(
                pid=int(process.pid),
                memory_bytes=None if process.usedGpuMemory is None else int(process.usedGpuMemory),
            )
            for process in raw
        )

    def _ask(self, function: str, call: Callable[[Any], Any]) -> Any:
        """Return what ``call`` returns for this GPU, or ``Unmeasured``."""
        if function in self._unsupported:
            return Unmeasured(self._unsupported[function])
        pynvml = self._pynvml
        try:
            return self._retrying(call)
        except pynvml.NVMLLibraryMismatchError as error:
            # Not an NVMLError: the driver is older than the binding expects of process lists.
            return self._never(function, str(error))
        except pynvml.NVMLError as error:
            if error.value in (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND):
                return self._never(function, str(error))
            if error.value in _LOSSES:
                self.lost, self.loss = True, _LOSSES[error.value]
            return Unmeasured(f"{function}: {error}")

    def _retrying(self, call: Callable[[Any], Any], *, retry_invalid_argument: bool = True) -> Any:
        """Call once more with a fresh handle when ours was stale (a driver reload makes it so)."""
        pynvml = self._pynvml
        try:
            return call(self._handle)
        except pynvml.NVMLError as error:
            if error.value == _UNINITIALIZED:
                pynvml.nvmlInit()
            elif error.value != _INVALID_ARGUMENT or not retry_invalid_argument:
                raise
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid.encode())
        return call(self._handle)

    def _never(self, function: str, why: str) -> Unmeasured:
        reason = f"{function}: {why}"
        self._unsupported[function] = reason
        return Unmeasured(reason)

    def _limit_error(self, error: Any, watts: float) -> HorowattError:
        if error.value in (_NO_PERMISSION, _NOT_SUPPORTED, _FUNCTION_NOT_FOUND):
            self._can_set_limit = False
            return NotAllowed(
                "HW-NVML-104",
                f"the power limit of GPU {self.uuid} cannot be set",
                because=str(error),
                hint="power limits need root (CAP_SYS_ADMIN) and a GPU that supports them; "
                "the allocator goes on without choosing limits on this node",
                fields={"gpu": self.uuid},
            )
        if error.value == _INVALID_ARGUMENT:
            return self._limit_out_of_range(watts)
        if error.value in _LOSSES:
            self.lost, self.loss = True, _LOSSES[error.value]
        return NeedsOperator(
            f"HW-NVML-{int(error.value):03d}",
            f"the power limit of GPU {self.uuid} could not be set",
            because=str(error),
            hint="see 'dmesg' for messages of the NVIDIA driver about this GPU",
            fields={"gpu": self.uuid},
        )

    def _limit_out_of_range(self, watts: float) -> InvalidInput:
        low, high = value_or_none(self.min_limit_w()), value_or_none(self.max_limit_w())
        known = low is not None and high is not None
        return InvalidInput(
            "HW-NVML-002",
            f"a power limit of {watts:g} W is not possible on GPU {self.uuid}",
            because=f"it allows {low:g} to {high:g} W" if known else "the driver refused the value",
            hint="choose a limit within the range that 'horowatt nodes' shows",
            fields={"gpu": self.uuid, "limit_w": f"{watts:g}"},
        )
