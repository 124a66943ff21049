# SPDX-License-Identifier: Apache-2.0
"""Simulated GPUs behind a real NVML library.

``build_library`` compiles ``_nvml_sim.c`` into a ``libnvidia-ml.so.1`` that pynvml (or any other
tool) loads like NVIDIA's own. ``create_state`` writes the file in which all processes of a node
share the GPUs. Whoever trains on a simulated GPU occupies it through ``SimulatedGpu.step``, which
says how long the step takes there; power, limits and energy follow from that occupancy.

The simulation is only as truthful as its workers: one that does not wait for as long as ``step``
says, trains faster than its GPU.
"""

import ctypes
import errno
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from horowatt.devices.nvml import LIBRARY_VARIABLE, SIMULATED_MARK
from horowatt.devices.simulator_config import (
    MAX_GPUS,
    SimulatedGpuType,
    SimulatorConfig,
    simulated_uuid,
)
from horowatt.devices.simulator_library import build_library
from horowatt.errors import HorowattError, InvalidInput, NeedsOperator, NotFound
from horowatt.files import disk_full

__all__ = [
    "MAX_GPUS",
    "STATE_VARIABLE",
    "SimulatedGpu",
    "SimulatedGpuType",
    "SimulatorConfig",
    "SimulatorControl",
    "StepTime",
    "build_library",
    "create_state",
    "simulated_uuid",
    "simulation_environment",
]

STATE_VARIABLE = "HOROWATT_SIM_STATE"
"""Path of the file that the simulated GPUs of a node live in."""
_STATE_MODE = 0o666

_NVML_INVALID_ARGUMENT = 2
_NVML_NOT_FOUND = 6
_NVML_DRIVER_NOT_LOADED = 9
_NVML_VERSION_MISMATCH = 18


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long one training step takes on a simulated GPU.

    Attributes:
        compute_s: Computing, seconds.
        link_s: Communicating after it, seconds.
        wait_s: Until other processes' steps on the same GPU are over, seconds; 0 when alone.
    """

    compute_s: float
    link_s: float
    wait_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds from the call to the end of the step."""
        return self.wait_s + self.compute_s + self.link_s


def create_state(
    config: SimulatorConfig,
    path: Path,
    node: str,
    *,
    library: Path | None = None,
    allow_nonroot: bool = False,
    clock_s: float | None = None,
) -> bool:
    """Make ``path`` hold the simulated GPUs of ``node``.

    A file that holds the same GPUs already is kept as it is, so that counters and load go on when
    an agent starts again while jobs train. Any other file there is replaced whole.

    The file may be written by every user (mode 0666), because the workers of every tenant must
    enter their load in it. So a tenant can falsify the state of these GPUs, or truncate the file
    and so end the processes that look at it. That is acceptable only because nothing here is real:
    no device and no joule depends on it, and every figure from it is marked as simulated.

    Args:
        path: In a folder that all workers can reach.
        node: Name of the node; GPUs of different nodes get different UUIDs.
        library: What ``build_library`` returned; None calls it.
        allow_nonroot: Lets every user set power limits, not only root.
        clock_s: Start of a virtual clock that stands still until ``SimulatorControl.set_clock``
            moves it, seconds; None lets the GPUs live in real time.

    Returns:
        True when the file was written, False when the one that was there is kept.

    Raises:
        NeedsOperator: ``HW-SIM-005`` when the file cannot be written, ``HW-DISK-001`` when its file
            system is full; and as ``build_library``.
    """
    sim = _Library(library if library is not None else build_library())
    gpus = config.each_gpu()
    uuids = _c_strings(config.uuids(node))
    names = _c_strings([f"{gpu.type} {SIMULATED_MARK}" for gpu in gpus])
    keys = sim.specification_keys()
    values = (ctypes.c_double * (len(gpus) * len(keys)))(
        *(float(getattr(gpu, key)) for gpu in gpus for key in keys)
    )
    specification = (ctypes.c_uint(len(gpus)), uuids, names, values)
    settings = (ctypes.c_double(math.nan if clock_s is None else clock_s), ctypes.c_int(allow_nonroot))
    if sim.call("hwsim_adopt", os.fsencode(path), *specification, *settings) == 0:
        return False
    try:
        with tempfile.TemporaryDirectory(prefix=".sim-", dir=path.parent) as name:
            draft = Path(name) / "state"
            code = sim.call("hwsim_create", os.fsencode(draft), *specification, *settings)
            if code != 0:
                raise OSError(sim.errno(), os.strerror(sim.errno()))
            draft.chmod(_STATE_MODE)
            draft.replace(path)
    except OSError as error:
        raise _state_error(path, error) from error
    return True


