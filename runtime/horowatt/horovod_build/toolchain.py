# SPDX-License-Identifier: Apache-2.0
"""What is there to build Horovod with: torch, compiler, cmake, Python's headers, CUDA, MPI.

Everything that is missing is named in one error, with the package that brings it, before anything
is downloaded or compiled.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from horowatt.errors import NeedsOperator

PROBE_TIMEOUT_S = 180.0
"""Importing torch from a cold network file system takes minutes rather than seconds."""

MINIMUM_CMAKE = (3, 13)
"""Below it Horovod's setup.py downloads a cmake of its own, behind the user's back."""

_CPU_FEATURES = ("f16c", "avx", "fma")
"""The instruction sets that Horovod's CMakeLists.txt looks for and compiles in."""

_TORCH_PROBE = """
import json, sys
try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    print(json.dumps(None))
    sys.exit(0)
archs = set()
if torch.version.cuda and torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        archs.add("%d%d" % torch.cuda.get_device_capability(index))
print(json.dumps({
    "version": torch.__version__,
    "cuda_version": torch.version.cuda or "",
    "cxx11_abi": bool(torch.compiled_with_cxx11_abi()),
    "cuda_archs": sorted(archs, key=int),
}))
"""


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """The torch that the wheel will be bound to."""

    version: str
    """As torch says it, with its local part: ``2.13.0+cpu``."""
    cuda_version: str
    """Version of CUDA that torch was built for; empty for a build without CUDA."""
    cxx11_abi: bool
    cuda_archs: tuple[str, ...]
    """Compute capabilities of this machine's GPUs (``"90"``); empty when there are none."""


@dataclass(frozen=True, slots=True)
class Cuda:
    """A CUDA toolkit, and NCCL where it was found."""

    home: Path
    version: str
    nccl: "Nccl | None"


@dataclass(frozen=True, slots=True)
class Nccl:
    """NVIDIA's collective library."""

    header: Path
    library: Path
    version: str


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Programs and headers that the build uses."""

    cxx: Path
    cxx_version: str
    cmake: Path
    cmake_version: str
    mpi_version: str
    """Path of mpicc and what its mpirun says it is; empty without MPI."""
    cuda: Cuda | None
    cpu_features: str


def main() -> None:
    """Say whether Horovod could be compiled here; used before anything large is downloaded."""
    try:
        tools = find_toolchain(TorchFacts("", "", cxx11_abi=True, cuda_archs=()), os.environ)
    except NeedsOperator as error:
        sys.exit(str(error))
    sys.stdout.write(f"      compilers: {tools.cxx_version}, cmake {tools.cmake_version}\n")


def search_path(environ: Mapping[str, str]) -> str:
    """Return the PATH to look for programs in: the environment's own programs come first."""
    own = str(Path(sys.executable).parent)
    path = environ.get("PATH", "")
    return f"{own}{os.pathsep}{path}" if path else own


