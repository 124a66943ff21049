# SPDX-License-Identifier: Apache-2.0
"""From a Python environment with torch to one with Horovod: find or build the wheel, install it, try it.

Known limitations: one torch per environment; the wheel is bound to that torch's exact version. A
wheel with CUDA is only built where the CUDA toolkit (nvcc and headers) is installed.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from horowatt.errors import NeedsOperator
from horowatt.files import disk_full
from horowatt.horovod_build import patches
from horowatt.horovod_build.cache import StoredWheel, WheelCache, default_root, sha256_of
from horowatt.horovod_build.recipe import HOROVOD_VERSION, SDIST_NAME, SDIST_SHA256, Recipe, recipe_for
from horowatt.horovod_build.steps import elapsed, relevant_errors, run_logged
from horowatt.horovod_build.toolchain import find_toolchain, probe_torch

Say = Callable[[str], None]

IMPORT_TIMEOUT_S = 180.0
_BUILD_PACKAGES = ("setuptools>=77", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml", "cffi>=1.4")
_RUNTIME_PACKAGES = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi>=1.4", "numpy")
"""Horovod's declared needs, and numpy, which its broadcast of objects uses without declaring it."""

_IMPORT_HOROVOD = """
import json, torch
import horovod.torch as hvd
print(json.dumps({"gloo": bool(hvd.gloo_built()), "mpi": bool(hvd.mpi_built()),
                  "nccl": bool(hvd.nccl_built())}))
"""


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What ``run`` did."""

    wheel: str
    """Path of the wheel in the cache."""
    key: str
    cached: bool
    """The wheel was already there; nothing was compiled."""
    installed: bool
    """This Python environment has the wheel now."""
    seconds_s: float
    """Wall time of the whole call, in seconds."""
    horovod_version: str
    torch_version: str
    gloo: bool
    mpi: bool
    nccl: bool
    log: str
    """Path of the log of the build that made the wheel."""

    def to_json(self) -> dict[str, object]:
        """Return the record as plain JSON values."""
        return asdict(self)


def run(
    *,
    force: bool = False,
    install: bool = True,
    cache_dir: Path | None = None,
    jobs: int | None = None,
    say: Say,
) -> BuildResult:
    """Make sure that there is a Horovod wheel for the torch of this interpreter, and install it.

    Args:
        force: Build even when the cache has the wheel.
        install: Install the wheel into the running interpreter's environment.
        cache_dir: Folder for the wheels; None is the user's cache folder.
        jobs: Compilers to run side by side; None chooses.
        say: Gets one line per step and, during long steps, a sign of life.

    Raises:
        NeedsOperator: ``HW-BLD-...``; what is missing or failed, and what to do.
    """
    began_s = time.monotonic()
    environ = dict(os.environ)
    _check_pip()
    say("looking at torch and the compilers (a few seconds)")
    torch = probe_torch()
    recipe = recipe_for(torch, find_toolchain(torch, environ), environ, jobs=jobs)
    cache = WheelCache(cache_dir.absolute() if cache_dir is not None else default_root(environ))
    key = recipe.key
    cache.create(key)
    stored = None if force else cache.find(key)
    cached = stored is not None
    if stored is None:
        with cache.building(key, say):
            # Whoever held the lock before may have built just this wheel.
            stored = None if force else cache.find(key)
            cached = stored is not None
            if stored is None:
                stored = _build(recipe, cache, say)
    if cached:
        say(f"Horovod {HOROVOD_VERSION} for torch {torch.version} is already built: {stored.wheel}")
    if install:
        _install(stored, say)
    return BuildResult(
        wheel=str(stored.wheel),
        key=key,
        cached=cached,
        installed=install,
        seconds_s=time.monotonic() - began_s,
        horovod_version=HOROVOD_VERSION,
        torch_version=torch.version,
        gloo=stored.features.get("gloo", False),
        mpi=stored.features.get("mpi", False),
        nccl=stored.features.get("nccl", False),
        log=str(cache.folder(key) / "build.log"),
    )


def _build(recipe: Recipe, cache: WheelCache, say: Say) -> StoredWheel:
    key = recipe.key
    # The lock is ours: what an earlier build of this key left behind belongs to nobody.
    for stale in cache.root.glob(f"{key}.building-*"):
        shutil.rmtree(stale, ignore_errors=True)
    log = cache.folder(key) / "build.log"
    log.write_bytes(b"")
    _say_plan(recipe, log, say)
    with tempfile.TemporaryDirectory(prefix=f"{key}.building-", dir=cache.root) as name:
        work = Path(name)
        packages = work / "packages"
        # The build's own packages lie apart, so that the environment it builds for stays as it is.
        env = {**recipe.environment, "PYTHONPATH": str(packages)}
        bench = _Bench(work, log, env, say)
        bench.pip(
            "HW-BLD-009",
            "getting the packages that the build needs (seconds)",
            "install",
            "--quiet",
            "--target",
            str(packages),
            *_BUILD_PACKAGES,
        )
        source = _unpack(_fetch(cache, bench), work)
        patches.apply_all(source)
        say(f"applied {len(patches.PATCHES)} patches: {', '.join(p.name for p in patches.PATCHES)}")
        _stage_nccl(recipe, work, env)
        wheel = _compile(recipe, source, bench)
        features = _try_wheel(wheel, recipe, bench)
        return cache.store(key, wheel, recipe.parts, features)


def _say_plan(recipe: Recipe, log: Path, say: Say) -> None:
    cuda = recipe.tools.cuda
    parts = ["Gloo", *(["MPI"] if recipe.wants_mpi else []), *(["NCCL"] if recipe.wants_nccl else [])]
    say(
        f"building Horovod {HOROVOD_VERSION} for torch {recipe.torch.version} with {' + '.join(parts)}: "
        f"about {recipe.expected_minutes} minutes with {recipe.jobs} compilers on an otherwise idle machine"
    )
    if recipe.torch.cuda_version and cuda is None:
        say(
            f"  torch was built for CUDA {recipe.torch.cuda_version}, but nvcc and the CUDA headers are not "
            "installed: tensors on a GPU will be reduced through host memory"
        )
    elif cuda is not None and cuda.version.split(".")[0] != recipe.torch.cuda_version.split(".")[0]:
        say(
            f"  the CUDA toolkit in {cuda.home} is {cuda.version}, torch was built for "
            f"{recipe.torch.cuda_version}: set CUDA_HOME to a matching one if there is one"
        )
    say(f"  everything it prints goes to {log}")


class _Bench:
    """Where one build works: its folder, its environment and its log."""

    def __init__(self, work: Path, log: Path, env: Mapping[str, str], say: Say) -> None:
        self.work = work
        self.log = log
        self.env = env
        self.say = say

    def pip(self, code: str, label: str, *arguments: str) -> None:
        """Run pip; when it fails, say why in an error with ``code``."""
        self.say(label)
        what = label.partition(" (")[0]
        command = [sys.executable, "-m", "pip", arguments[0], "--disable-pip-version-check", *arguments[1:]]
        before = self.log.stat().st_size
        status = run_logged(command, label=what, log=self.log, say=self.say, env=self.env, cwd=self.work)
        if status != 0:
            with self.log.open("rb") as stream:
                stream.seek(before)
                raise _failed(code, what, stream.read().decode("utf-8", "replace"), self.log)


def _fetch(cache: WheelCache, bench: _Bench) -> Path:
    """Return the archive of Horovod's sources, from the cache or downloaded, and checked."""
    archive = cache.sdist_folder / SDIST_NAME
    if archive.is_file() and sha256_of(archive) == SDIST_SHA256:
        return archive
    bench.pip(
        "HW-BLD-004",
        f"downloading Horovod's sources, {SDIST_NAME} (3.4 MB)",
        "download",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary",
        "horovod",
        "--dest",
        str(bench.work),
        f"horovod=={HOROVOD_VERSION}",
    )
    fetched = bench.work / SDIST_NAME
    found = sha256_of(fetched) if fetched.is_file() else "no file of that name"
    if found != SDIST_SHA256:
        raise NeedsOperator(
            "HW-BLD-005",
            f"what was downloaded as {SDIST_NAME} is not the published archive",
            because=f"its SHA-256 is {found}, expected {SDIST_SHA256}",
            hint="check which package index pip uses (python -m pip config list); nothing was built",
            fields={"found": found, "expected": SDIST_SHA256},
        )
    fetched.replace(archive)
    return archive


