# SPDX-License-Identifier: Apache-2.0
"""NVML through pynvml: the library, its trouble, and the GPUs by UUID.

Every error of NVML is turned into one of three things here and in ``gpu``, and nowhere else: an error
that says what an operator can do (the library or the driver as a whole), an ``Unmeasured`` with its
reason (one value of one GPU), or ``lost`` (one GPU). So one broken GPU never spoils another's data.

Known limitations: calls are made in the calling thread, so a driver that hangs, hangs the caller;
MIG instances are not told apart, their board is read whole.
"""

import ctypes
import os
import warnings
from types import TracebackType
from typing import Any, Self

from horowatt.devices.gpu import SIMULATED_MARK, GpuDevice
from horowatt.errors import NeedsOperator

__all__ = ["LIBRARY_VARIABLE", "SIMULATED_MARK", "GpuDevice", "Nvml", "open_nvml"]

LIBRARY_VARIABLE = "HOROWATT_NVML_LIBRARY"
"""Path of the NVML library to use in place of the driver's own."""

_NO_PERMISSION = 4
_DRIVER_NOT_LOADED = 9
_LIBRARY_NOT_FOUND = 12
_VERSION_MISMATCH = 18

_SIMULATE_HINT = (
    "install the NVIDIA driver of this machine's GPUs, or try Horowatt without GPUs: "
    "horowatt agent --simulate hostfiles/demo.simulator.toml"
)
_INIT_ERRORS: dict[int, tuple[str, str]] = {
    _NO_PERMISSION: (
        "this process may not use the NVIDIA driver",
        "check the permissions of /dev/nvidia*, and the device rules of the container or service",
    ),
    _DRIVER_NOT_LOADED: (
        "the NVIDIA driver is not loaded",
        (
            "load it with 'modprobe nvidia', or reboot after installing it; "
            "for simulated GPUs, HOROWATT_SIM_STATE must name their state file"
        ),
    ),
    _LIBRARY_NOT_FOUND: ("there is no NVML library (libnvidia-ml.so.1) on this machine", _SIMULATE_HINT),
    _VERSION_MISMATCH: (
        "the NVML library and the loaded NVIDIA driver are of different versions",
        "the driver was upgraded without a reload: reboot, or unload and load the nvidia modules",
    ),
}


def open_nvml() -> "Nvml":
    """Load and initialise NVML.

    ``HOROWATT_NVML_LIBRARY`` names another library than the driver's ``libnvidia-ml.so.1``.

    Raises:
        NeedsOperator: ``HW-NVML-<NVML code>`` when NVML cannot be initialised: 012 no library, 009
            driver not loaded, 018 driver and library differ, 004 not permitted; any other code of
            NVML likewise. ``HW-NVML-101`` when the Python binding is missing or is a stale one,
            ``HW-NVML-102`` when the named library cannot be loaded, ``HW-NVML-103`` when this
            process already uses another one.
    """
    pynvml = _import_binding()
    _choose_library(pynvml)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _init_error(error) from error
    return Nvml(pynvml)


class Nvml:
    """An initialised NVML. Close it, or use it as a context manager."""

    def __init__(self, pynvml: Any) -> None:
        self._pynvml = pynvml
        self._open = True
        self._devices: dict[str, GpuDevice] = {}
        self.unreachable: dict[int, str] = {}
        """Why a GPU that NVML counts could not be opened, by NVML index, as of the last ``gpus()``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give NVML back; calls after the first do nothing."""
        if not self._open:
            return
        self._open = False
        try:
            self._pynvml.nvmlShutdown()
        except self._pynvml.NVMLError:
            # Nobody can act on it, and the driver takes everything back when the process ends.
            return

    def driver_version(self) -> str:
        """Return the version of the driver, or an empty string when NVML does not tell."""
        try:
            return str(self._pynvml.nvmlSystemGetDriverVersion())
        except self._pynvml.NVMLError:
            return ""

    def gpus(self) -> tuple[GpuDevice, ...]:
        """Return the GPUs of this machine in NVML order.

        The same object stands for the same UUID in every call. A GPU that was seen before and can
        no longer be opened is returned still, with ``lost`` set; one that never could be opened has
        no UUID and is named in ``unreachable``.

        Raises:
            NeedsOperator: ``HW-NVML-<NVML code>`` when the GPUs cannot be counted.
        """
        try:
            count = int(self._pynvml.nvmlDeviceGetCount())
        except self._pynvml.NVMLError as error:
            raise _init_error(error) from error
        self.unreachable = {}
        found: dict[str, GpuDevice] = {}
        for index in range(count):
            device = self._open_device(index)
            if device is not None:
                found[device.uuid] = device
        for uuid, device in self._devices.items():
            if uuid not in found:
                device.lost, device.loss = True, "is not there any more"
                found[uuid] = device
        self._devices = found
        return tuple(sorted(found.values(), key=lambda device: device.nvml_index))

    def _open_device(self, index: int) -> GpuDevice | None:
        pynvml = self._pynvml
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = str(pynvml.nvmlDeviceGetUUID(handle))
            name = str(pynvml.nvmlDeviceGetName(handle))
        except pynvml.NVMLError as error:
            self.unreachable[index] = str(error)
            return None
        known = self._devices.get(uuid)
        if known is None:
            return GpuDevice(pynvml, handle, uuid=uuid, nvml_index=index, name=name)
        known.nvml_index = index
        known.lost, known.loss = False, ""
        return known


def _import_binding() -> Any:
    hint = "pip uninstall pynvml nvidia-ml-py3; pip install --force-reinstall nvidia-ml-py"
    try:
        with warnings.catch_warnings():
            # The deprecated "pynvml" package warns here although nvidia-ml-py is what gets imported.
            warnings.simplefilter("ignore", FutureWarning)
            import pynvml
    except ImportError as error:
        raise NeedsOperator(
            "HW-NVML-101", "the Python binding of NVML is missing", because=str(error), hint=hint
        ) from error
    if not hasattr(pynvml, "_nvmlGetFunctionPointer"):
        raise NeedsOperator(
            "HW-NVML-101",
            "an outdated package stands in for NVIDIA's own binding of NVML",
            because=f"{getattr(pynvml, '__file__', 'pynvml')} comes from 'pynvml' 11 or 'nvidia-ml-py3'",
            hint=hint,
        )
    return pynvml


def _choose_library(pynvml: Any) -> None:
    path = os.environ.get(LIBRARY_VARIABLE)
    if not path:
        return
    loaded = pynvml.nvmlLib
    if loaded is not None:
        if loaded._name != path:  # noqa: SLF001 - ctypes has no other way to tell
            raise NeedsOperator(
                "HW-NVML-103",
                "this process already uses another NVML library",
                because=f"{loaded._name} is loaded, {LIBRARY_VARIABLE} names {path}",  # noqa: SLF001
                hint=f"set {LIBRARY_VARIABLE} before the process starts",
            )
        return
    try:
        pynvml.nvmlLib = ctypes.CDLL(path)
    except OSError as error:
        raise NeedsOperator(
            "HW-NVML-102",
            f"the NVML library {path} cannot be loaded",
            because=str(error),
            hint=f"correct {LIBRARY_VARIABLE}, or unset it to use the driver's library",
        ) from error


def _init_error(error: Any) -> NeedsOperator:
    code = int(error.value)
    message, hint = _INIT_ERRORS.get(
        code, ("NVML could not be initialised", "see 'nvidia-smi' and 'dmesg' for what the driver says")
    )
    return NeedsOperator(f"HW-NVML-{code:03d}", message, because=str(error), hint=hint)