def first_line(*command: str | Path) -> str:
    """Return the first line that a program prints, or an empty string when it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[0].strip() if lines and done.returncode == 0 else ""


def probe_torch() -> TorchFacts:
    """Return what the torch of this interpreter is, asked in a process of its own.

    Raises:
        NeedsOperator: ``HW-BLD-001`` without torch, ``HW-BLD-002`` when it cannot be imported.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _broken_torch(f"importing it took more than {PROBE_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise _broken_torch(lines[-1] if lines else f"the import ended with status {done.returncode}")
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    if facts is None:
        raise NeedsOperator(
            "HW-BLD-001",
            "torch is not installed in this Python environment",
            because=f"Horovod is compiled against one torch, and {sys.executable} has none",
            hint="install the torch that your jobs use (python -m pip install torch), then try again",
        )
    return TorchFacts(
        version=facts["version"],
        cuda_version=facts["cuda_version"],
        cxx11_abi=facts["cxx11_abi"],
        cuda_archs=tuple(facts["cuda_archs"]),
    )


def find_toolchain(torch: TorchFacts, environ: Mapping[str, str]) -> Toolchain:
    """Return everything the build needs.

    Raises:
        NeedsOperator: ``HW-BLD-003`` that names all that is missing and what to install.
    """
    path = search_path(environ)
    missing: list[str] = []
    packages: list[str] = []

    def program(what: str, package: str, *names: str) -> Path:
        for name in names:
            found = shutil.which(name, path=path) if name else None
            if found:
                return Path(found)
        missing.append(what)
        if package not in packages:
            packages.append(package)
        return Path()

    cxx = program(
        "a C++ compiler (g++)", "build-essential", *environ.get("CXX", "").split()[:1], "g++", "c++"
    )
    program("a C compiler (gcc)", "build-essential", *environ.get("CC", "").split()[:1], "gcc", "cc")
    program("make", "build-essential", "make")
    cmake = program("cmake", "cmake", environ.get("HOROVOD_CMAKE", ""), "cmake")
    cmake_version = _version_in(first_line(cmake, "--version")) if cmake != Path() else ""
    if cmake != Path() and _as_numbers(cmake_version) < MINIMUM_CMAKE:
        missing.append(f"a cmake that runs, 3.13 or newer (this one says '{cmake_version}')")
        packages.append("cmake")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        missing.append(f"the headers of Python ({header})")
        packages.append("python3-dev")
    if missing:
        raise _missing_tools(missing, packages)
    mpicc = shutil.which("mpicc", path=path)
    if environ.get("HOROVOD_WITHOUT_MPI") == "1":
        mpicc = None
    return Toolchain(
        cxx=cxx,
        cxx_version=first_line(cxx, "--version"),
        cmake=cmake,
        cmake_version=cmake_version,
        mpi_version=f"{mpicc}: {first_line(Path(mpicc).with_name('mpirun'), '--version')}" if mpicc else "",
        cuda=find_cuda(path, environ) if torch.cuda_version else None,
        cpu_features=_cpu_features(),
    )


def find_cuda(path: str, environ: Mapping[str, str]) -> Cuda | None:
    """Return the first CUDA toolkit that has both nvcc and the headers, or None."""
    nvcc = shutil.which("nvcc", path=path)
    homes = [
        *(environ[name] for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH") if environ.get(name)),
        *([str(Path(nvcc).resolve().parent.parent)] if nvcc else []),
        "/usr/local/cuda",
    ]
    for home in map(Path, homes):
        if (home / "bin/nvcc").is_file() and (home / "include/cuda_runtime.h").is_file():
            return Cuda(home, _nvcc_version(home / "bin/nvcc"), _find_nccl(home, environ))
    return None


def _find_nccl(cuda_home: Path, environ: Mapping[str, str]) -> Nccl | None:
    named = [environ[name] for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME") if environ.get(name)]
    # The NCCL that torch itself loads comes as a wheel; with another one a process would hold two.
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia/nccl"
    for root in (*map(Path, named), wheel, cuda_home, Path("/usr")):
        header = root / "include/nccl.h"
        if not header.is_file():
            continue
        for folder in ("lib", "lib64", f"lib/{sysconfig.get_config_var('MULTIARCH') or 'none'}"):
            for name in ("libnccl.so", "libnccl.so.2"):
                if (root / folder / name).exists():
                    return Nccl(header, root / folder / name, _nccl_version(header))
    return None


def _nccl_version(header: Path) -> str:
    text = header.read_text(encoding="utf-8", errors="replace")
    return ".".join(re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH) (\d+)", text)[:3])


def _nvcc_version(nvcc: Path) -> str:
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"release ([0-9.]+)", done.stdout)
    return found.group(1) if found else ""


def _cpu_features() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return " ".join(name for name in _CPU_FEATURES if name in line.split())


def _version_in(line: str) -> str:
    found = re.search(r"\d+(\.\d+)+", line)
    return found.group(0) if found else line


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _broken_torch(because: str) -> NeedsOperator:
    return NeedsOperator(
        "HW-BLD-002",
        "the torch of this Python environment cannot be imported",
        because=because,
        hint=f"mend or reinstall it; '{sys.executable} -c \"import torch\"' must work",
    )


def _missing_tools(missing: list[str], packages: list[str]) -> NeedsOperator:
    hint = f"on Debian or Ubuntu: apt-get install {' '.join(dict.fromkeys(packages))}"
    if "cmake" in packages:
        hint += f"; cmake also comes with: {sys.executable} -m pip install cmake"
    if "python3-dev" in packages:
        hint += "; other ways to install Python bring its headers along"
    return NeedsOperator(
        "HW-BLD-003",
        f"Horovod cannot be compiled here: {', '.join(missing)} not found",
        because="Horovod is published as source only and must be compiled for the torch it is used with",
        hint=hint,
        fields={"missing": ", ".join(missing), "packages": " ".join(dict.fromkeys(packages))},
    )