def simulation_environment(library: Path, state: Path) -> dict[str, str]:
    """Return the variables that make a child process see the simulated GPUs."""
    return {LIBRARY_VARIABLE: str(library), STATE_VARIABLE: str(state)}


class SimulatedGpu:
    """One simulated GPU, as the process that trains on it sees it.

    Reads the library and the state from the environment (see ``simulation_environment``).

    Raises:
        NeedsOperator: ``HW-SIM-008`` when the environment names no simulation.
        NotFound: ``HW-SIM-006`` when there is no such GPU.
    """

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self._library = _Library.from_environment()
        self._uuid = uuid.encode()
        self._library.check("hwsim_find", uuid, self._uuid)

    def attach(self) -> None:
        """Say that this process has a context on the GPU: it draws more, and lists the process.

        Ends with ``detach``, or with the process, however it ends.
        """
        self._library.check("hwsim_attach", self.uuid, self._uuid, ctypes.c_int(os.getpid()))

    def detach(self) -> None:
        """Give up the context and whatever is left of this process's load."""
        self._library.check("hwsim_detach", self.uuid, self._uuid, ctypes.c_int(os.getpid()))

    def use_memory(self, num_bytes: int) -> None:
        """Say how much memory of the GPU this process uses from now on; it must be attached.

        A context alone uses 512 MiB. The GPU cannot use more than it has.

        Raises:
            InvalidInput: ``HW-SIM-009`` when this process is not attached, or the number is negative.
        """
        if num_bytes < 0:
            raise InvalidInput(
                "HW-SIM-009", f"{num_bytes} bytes cannot be used", hint="give a number of bytes of at least 0"
            )
        self._library.check(
            "hwsim_set_memory",
            self.uuid,
            self._uuid,
            ctypes.c_int(os.getpid()),
            ctypes.c_uint64(num_bytes),
        )

    def step(self, flop: float, link_bytes: float) -> StepTime:
        """Occupy the GPU with one training step from now on, and return how long it takes.

        The caller waits for ``total_s`` before it calls the step done. Computing takes
        ``flop`` over the speed under the limit of this moment; a limit that is set during the step
        changes its power at once and its length from the next step on. A process that steps again
        before its last step is over replaces what is left of it; steps of different processes
        follow one another. Attaches the process when it is not.

        Args:
            flop: Work of this worker, floating-point operations.
            link_bytes: Bytes that this worker sends, after computing.

        Raises:
            InvalidInput: ``HW-SIM-009`` when an argument is negative or not finite.
            NeedsOperator: ``HW-SIM-007`` when the GPU is lost.
        """
        if not (math.isfinite(flop) and math.isfinite(link_bytes) and flop >= 0 and link_bytes >= 0):
            raise InvalidInput(
                "HW-SIM-009",
                f"a step of {flop!r} flop and {link_bytes!r} bytes is not possible",
                hint="give the work of one step as finite numbers of at least 0",
            )
        wait_s, compute_s, link_s = ctypes.c_double(), ctypes.c_double(), ctypes.c_double()
        self._library.check(
            "hwsim_step",
            self.uuid,
            self._uuid,
            ctypes.c_int(os.getpid()),
            ctypes.c_double(flop),
            ctypes.c_double(link_bytes),
            ctypes.byref(wait_s),
            ctypes.byref(compute_s),
            ctypes.byref(link_s),
        )
        return StepTime(compute_s.value, link_s.value, wait_s.value)


