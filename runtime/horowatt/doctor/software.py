# SPDX-License-Identifier: Apache-2.0
"""Checks of the Python environment: Python, torch, Horovod and what builds it."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution

from horowatt.doctor.record import Check, failure, good, warning
from horowatt.errors import NeedsOperator
from horowatt.horovod_build.recipe import HOROVOD_VERSION
from horowatt.horovod_build.toolchain import TorchFacts, find_toolchain, first_line, probe_torch, search_path

PYTHON_FROM = (3, 11)
PYTHON_BELOW = (3, 14)
IMPORT_TIMEOUT_S = 120.0

_BUILD = "horowatt build-horovod"

_HOROVOD_PROBE = """
import json, torch
import horovod, horovod.torch as hvd
print(json.dumps({"version": horovod.__version__, "torch": torch.__version__, "gloo": bool(hvd.gloo_built()),
                  "mpi": bool(hvd.mpi_built()), "nccl": bool(hvd.nccl_built())}))
"""


def check_python() -> Check:
    """Check that the running Python is one that Horowatt supports."""
    found = f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})"
    if PYTHON_FROM <= sys.version_info[:2] < PYTHON_BELOW:
        return good("python", found)
    return failure(
        "python",
        "HW-DOC-001",
        found,
        "Horowatt supports Python 3.11 to 3.13; nothing is promised with this one",
        "make the virtual environment with python3.11, python3.12 or python3.13",
    )


def check_platform() -> Check:
    """Check that this is Linux."""
    found = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() == "Linux":
        return good("platform", found)
    return failure(
        "platform", "HW-DOC-002", found, "agents and jobs run on Linux only", "use a machine with Linux"
    )


def check_horovod() -> tuple[Check, ...]:
    """Check torch, Horovod, and what is built into it; imports happen in processes of their own."""
    try:
        torch = probe_torch()
    except NeedsOperator as error:
        consequence = "no job can train in this Python environment (a head node needs no torch)"
        return (
            failure("torch", error.code, f"{error.message}: {error.because}", consequence, error.hint),
            failure(
                "horovod", "HW-DOC-003", "not looked at: it needs torch", consequence, f"then run: {_BUILD}"
            ),
        )
    cuda = f"built for CUDA {torch.cuda_version}" if torch.cuda_version else "built for CPU only"
    return (good("torch", f"torch {torch.version}, {cuda}"), *_horovod_checks(torch))


def _horovod_checks(torch: TorchFacts) -> tuple[Check, ...]:
    consequence = "no job can train in this Python environment"
    try:
        distribution("horovod")
    except PackageNotFoundError:
        return (
            failure(
                "horovod", "HW-DOC-003", "not installed", consequence, f"{_BUILD} (about 4 minutes, once)"
            ),
        )
    facts, why = _import_horovod()
    if facts is None:
        return (
            failure(
                "horovod",
                "HW-DOC-004",
                f"it does not import: {why}",
                consequence,
                f"{_BUILD} (for this torch)",
            ),
        )
    checks = [
        good("horovod", f"Horovod {facts['version']}")
        if facts["version"] == HOROVOD_VERSION
        else warning(
            "horovod",
            "HW-DOC-005",
            f"Horovod {facts['version']}",
            f"Horowatt is written for and tested with {HOROVOD_VERSION}; resizing may fail",
            _BUILD,
        )
    ]
    checks.append(
        good("horovod-gloo", "Gloo is built in")
        if facts["gloo"]
        else failure(
            "horovod-gloo",
            "HW-DOC-006",
            "Gloo is not built in",
            "Horovod cannot resize jobs without Gloo, so no job can run",
            f"{_BUILD} (packages from conda-forge are built without Gloo)",
        )
    )
    checks.append(_check_gpu_operations(torch, nccl=bool(facts["nccl"])))
    checks.append(_check_mpi(built=bool(facts["mpi"])))
    return tuple(checks)


def _import_horovod() -> tuple[dict[str, object] | None, str]:
    """Return what Horovod says about itself, or None and why not."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _HOROVOD_PROBE],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"the import took more than {IMPORT_TIMEOUT_S:.0f} s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        ended = f"the process ended with status {done.returncode}"
        return None, lines[-1] if lines and done.returncode > 0 else ended
    return json.loads(done.stdout.strip().splitlines()[-1]), ""


def _check_gpu_operations(torch: TorchFacts, *, nccl: bool) -> Check:
    if nccl:
        return good("horovod-nccl", "NCCL is built in")
    if not torch.cuda_version:
        return good("horovod-nccl", "no NCCL, and this torch has no use for it", "jobs train on CPUs here")
    return warning(
        "horovod-nccl",
        "HW-DOC-007",
        "NCCL is not built in, although torch can use CUDA",
        "gradients of GPUs travel through host memory: right, but slow",
        f"install the CUDA toolkit of torch's version ({torch.cuda_version}), then: {_BUILD}",
    )


def _check_mpi(*, built: bool) -> Check:
    mpirun = shutil.which("mpirun", path=search_path(os.environ))
    found = f"{mpirun}: {first_line(mpirun, '--version')}" if mpirun else "no mpirun"
    return good(
        "mpi",
        f"{found}; Horovod is built {'with' if built else 'without'} MPI",
        "" if built and mpirun else "'mpirun python train.py' does not work; Horowatt's own jobs use Gloo",
    )


def check_build_tools() -> Check:
    """Check the tools that ``horowatt build-horovod`` needs."""
    name = "build-tools"
    try:
        tools = find_toolchain(TorchFacts("", "", cxx11_abi=True, cuda_archs=()), os.environ)
    except NeedsOperator as error:
        return warning(
            name,
            error.code,
            error.fields.get("missing", error.message) + " not found",
            "Horovod cannot be built here; one that is already installed goes on working",
            error.hint,
        )
    return good(name, f"{tools.cxx_version}; cmake {tools.cmake_version}")


def check_simulation_tools(compilers: Sequence[str] = ("cc", "gcc")) -> Check:
    """Check that simulated GPUs are possible: their NVML library is compiled on first use."""
    found = next((path for name in compilers if (path := shutil.which(name))), None)
    if found:
        return good("simulated-gpus", f"possible: {found} compiles their NVML library")
    return warning(
        "simulated-gpus",
        "HW-SIM-003",
        "no C compiler (cc or gcc) on PATH",
        "'horowatt demo' and 'horowatt agent --simulate' cannot run on a machine without GPUs",
        "install gcc (Debian and Ubuntu: apt-get install build-essential)",
    )