def _unpack(archive: Path, work: Path) -> Path:
    with tarfile.open(archive) as tar:
        # Python 3.11.0 to 3.11.3 have no filter; the archive's content is known by its SHA-256 anyway.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(work)  # noqa: S202
    return work / f"horovod-{HOROVOD_VERSION}"


def _stage_nccl(recipe: Recipe, work: Path, env: dict[str, str]) -> None:
    """Show the NCCL that was found under the names that Horovod's cmake files look for."""
    cuda = recipe.tools.cuda
    if not recipe.wants_nccl or cuda is None or cuda.nccl is None or "HOROVOD_NCCL_HOME" in env:
        return
    # NVIDIA's wheels carry libnccl.so.2 only, a linker wants libnccl.so.
    library = work / "nccl" / "libnccl.so"
    library.parent.mkdir()
    library.symlink_to(cuda.nccl.library)
    env["HOROVOD_NCCL_INCLUDE"] = str(cuda.nccl.header.parent)
    env["HOROVOD_NCCL_LIB"] = str(library.parent)


def _compile(recipe: Recipe, source: Path, bench: _Bench) -> Path:
    output = bench.work / "wheel"
    began_s = time.monotonic()
    bench.pip(
        "HW-BLD-007",
        f"compiling Horovod (about {recipe.expected_minutes} minutes)",
        "wheel",
        "-v",
        "--no-cache-dir",
        "--no-build-isolation",
        "--no-deps",
        "--wheel-dir",
        str(output),
        str(source),
    )
    bench.say(f"compiled in {elapsed(time.monotonic() - began_s)}")
    return next(output.glob("*.whl"))


