# SPDX-License-Identifier: Apache-2.0
"""What has to change in Horovod's 0.28.1 sources so that they compile and run today.

Each patch replaces one exact piece of text. When that text is not there (another release, or a source
folder that somebody changed) nothing is built: a patch that silently does nothing would only be found
minutes later, as an error of the compiler.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from horowatt.errors import NeedsOperator


@dataclass(frozen=True, slots=True)
class Patch:
    """One replacement in one file of Horovod's source folder."""

    name: str
    reason: str
    """Why Horovod does not build or run without it."""
    file: str
    """Path inside the source folder."""
    old: str
    """Text that must be there, exactly once."""
    new: str


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="cxx17-core",
        reason="the headers of torch >= 2.1 refuse to compile below C++17",
        file="CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD 14)",
        new="set(CMAKE_CXX_STANDARD 17)",
    ),
    Patch(
        name="cxx17-torch",
        reason="the torch extension sets its own standard, below the one of the project",
        file="horovod/torch/CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD 14)",
        new="set(CMAKE_CXX_STANDARD 17)",
    ),
    Patch(
        name="gcc13-stdexcept",
        reason="std::logic_error is used, and since gcc 13 no other header brings its declaration",
        file="horovod/common/common.h",
        old="#include <memory>\n#include <string>\n",
        new="#include <memory>\n#include <stdexcept>\n#include <string>\n",
    ),
    Patch(
        name="gcc13-string",
        reason="std::string is used, and since gcc 13 no other header brings its declaration",
        file="horovod/common/group_table.h",
        old="#include <queue>\n#include <unordered_map>\n",
        new="#include <queue>\n#include <string>\n#include <unordered_map>\n",
    ),
    Patch(
        name="no-distutils-in-cmake",
        reason="Python 3.12 removed distutils, which was asked for the folder of Python.h",
        file="horovod/torch/CMakeLists.txt",
        old="from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        new="import sysconfig; print(sysconfig.get_path('include'))",
    ),
    Patch(
        name="no-distutils-in-runner",
        reason="Python 3.12 removed distutils; horovodrun imports it only to look for a program",
        file="horovod/runner/js_run.py",
        old="from distutils.spawn import find_executable\n",
        new="from shutil import which as find_executable\n",
    ),
    Patch(
        name="cuda-kernels-cxx14",
        reason="the headers of gcc >= 14 do not compile as C++11, the standard asked of nvcc",
        file="horovod/common/ops/cuda/CMakeLists.txt",
        old="set(CMAKE_CUDA_STANDARD 11)",
        new="set(CMAKE_CUDA_STANDARD 14)",
    ),
)


def patched(text: str, patch: Patch) -> str:
    """Return ``text`` with the patch applied.

    Raises:
        NeedsOperator: ``HW-BLD-006`` when the text to replace is not there exactly once.
    """
    count = text.count(patch.old)
    if count != 1:
        raise NeedsOperator(
            "HW-BLD-006",
            f"the patch {patch.name} does not fit {patch.file}",
            because=f"the text to replace is there {count} times instead of once",
            hint="these patches are for Horovod's published 0.28.1 sources; remove a changed copy "
            "from the cache folder and try again",
            fields={"patch": patch.name, "file": patch.file},
        )
    return text.replace(patch.old, patch.new)


def apply_all(source: Path, patches: tuple[Patch, ...] = PATCHES) -> None:
    """Apply the patches to Horovod's unpacked source folder.

    Raises:
        NeedsOperator: ``HW-BLD-006`` when one does not fit, or its file is missing.
    """
    for patch in patches:
        path = source / patch.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        path.write_text(patched(text, patch), encoding="utf-8")


def digest(patches: tuple[Patch, ...] = PATCHES) -> str:
    """Return the SHA-256 over the text of the patches: other patches, other wheel."""
    parts = (part for patch in patches for part in (patch.file, patch.old, patch.new))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
