# SPDX-License-Identifier: Apache-2.0
"""Checks of the GPUs: NVML, its driver, the right to set power limits, isolation.

NVML is asked in a process of its own: a driver that hangs or crashes takes only that process along.
"""

import json
import subprocess
import sys
from pathlib import Path

from horowatt.devices.nvml import GpuDevice, open_nvml
from horowatt.devices.reading import Measured, Unmeasured
from horowatt.doctor.record import Check, Status, good, warning
from horowatt.errors import HorowattError

NVML_TIMEOUT_S = 60.0
"""Initialising eight GPUs without the persistence daemon takes tens of seconds."""

_PRINT_CHECKS = "from horowatt.doctor.gpus import print_checks; print_checks()"

_CAP_SYS_ADMIN = 21
_CAP_BPF = 39
_CGROUP = Path("/sys/fs/cgroup")
_DEVICES = Path("/dev")


def check_nvml(*, timeout_s: float = NVML_TIMEOUT_S) -> tuple[Check, ...]:
    """Check NVML in a process of its own; a crash or a hang there is a finding."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PRINT_CHECKS],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return (_broken_nvml(f"NVML did not answer within {timeout_s:.0f} s"),)
    if done.returncode < 0:
        return (_broken_nvml(f"NVML ended the process that asked it, by signal {-done.returncode}"),)
    if done.returncode > 0:
        lines = done.stderr.strip().splitlines()
        return (_broken_nvml(lines[-1] if lines else f"status {done.returncode}"),)
    return tuple(
        Check(**{**fields, "status": Status(fields["status"])}) for fields in json.loads(done.stdout)
    )


def _broken_nvml(found: str) -> Check:
    return warning(
        "nvml",
        "HW-DOC-016",
        found,
        "no GPU of this machine can be given to jobs or measured",
        "see 'nvidia-smi' and 'dmesg'; a hanging driver needs a reload or a reboot",
    )


def print_checks() -> None:
    """Print the checks of NVML as JSON, for ``check_nvml`` in another process."""
    sys.stdout.write(json.dumps([check.to_json() for check in look_at_nvml()]))


def look_at_nvml() -> tuple[Check, ...]:
    """Check the NVML library, the driver behind it, its GPUs and the right to set their limits."""
    try:
        nvml = open_nvml()
    except HorowattError as error:
        return (
            warning(
                "nvml",
                error.code,
                f"{error.message} ({error.because})" if error.because else error.message,
                "no GPU of this machine is seen, so none is given to jobs and none is measured",
                error.hint,
            ),
        )
    with nvml:
        gpus = nvml.gpus()
        version = nvml.driver_version() or "unknown"
        unreachable = dict(nvml.unreachable)
        checks = [_check_gpus(version, gpus, unreachable)]
        if gpus:
            checks.append(_check_energy(gpus))
            checks.append(_check_limits(gpus))
            checks.append(_check_hand_over(gpus))
        return tuple(checks)


def _check_gpus(version: str, gpus: tuple[GpuDevice, ...], unreachable: dict[int, str]) -> Check:
    names = sorted({gpu.name for gpu in gpus})
    simulated = " (simulated devices)" if any(gpu.simulated for gpu in gpus) else ""
    found = f"driver {version}, {len(gpus)} GPUs{simulated}: {', '.join(names)}"
    broken = [f"GPU {index}: {why}" for index, why in sorted(unreachable.items())]
    broken += [f"{gpu.uuid} is lost" for gpu in gpus if gpu.lost]
    if broken:
        return warning(
            "nvml",
            "HW-DOC-010",
            f"{found}; {'; '.join(broken)}",
            "these GPUs are not given to jobs",
            "see 'nvidia-smi' and 'dmesg'; a lost GPU needs a reset or a reboot",
        )
    if not gpus:
        return warning(
            "nvml",
            "HW-DOC-011",
            f"driver {version}, no GPU",
            "no GPU is given to jobs here",
            "check that the GPUs are visible to this process (containers need them passed through)",
        )
    return good("nvml", found)


def _check_energy(gpus: tuple[GpuDevice, ...]) -> Check:
    without = [gpu.uuid for gpu in gpus if not isinstance(gpu.energy_j(), Measured)]
    if without:
        return warning(
            "energy-counters",
            "HW-DOC-012",
            f"{len(without)} of {len(gpus)} GPUs have no energy counter: {', '.join(without)}",
            "their energy is summed up from power readings, so a gap of the agent lowers coverage",
            "nothing: counters came with the Volta generation",
        )
    return good("energy-counters", f"all {len(gpus)} GPUs count their energy")


def _check_limits(gpus: tuple[GpuDevice, ...]) -> Check:
    fixed = [gpu.uuid for gpu in gpus if not gpu.can_set_limit()]
    if not fixed:
        return good("power-limits", f"may be set on all {len(gpus)} GPUs")
    return warning(
        "power-limits",
        "HW-DOC-013",
        f"may not be set on {len(fixed)} of {len(gpus)} GPUs",
        "jobs run at the limit that is set now; a power cap can only be held with fewer GPUs",
        "run the agent as root on the machine itself; some GPUs (laptops, virtual GPUs) have a fixed limit",
    )


def _check_hand_over(gpus: tuple[GpuDevice, ...]) -> Check:
    """Check whether the agent can see that a GPU is free and well before it is given to the next job."""
    name = "gpu-hand-over"
    faults = [f"{gpu.uuid} {gpu.fault()}" for gpu in gpus if gpu.fault()]
    if faults:
        return warning(
            name,
            "HW-DOC-017",
            "; ".join(faults),
            "these GPUs are not given to jobs",
            "do what it says; 'nvidia-smi -q' shows the details, and 'dmesg' the driver's Xid messages",
        )
    hidden = [gpu.uuid for gpu in gpus if isinstance(gpu.processes(), Unmeasured)]
    blind = [
        gpu.uuid for gpu in gpus if gpu.uuid in hidden and isinstance(gpu.memory_used_bytes(), Unmeasured)
    ]
    if hidden:
        memory = f", {len(blind)} of them no memory in use either" if blind else ""
        return warning(
            name,
            "HW-DOC-018",
            f"{len(hidden)} of {len(gpus)} GPUs do not tell their processes{memory}",
            "whether a GPU is free is told by its memory, or without that by the worker's lock alone",
            "run the agent on the machine itself, as root; GPUs split by MIG tell it to root only",
        )
    return good(name, f"all {len(gpus)} GPUs are well and tell their processes and memory")


def check_isolation(cgroup: Path = _CGROUP, devices: Path = _DEVICES) -> Check:
    """Check whether workers can be kept from GPUs that are not theirs."""
    name = "device-isolation"
    nodes = sorted(path.name for path in devices.glob("nvidia[0-9]*"))
    shown = f"{len(nodes)} NVIDIA device files" if nodes else "no NVIDIA device files"
    hidden_only = "a worker sees only its own GPU, but a program that wants to can still reach the others"
    if not (cgroup / "cgroup.controllers").is_file():
        return warning(
            name,
            "HW-DOC-014",
            f"no unified cgroup v2 hierarchy at {cgroup}; {shown}",
            hidden_only,
            "boot with systemd.unified_cgroup_hierarchy=1, the default of current distributions",
        )
    capabilities = effective_capabilities()
    if not capabilities >> _CAP_SYS_ADMIN & 1 and not capabilities >> _CAP_BPF & 1:
        return warning(
            name,
            "HW-DOC-015",
            f"cgroup v2, but this process has neither CAP_SYS_ADMIN nor CAP_BPF; {shown}",
            hidden_only,
            "run the agent as root",
        )
    return good(name, f"cgroup v2 and the right to set device rules; {shown}")


def effective_capabilities(status: Path = Path("/proc/self/status")) -> int:
    """Return the effective capabilities of this process as a bit mask; 0 when they are not told."""
    for line in status.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