def _try_wheel(wheel: Path, recipe: Recipe, bench: _Bench) -> dict[str, bool]:
    """Import the wheel from a folder of its own; a wheel that does not import is not kept."""
    trial = bench.work / "trial"
    bench.pip(
        "HW-BLD-009", "trying the wheel (seconds)", "install", "--no-deps", "--target", str(trial), str(wheel)
    )
    paths = os.pathsep.join((str(trial), str(bench.work / "packages")))
    features = import_horovod({**recipe.environment, "PYTHONPATH": paths})
    lacking = [
        name
        for name, wanted in (("gloo", True), ("mpi", recipe.wants_mpi), ("nccl", recipe.wants_nccl))
        if wanted and not features[name]
    ]
    if lacking:
        raise NeedsOperator(
            "HW-BLD-012",
            f"the Horovod that was built lacks {', '.join(lacking)}",
            because="its configuration did not find what it needs for that",
            hint=f"look for 'Could NOT find' in {bench.log}",
            fields={"log": str(bench.log)},
        )
    return features


def import_horovod(environ: Mapping[str, str], *, timeout_s: float = IMPORT_TIMEOUT_S) -> dict[str, bool]:
    """Import ``horovod.torch`` in a process of its own and return what is built into it.

    Raises:
        NeedsOperator: ``HW-BLD-008`` when it does not import.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _IMPORT_HOROVOD],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=dict(environ),
        )
        because = (done.stderr.strip().splitlines() or [f"the import ended with status {done.returncode}"])[
            -1
        ]
    except subprocess.TimeoutExpired:
        done, because = None, f"importing it took more than {timeout_s:.0f} s"
    if done is None or done.returncode != 0:
        raise NeedsOperator(
            "HW-BLD-008",
            "Horovod cannot be imported",
            because=because,
            hint="build it for the torch that is installed now: horowatt build-horovod --force",
        )
    features = json.loads(done.stdout.strip().splitlines()[-1])
    return {name: bool(features[name]) for name in ("gloo", "mpi", "nccl")}


def _install(stored: StoredWheel, say: Say) -> None:
    if _installed_sha256() == stored.sha256:
        say("this Horovod is already installed here")
    else:
        say("installing Horovod and what it needs at run time (seconds)")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for arguments in (
            ["--no-deps", "--no-cache-dir", "--force-reinstall", str(stored.wheel)],
            [*_RUNTIME_PACKAGES],
        ):
            done = subprocess.run([*pip, *arguments], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise _failed("HW-BLD-009", "installing Horovod", done.stdout + done.stderr, None)
    import_horovod(os.environ)
    say("Horovod imports, and its Gloo is there")


def _installed_sha256() -> str:
    """Return the SHA-256 of the wheel that the installed Horovod came from, or an empty string."""
    try:
        text = importlib.metadata.distribution("horovod").read_text("direct_url.json")
        return str(json.loads(text or "")["archive_info"]["hashes"]["sha256"])
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return ""


def _check_pip() -> None:
    if importlib.util.find_spec("pip") is None:
        raise NeedsOperator(
            "HW-BLD-011",
            "pip is not installed in this Python environment",
            because="Horovod's sources are downloaded, built and installed with it",
            hint=f"{sys.executable} -m ensurepip --upgrade; on Debian: apt-get install python3-pip",
        )


def _failed(code: str, what: str, output: str, log: Path | None) -> NeedsOperator:
    if log is not None and "No space left on device" in output:
        return disk_full(log, OSError(28, "No space left on device"))
    hint = {
        "HW-BLD-004": "check that pip can reach its package index; without a network, put "
        f"{SDIST_NAME} into the folder 'sdist' of the cache",
        "HW-BLD-007": "the first error above names the cause",
        "HW-BLD-009": "check that pip can reach its package index (python -m pip config list)",
    }[code]
    if "Killed" in output or "cc1plus: out of memory" in output:
        hint = "the compiler ran out of memory: try again with --jobs 1"
    if "externally-managed-environment" in output or "Permission denied" in output:
        hint = "make a virtual environment (python3 -m venv ENV) and install torch and horowatt there"
    return NeedsOperator(
        code,
        f"{what} failed",
        because="\n    ".join(relevant_errors(output)) or "it printed nothing",
        hint=hint + (f"; the whole log is in {log}" if log is not None else ""),
        fields={"log": str(log)} if log is not None else {},
    )
