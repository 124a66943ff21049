# SPDX-License-Identifier: Apache-2.0
"""How Horovod is compiled, and the key under which the wheel is kept.

The key is a hash over everything that decides what the wheel contains or where it can run. Two
environments with the same key can share one wheel; any difference builds another one.
"""

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from horowatt.horovod_build import patches
from horowatt.horovod_build.toolchain import Toolchain, TorchFacts, search_path

HOROVOD_VERSION = "0.28.1"
SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
"""Of the published archive; anything else is refused."""

_FORCED_INCLUDES = "-include cstdint -include stdexcept -include string -include algorithm"
"""Newer standard libraries include less by the way, and the Gloo inside Horovod relies on it."""

_BYTES_PER_COMPILER = 1_500_000_000
"""Peak memory of g++ on one file with torch's headers."""

_CPU_MINUTES = 6.5
"""Measured: 6 min of user time and 20 s of system time (gcc 12, torch 2.13.0+cpu)."""

_FLAG_PREFIXES = (
    "HOROVOD_WITH",
    "HOROVOD_GPU",
    "HOROVOD_NCCL",
    "HOROVOD_CUDA",
    "HOROVOD_ROCM",
    "HOROVOD_NVTX",
    "HOROVOD_BUILD",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_ALLOW_MIXED",
    "HOROVOD_DEBUG",
    "HOROVOD_SKIP_COMPILE",
    "HOROVOD_LOCAL_VERSION",
)
"""Variables read by Horovod's build. Those it reads at run time must not lead to another wheel."""

_FLAG_NAMES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CUDAFLAGS", "CUDAHOSTCXX")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One build: its environment, its key and what it says about itself."""

    torch: TorchFacts
    tools: Toolchain
    environment: Mapping[str, str]
    """Whole environment of the build's processes."""
    parts: Mapping[str, str]
    """Every ingredient of the key, by name."""
    jobs: int
    """Compilers that run side by side."""

    @property
    def key(self) -> str:
        """Return the name of the wheel's folder in the cache."""
        text = json.dumps(dict(self.parts), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def wants_mpi(self) -> bool:
        """Whether Horovod is told to build its MPI part."""
        return self.environment.get("HOROVOD_WITH_MPI") == "1"

    @property
    def wants_nccl(self) -> bool:
        """Whether Horovod is told to use NCCL for its GPU operations."""
        return self.environment.get("HOROVOD_GPU_OPERATIONS") == "NCCL"

    @property
    def expected_minutes(self) -> int:
        """Return about how long the compilation takes, in minutes."""
        return max(1, round(_CPU_MINUTES * (1.5 if self.wants_nccl else 1.0) / self.jobs + 0.5))


def recipe_for(
    torch: TorchFacts,
    tools: Toolchain,
    environ: Mapping[str, str],
    *,
    jobs: int | None = None,
    patch_digest: str | None = None,
) -> Recipe:
    """Return how to build for this torch with these tools.

    Args:
        environ: The caller's environment; what it says about the build is respected.
        jobs: Compilers to run side by side; None chooses by processors and free memory.
        patch_digest: Stands for the text of the patches; None takes that of ``PATCHES``.
    """
    width = jobs if jobs is not None else default_jobs()
    environment = build_environment(torch, tools, environ, width)
    return Recipe(
        torch=torch,
        tools=tools,
        environment=environment,
        parts=key_parts(torch, tools, environment, patch_digest or patches.digest()),
        jobs=width,
    )


def build_environment(
    torch: TorchFacts, tools: Toolchain, environ: Mapping[str, str], jobs: int
) -> dict[str, str]:
    """Return the environment in which pip compiles Horovod."""
    env = dict(environ)
    # A make above us would otherwise hand its job server to Horovod's make, which cannot reach it.
    for name in ("MAKELEVEL", "MFLAGS", "GNUMAKEFLAGS"):
        env.pop(name, None)
    env.setdefault("HOROVOD_WITHOUT_TENSORFLOW", "1")
    env.setdefault("HOROVOD_WITHOUT_MXNET", "1")
    env.setdefault("CXX", str(tools.cxx))
    env.setdefault("CMAKE_GENERATOR", "Unix Makefiles")
    # The Gloo inside Horovod asks for cmake 2.8.12, which cmake 4 refuses unless told otherwise.
    env.setdefault("CMAKE_POLICY_VERSION_MINIMUM", "3.5")
    if tools.mpi_version:
        env["HOROVOD_WITH_MPI"] = "1"
    else:
        env["HOROVOD_WITHOUT_MPI"] = "1"
    if tools.cuda is not None:
        env["CUDA_HOME"] = env["HOROVOD_CUDA_HOME"] = str(tools.cuda.home)
        if torch.cuda_archs:
            env.setdefault("HOROVOD_BUILD_CUDA_CC_LIST", ",".join(torch.cuda_archs))
        if tools.cuda.nccl is not None and not _chooses_gpu_operations(environ):
            env["HOROVOD_GPU_OPERATIONS"] = "NCCL"
            env.setdefault("HOROVOD_NCCL_LINK", "SHARED")
    env.update(
        HOROVOD_WITH_GLOO="1",
        HOROVOD_WITH_PYTORCH="1",
        HOROVOD_CMAKE=str(tools.cmake),
        CXXFLAGS=f"{environ.get('CXXFLAGS', '')} {_FORCED_INCLUDES}".strip(),
        MAKEFLAGS=f"-j{jobs}",
        PATH=search_path(environ),
        PYTHONDONTWRITEBYTECODE="1",
        # A setting for the user's own installs, which pip refuses to combine with --target.
        PIP_USER="0",
    )
    return env


def key_parts(
    torch: TorchFacts, tools: Toolchain, environment: Mapping[str, str], patch_digest: str
) -> dict[str, str]:
    """Return every ingredient of the key by name, as text."""
    cuda = tools.cuda
    flags = {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_FLAG_PREFIXES) or name in _FLAG_NAMES
    }
    return {
        "horovod": HOROVOD_VERSION,
        "sdist_sha256": SDIST_SHA256,
        "patches_sha256": patch_digest,
        "torch": torch.version,
        "torch_cuda": torch.cuda_version,
        "torch_cxx11_abi": str(torch.cxx11_abi),
        "python": f"{platform.python_implementation()} {sysconfig.get_python_version()}",
        "python_abi": str(sysconfig.get_config_var("SOABI")),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "cpu_features": tools.cpu_features,
        "compiler": tools.cxx_version,
        "cmake": tools.cmake_version,
        "mpi": tools.mpi_version,
        "cuda": f"{cuda.home} {cuda.version}" if cuda else "",
        "nccl": cuda.nccl.version if cuda and cuda.nccl else "",
        "flags": json.dumps(flags),
    }


def default_jobs() -> int:
    """Return how many compilers this machine can run at once without running out of memory."""
    processors = len(os.sched_getaffinity(0))
    return max(1, min(processors, _available_bytes() // _BYTES_PER_COMPILER))


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _chooses_gpu_operations(environ: Mapping[str, str]) -> bool:
    return any(name.startswith("HOROVOD_GPU") for name in environ)
