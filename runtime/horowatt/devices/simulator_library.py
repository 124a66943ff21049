# SPDX-License-Identifier: Apache-2.0
"""Compiling the simulated NVML library on demand.

The wheel ships C source and no binary, so it stays one wheel for every machine.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path

from horowatt.errors import NeedsOperator

LIBRARY_NAME = "libnvidia-ml.so.1"
_FLAGS = (
    "-std=gnu11",
    "-O2",
    "-Wall",
    "-Wextra",
    "-shared",
    "-fPIC",
    "-pthread",
    f"-Wl,-soname,{LIBRARY_NAME}",
)
_COMPILERS = ("cc", "gcc")
_COMPILE_TIMEOUT_S = 120.0


def build_library(cache_dir: Path | None = None) -> Path:
    """Return the simulated NVML library, compiling it when the cache has none for this source.

    Args:
        cache_dir: Where to keep it; by default ``$XDG_CACHE_HOME/horowatt`` or
            ``~/.cache/horowatt``. Processes of other users that are to load it must be able to
            read this folder, so an agent that runs as root names one outside root's home.

    Raises:
        NeedsOperator: ``HW-SIM-003`` when there is no C compiler, ``HW-SIM-004`` when compiling
            fails or the cache cannot be written.
    """
    source = files("horowatt.devices").joinpath("_nvml_sim.c").read_bytes()
    compiler = _find_compiler()
    key = hashlib.sha256(
        b"\0".join([source, " ".join(_FLAGS).encode(), os.uname().machine.encode(), _version_of(compiler)])
    ).hexdigest()[:16]
    cache = cache_dir if cache_dir is not None else _default_cache()
    folder = cache / f"nvml-sim-{key}"
    library = folder / LIBRARY_NAME
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Workers of other users load the library too, whatever the umask of the agent.
        folder.chmod(0o755)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as name:
            built = Path(name) / LIBRARY_NAME
            _compile(compiler, source, built)
            built.chmod(0o755)
            built.replace(library)
    except OSError as error:
        raise _not_built(str(error)) from error
    return library


def _default_cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    if root and Path(root).is_absolute():
        return Path(root) / "horowatt"
    try:
        return Path.home() / ".cache" / "horowatt"
    except RuntimeError as error:
        raise _not_built("this user has no home folder and XDG_CACHE_HOME is not set") from error


def _find_compiler() -> str:
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise NeedsOperator(
        "HW-SIM-003",
        "simulated GPUs need a C compiler, and there is none",
        because="neither cc nor gcc is on PATH",
        hint="install gcc (Debian and Ubuntu: apt install build-essential)",
    )


def _version_of(compiler: str) -> bytes:
    try:
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, check=False, timeout=_COMPILE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _not_built(str(error)) from error
    return done.stdout


def _compile(compiler: str, source: bytes, output: Path) -> None:
    code = output.with_name("nvml_sim.c")
    code.write_bytes(source)
    try:
        done = subprocess.run(
            [compiler, *_FLAGS, "-o", str(output), str(code), "-lm"],
            capture_output=True,
            check=False,
            timeout=_COMPILE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise _not_built(str(error)) from error
    if done.returncode != 0:
        raise _not_built(done.stderr.decode("utf-8", "replace")[-2000:])


def _not_built(why: str) -> NeedsOperator:
    return NeedsOperator(
        "HW-SIM-004",
        "the simulated NVML library could not be built",
        because=why,
        hint="check that gcc and the C library's headers work (Debian and Ubuntu: build-essential) "
        "and that the cache folder (XDG_CACHE_HOME) can be written",
    )