class SimulatorControl:
    """What only the owner of a simulation may know and do: the truth, faults, the clock.

    For tests and for trying out how Horowatt takes trouble; nothing that decides or bills reads it.
    """

    def __init__(self, library: Path | None = None) -> None:
        self._library = _Library.from_environment() if library is None else _Library(library)

    def true_energy_j(self, uuid: str) -> float:
        """Return the exact integral of the GPU's power since the state was created, joules."""
        value = ctypes.c_double()
        self._library.check("hwsim_true_energy", uuid, uuid.encode(), ctypes.byref(value))
        return value.value

    def true_power_w(self, uuid: str) -> float:
        """Return the GPU's power at this moment, watts."""
        value = ctypes.c_double()
        self._library.check("hwsim_true_power", uuid, uuid.encode(), ctypes.byref(value))
        return value.value

    def set_clock(self, clock_s: float) -> None:
        """Move the virtual clock forward, seconds (only a state created with ``clock_s`` has one)."""
        self._library.check("hwsim_set_clock", "", ctypes.c_double(clock_s))

    def set_out_of_band_limit(self, uuid: str, watts: float | None) -> None:
        """Limit the GPU from outside the driver, as a BMC does, watts; None ends that."""
        limit = ctypes.c_double(0.0 if watts is None else watts)
        self._library.check("hwsim_set_out_of_band_limit", uuid, uuid.encode(), limit)

    def set_lost(self, uuid: str, nvml_error: int = 15) -> None:
        """Lose the GPU: its calls fail with 15 (lost) or 16 (needs reset) until set to 0."""
        self._library.check("hwsim_set_lost", uuid, uuid.encode(), ctypes.c_int(nvml_error))

    def set_error(self, uuid: str, function: str, nvml_error: int) -> None:
        """Have one NVML function fail for the GPU with this code; 0 ends that.

        ``nvmlDeviceGetTotalEnergyConsumption`` with 3 is a GPU without an energy counter.
        """
        self._library.check(
            "hwsim_set_error", uuid, uuid.encode(), function.encode(), ctypes.c_int(nvml_error)
        )

    def set_counter_reads_zero(self, uuid: str, *, on: bool) -> None:
        """Have the energy counter read 0 for a while, as some drivers do after trouble."""
        self._library.check("hwsim_set_counter_zero", uuid, uuid.encode(), ctypes.c_int(on))

    def set_ownerless_memory(self, uuid: str, num_bytes: int) -> None:
        """Have memory in use by no process that is listed: leaked, or of a container that is hidden."""
        self._library.check("hwsim_set_ownerless_memory", uuid, uuid.encode(), ctypes.c_uint64(num_bytes))

    def set_memory_errors(
        self, uuid: str, uncorrectable: int, *, remap_pending: bool = False, recovery_action: int = 0
    ) -> None:
        """Have uncorrectable memory errors since the driver was loaded, and what they call for.

        Args:
            remap_pending: A row waits for a reset to be remapped.
            recovery_action: NVML's code of what the GPU needs: 0 nothing, 1 a reset, 2 a reboot of the
                node, 4 to be drained and reset.
        """
        self._library.check(
            "hwsim_set_memory_errors",
            uuid,
            uuid.encode(),
            ctypes.c_uint(uncorrectable),
            ctypes.c_int(remap_pending),
            ctypes.c_int(recovery_action),
        )

    def reset_counter(self, uuid: str) -> None:
        """Restart the energy counter at 0 and the limit at its default, as a driver reload does."""
        self._library.check("hwsim_reset_counter", uuid, uuid.encode())

    def set_init_error(self, nvml_error: int) -> None:
        """Have initialising NVML fail in every process with this code; 0 ends that."""
        self._library.check("hwsim_set_init_error", "", ctypes.c_int(nvml_error))

    def set_allow_nonroot(self, *, on: bool) -> None:
        """Let every user set power limits, or only root."""
        self._library.check("hwsim_set_allow_nonroot", "", ctypes.c_int(on))


class _Library:
    """The control functions (``hwsim_*``) that the simulated library exports beside NVML's own."""

    def __init__(self, path: Path) -> None:
        try:
            self._dll = ctypes.CDLL(str(path), use_errno=True)
        except OSError as error:
            raise NeedsOperator(
                "HW-SIM-008",
                f"the simulated NVML library {path} cannot be loaded",
                because=str(error),
                hint="start workers through the agent, which names a library that they can read",
                fields={"path": str(path)},
            ) from error

    @classmethod
    def from_environment(cls) -> "_Library":
        library, state = os.environ.get(LIBRARY_VARIABLE), os.environ.get(STATE_VARIABLE)
        if not library or not state:
            raise NeedsOperator(
                "HW-SIM-008",
                "this process has no simulated GPUs",
                because=f"{LIBRARY_VARIABLE if not library else STATE_VARIABLE} is not set",
                hint="start it through 'horowatt submit' on a node whose agent runs with --simulate",
            )
        return cls(Path(library))

    def call(self, function: str, *arguments: object) -> int:
        """Call a control function and return its NVML code."""
        try:
            return int(getattr(self._dll, function)(*arguments))
        except AttributeError as error:
            raise NeedsOperator(
                "HW-SIM-008",
                "the NVML library of this process is not Horowatt's simulated one",
                because=str(error),
                hint=f"let {LIBRARY_VARIABLE} name what 'horowatt agent --simulate' built",
            ) from error

    def check(self, function: str, uuid: str, *arguments: object) -> None:
        """Call a control function about GPU ``uuid`` and raise what its code means."""
        code = self.call(function, *arguments)
        if code != 0:
            raise _control_error(function, uuid, code)

    def errno(self) -> int:
        """Return the system's error number of the last call."""
        return ctypes.get_errno()

    def specification_keys(self) -> list[str]:
        """Return the configuration keys whose values ``hwsim_create`` takes, in its order."""
        self._dll.hwsim_specification_keys.restype = ctypes.c_char_p
        keys: bytes = self._dll.hwsim_specification_keys()
        return keys.decode().split(",")


def _control_error(function: str, uuid: str, code: int) -> HorowattError:
    state = os.environ.get(STATE_VARIABLE, "")
    if code == _NVML_NOT_FOUND:
        return NotFound(
            "HW-SIM-006",
            f"there is no simulated GPU {uuid}",
            because=f"{state} does not hold it",
            hint="see 'horowatt nodes' for the GPUs there are",
            fields={"gpu": uuid},
        )
    if code in (_NVML_DRIVER_NOT_LOADED, _NVML_VERSION_MISMATCH):
        why = (
            "another version of Horowatt wrote it"
            if code == _NVML_VERSION_MISMATCH
            else "it is missing or not a state file"
        )
        return NeedsOperator(
            "HW-SIM-005",
            f"the state of the simulated GPUs, {state}, cannot be used",
            because=why,
            hint="restart the agent with --simulate; it writes the file",
            fields={"path": state},
        )
    if code == _NVML_INVALID_ARGUMENT:
        return InvalidInput(
            "HW-SIM-009",
            f"{function} was called with a value that the simulated GPU does not take",
            hint="clocks only move forward; out-of-band limits lie above the GPU's floor_w",
            fields={"gpu": uuid},
        )
    return NeedsOperator(
        "HW-SIM-007",
        f"the simulated GPU {uuid} refused {function}",
        because=f"NVML error {code}",
        hint="it was told to fail; undo that with SimulatorControl, or take another GPU",
        fields={"gpu": uuid, "nvml_error": str(code)},
    )


def _state_error(path: Path, error: OSError) -> NeedsOperator:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(path, error)
    return NeedsOperator(
        "HW-SIM-005",
        f"the state of the simulated GPUs cannot be written to {path}",
        because=error.strerror or str(error),
        hint="let the agent run as a user that may write there",
        fields={"path": str(path)},
    )


def _c_strings(texts: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
