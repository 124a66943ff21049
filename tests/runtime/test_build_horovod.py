# SPDX-License-Identifier: Apache-2.0
"""The builder of Horovod: patches, key, cache, tools, failures."""

import fcntl
import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from horowatt.errors import NeedsOperator
from horowatt.horovod_build import build, patches, recipe, run, steps, toolchain
from horowatt.horovod_build.cache import WheelCache, default_root, sha256_of
from horowatt.horovod_build.toolchain import Cuda, Nccl, Toolchain, TorchFacts

PUBLISHED_TEXT = {
    "CMakeLists.txt": "set(CMAKE_CXX_STANDARD 14)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\n",
    "horovod/torch/CMakeLists.txt": (
        'execute_process(COMMAND ${PY_EXE} -c "from distutils.sysconfig import get_python_inc; '
        'print(get_python_inc())"\n'
        "                OUTPUT_VARIABLE PYTHON_INCLUDE_PATH OUTPUT_STRIP_TRAILING_WHITESPACE)\n"
        'if(NOT Pytorch_VERSION VERSION_LESS "1.5.0")\n    set(CMAKE_CXX_STANDARD 14)\nendif()\n'
    ),
    "horovod/common/common.h": "#include <functional>\n#include <memory>\n#include <string>\n",
    "horovod/common/group_table.h": "#include <mutex>\n#include <queue>\n#include <unordered_map>\n",
    "horovod/runner/js_run.py": (
        "from horovod.runner.util import lsf\nfrom distutils.spawn import find_executable\n"
    ),
    "horovod/common/ops/cuda/CMakeLists.txt": "set(CMAKE_CUDA_STANDARD 11)\n",
}
"""The lines of the published sources that matter, as they stand there."""

CXX_FILES = (
    "horovod/common/gloo/gloo_context.cc",
    "horovod/common/gloo/http_store.cc",
    "third_party/gloo/gloo/transport/tcp/pair.cc",
)
"""Of these whole functions are replaced; that they stand there is checked on the archive itself."""

TORCH = TorchFacts(version="2.13.0+cpu", cuda_version="", cxx11_abi=True, cuda_archs=())
TOOLS = Toolchain(
    cxx=Path("/usr/bin/g++"),
    cxx_version="g++ (Debian 12.2.0-14) 12.2.0",
    cmake=Path("/usr/bin/cmake"),
    cmake_version="3.25.1",
    mpi_version="",
    cuda=None,
    cpu_features="f16c avx fma",
)
ENVIRON = {"PATH": "/usr/bin", "HOME": "/home/alice"}


def key_of(
    torch: TorchFacts = TORCH,
    tools: Toolchain = TOOLS,
    environ: dict[str, str] | None = None,
    *,
    jobs: int = 2,
    patch_digest: str | None = None,
) -> str:
    return recipe.recipe_for(
        torch, tools, {**ENVIRON, **(environ or {})}, jobs=jobs, patch_digest=patch_digest
    ).key


def published(folder: Path) -> Path:
    replaced = {
        name: "\n".join(patch.old for patch in patches.PATCHES if patch.file == name) for name in CXX_FILES
    }
    for name, text in {**PUBLISHED_TEXT, **replaced}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


# --- patches


def test_patches_fit_published_lines(tmp_path: Path) -> None:
    """Every patch finds its place in the published lines and changes it as its reason says."""
    patches.apply_all(published(tmp_path))
    assert "CMAKE_CXX_STANDARD 17" in (tmp_path / "CMakeLists.txt").read_text()
    torch_cmake = (tmp_path / "horovod/torch/CMakeLists.txt").read_text()
    assert "CMAKE_CXX_STANDARD 17" in torch_cmake
    assert "sysconfig.get_path('include')" in torch_cmake
    assert "#include <stdexcept>" in (tmp_path / "horovod/common/common.h").read_text()
    assert "#include <string>" in (tmp_path / "horovod/common/group_table.h").read_text()
    for name in PUBLISHED_TEXT:
        assert "distutils" not in (tmp_path / name).read_text()


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.name)
def test_patch_fails_loudly(patch: patches.Patch, tmp_path: Path) -> None:
    """A patch whose text is missing, there twice, or already applied stops the build by name."""
    for text in ("", patch.old + patch.old, patch.new.replace(patch.old, "")):
        with pytest.raises(NeedsOperator, match=patch.name) as caught:
            patches.patched(text, patch)
        assert caught.value.code == "HW-BLD-006"
    source = published(tmp_path)
    (source / patch.file).unlink()
    with pytest.raises(NeedsOperator, match=patch.file):
        patches.apply_all(source)


def test_patches_fit_real_archive(tmp_path: Path) -> None:
    """The patches fit the published archive itself, where this machine has it."""
    archive = WheelCache(default_root(os.environ)).sdist_folder / recipe.SDIST_NAME
    if not archive.is_file() or sha256_of(archive) != recipe.SDIST_SHA256:
        pytest.skip(f"{archive} is not there: no Horovod was built on this machine")
    source = build._unpack(archive, tmp_path)
    patches.apply_all(source)
    context, store, pair = (source.joinpath(name).read_text() for name in CXX_FILES)
    # A process set closes its connections, and only a context that was enabled starts over.
    finalize = context[context.index("void GlooContext::Finalize()") :]
    assert (
        finalize.index("local_ctx.reset()")
        < finalize.index("if (enabled_)")
        < finalize.index("reset_ = true")
    )
    # Each of the three verbs goes through the one function that sends the token and knows a refusal.
    assert store.count("request.send(") == store.count("request.send(method, body, TokenHeader())") == 1
    assert store.index("throw Refused(message)") < store.index("catch (const Refused&)")
    assert store.index("catch (const Refused&)") < store.index("catch (std::exception& e)")
    assert pair.count("bind(fd, ") == pair.count("bind(fd, (const sockaddr*)&address, ") == 1
    with pytest.raises(NeedsOperator, match="does not fit"):
        patches.apply_all(source)


# --- key


def test_key_is_stable() -> None:
    """What does not change the wheel does not change the key."""
    same = key_of()
    assert key_of(jobs=7) == same
    assert key_of(environ={"HOROVOD_RANK": "3", "HOROVOD_TIMELINE": "/tmp/t"}) == same
    assert key_of(environ={"PATH": "/opt/other/bin:/usr/bin", "MAKEFLAGS": "-j9"}) == same
    assert key_of(tools=replace(TOOLS, cmake=Path("/opt/cmake"))) == same


def test_key_has_every_ingredient() -> None:
    """Another version, compiler, flag or patch leads to another wheel."""
    cuda = Cuda(Path("/usr/local/cuda"), "13.0", Nccl(Path("/n/nccl.h"), Path("/n/libnccl.so"), "2.28.9"))
    on_gpu = replace(TORCH, cuda_version="13.0")
    with_cuda = replace(TOOLS, cuda=cuda)
    keys = [
        key_of(),
        key_of(replace(TORCH, version="2.13.0")),
        key_of(replace(TORCH, cxx11_abi=False)),
        key_of(on_gpu),
        key_of(on_gpu, with_cuda),
        key_of(replace(on_gpu, cuda_archs=("90",)), with_cuda),
        key_of(on_gpu, replace(TOOLS, cuda=replace(cuda, version="12.9"))),
        key_of(on_gpu, replace(TOOLS, cuda=replace(cuda, nccl=None))),
        key_of(tools=replace(TOOLS, cxx_version="g++ (Debian 14.2.0-19) 14.2.0")),
        key_of(tools=replace(TOOLS, cmake_version="4.1.0")),
        key_of(tools=replace(TOOLS, mpi_version="/usr/bin/mpicc: mpirun (Open MPI) 4.1.4")),
        key_of(tools=replace(TOOLS, cpu_features="f16c avx")),
        key_of(environ={"CXXFLAGS": "-g"}),
        key_of(environ={"CC": "clang"}),
        key_of(environ={"HOROVOD_BUILD_ARCH_FLAGS": "-march=x86-64-v3"}),
        key_of(environ={"HOROVOD_DEBUG": "1"}),
        key_of(patch_digest="0" * 64),
    ]
    assert len(set(keys)) == len(keys)


def test_key_has_python_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Python, machine or C library leads to another wheel."""
    keys = {key_of()}
    for function, value in (("machine", "riscv64"), ("libc_ver", ("glibc", "2.99"))):
        with monkeypatch.context() as patch:
            patch.setattr(recipe.platform, function, lambda value=value: value)
            keys.add(key_of())
    for function in ("get_python_version", "get_config_var"):
        with monkeypatch.context() as patch:
            patch.setattr(recipe.sysconfig, function, lambda *_: "3.12-abi")
            keys.add(key_of())
    assert len(keys) == 5


def test_patch_digest_covers_text() -> None:
    """Changing one letter of one patch, or leaving one out, changes the digest."""
    changed = (replace(patches.PATCHES[0], new="set(CMAKE_CXX_STANDARD 20)"), *patches.PATCHES[1:])
    digests = {patches.digest(), patches.digest(changed), patches.digest(patches.PATCHES[1:])}
    assert len(digests) == 3


# --- environment of the build


def test_environment_without_mpi_and_cuda() -> None:
    """Gloo and PyTorch are always built, other frameworks are not, and cmake 4 is let through."""
    env = recipe.build_environment(
        TORCH, TOOLS, {**ENVIRON, "MAKEFLAGS": " -j8 --jobserver-auth=3,4", "MAKELEVEL": "1"}, 3
    )
    assert env["HOROVOD_WITH_GLOO"] == env["HOROVOD_WITH_PYTORCH"] == env["HOROVOD_WITHOUT_MPI"] == "1"
    assert env["HOROVOD_WITHOUT_TENSORFLOW"] == env["HOROVOD_WITHOUT_MXNET"] == "1"
    assert env["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"
    assert "HOROVOD_GPU_OPERATIONS" not in env
    assert env["MAKEFLAGS"] == "-j3"
    assert "MAKELEVEL" not in env


def test_environment_with_mpi_and_nccl() -> None:
    """MPI and NCCL are asked for when they are there, and what the user chose about GPUs stands."""
    cuda = Cuda(Path("/opt/cuda"), "13.0", Nccl(Path("/n/nccl.h"), Path("/n/libnccl.so"), "2.28.9"))
    tools = replace(TOOLS, mpi_version="/usr/bin/mpicc: mpirun (Open MPI) 4.1.4", cuda=cuda)
    torch = replace(TORCH, cuda_version="13.0", cuda_archs=("80", "90"))
    wanted = recipe.recipe_for(torch, tools, ENVIRON, jobs=1)
    assert wanted.wants_mpi
    assert wanted.wants_nccl
    assert wanted.environment["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"
    assert wanted.environment["HOROVOD_CUDA_HOME"] == "/opt/cuda"
    assert "HOROVOD_WITHOUT_MPI" not in wanted.environment
    chosen = recipe.recipe_for(torch, tools, {**ENVIRON, "HOROVOD_GPU_ALLREDUCE": "MPI"}, jobs=1)
    assert not chosen.wants_nccl


def test_finds_cuda_and_nccl_of_a_wheel(tmp_path: Path) -> None:
    """A toolkit counts with nvcc and headers; NCCL's wheel, which has no libnccl.so, is staged as one."""
    home, nccl = tmp_path / "cuda", tmp_path / "nccl-wheel"
    for path in (home / "bin/nvcc", home / "include/cuda_runtime.h", nccl / "lib/libnccl.so.2"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.48'\n")
        path.chmod(0o755)
    (nccl / "include").mkdir()
    (nccl / "include/nccl.h").write_text(
        "#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 9\n"
    )
    cuda = toolchain.find_cuda("", {"CUDA_HOME": str(home), "NCCL_HOME": str(nccl)})
    assert cuda is not None
    assert (cuda.home, cuda.version) == (home, "13.0")
    assert cuda.nccl is not None
    assert cuda.nccl.version == "2.28.9"
    made = recipe.recipe_for(replace(TORCH, cuda_version="13.0"), replace(TOOLS, cuda=cuda), ENVIRON, jobs=1)
    env = dict(made.environment)
    build._stage_nccl(made, tmp_path / "cuda", env)
    assert (Path(env["HOROVOD_NCCL_LIB"]) / "libnccl.so").resolve() == nccl / "lib/libnccl.so.2"
    assert (Path(env["HOROVOD_NCCL_INCLUDE"]) / "nccl.h").is_file()


# --- tools


def test_missing_tools_are_named_with_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing on PATH one error names everything that is missing and what to install."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(NeedsOperator) as caught:
        toolchain.find_toolchain(TORCH, {"PATH": str(tmp_path)})
    error = caught.value
    assert error.code == "HW-BLD-003"
    assert all(name in error.message for name in ("g++", "gcc", "make", "cmake"))
    assert "apt-get install build-essential cmake" in error.hint
    assert "-m pip install cmake" in error.hint


def test_missing_headers_and_old_cmake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers of Python that are not there and a cmake that is too old are named likewise."""
    for name in ("g++", "gcc", "make", "cmake"):
        (tmp_path / name).write_text("#!/bin/sh\necho cmake version 3.10.2\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda _: str(tmp_path / "include"))
    with pytest.raises(NeedsOperator) as caught:
        toolchain.find_toolchain(TORCH, {"PATH": str(tmp_path)})
    assert "3.10.2" in caught.value.message
    assert "Python.h" in caught.value.message
    assert "python3-dev" in caught.value.hint


def test_torch_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without torch is told to install it, not given a failed build."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare/bin/python"))
    with pytest.raises(NeedsOperator) as caught:
        toolchain.probe_torch()
    assert caught.value.code == "HW-BLD-001"


def test_torch_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that does not import is reported with its own words."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(NeedsOperator, match="cannot be imported") as caught:
        toolchain.probe_torch()
    assert caught.value.code == "HW-BLD-002"
    assert "libcudart.so.13" in caught.value.because


# --- cache


def test_cache_folder(tmp_path: Path) -> None:
    """Wheels lie outside the clone: where the variable says, else in the user's cache folder."""
    assert default_root({"HOROWATT_CACHE_DIR": "/var/cache/hw"}) == Path("/var/cache/hw/horovod")
    assert default_root({"XDG_CACHE_HOME": "/c"}) == Path("/c/horowatt/horovod")
    assert default_root({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache/horowatt/horovod"


def test_damaged_wheel_is_not_used(tmp_path: Path) -> None:
    """Only a wheel with the SHA-256 of its key.json is used; a torn one counts as absent."""
    cache = WheelCache(tmp_path / "cache")
    cache.create("k")
    assert cache.find("k") is None
    built = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    built.write_bytes(b"wheel" * 100)
    stored = cache.store("k", built, {"torch": "2"}, {"gloo": True})
    assert cache.find("k") == stored
    stored.wheel.write_bytes(b"wheel" * 50)
    assert cache.find("k") is None
    (cache.folder("k") / "key.json").write_text("{")
    assert cache.find("k") is None


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """A cache folder that cannot be made is an error that names the way out."""
    (tmp_path / "file").write_text("")
    with pytest.raises(NeedsOperator) as caught:
        WheelCache(tmp_path / "file").create("k")
    assert caught.value.code == "HW-BLD-010"
    assert "--cache-dir" in caught.value.hint


def test_cached_wheel_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the wheel in the cache nothing is downloaded and nothing is compiled."""
    torch = toolchain.probe_torch()
    made = recipe.recipe_for(torch, toolchain.find_toolchain(torch, os.environ), dict(os.environ))
    cache = WheelCache(tmp_path / "cache")
    cache.create(made.key)
    built = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    built.write_bytes(b"not built here")
    cache.store(made.key, built, made.parts, {"gloo": True, "mpi": False, "nccl": False})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    said: list[str] = []
    result = run(install=False, cache_dir=tmp_path / "cache", say=said.append)
    assert result.cached
    assert not result.installed
    assert result.key == made.key
    assert Path(result.wheel).read_bytes() == b"not built here"
    assert result.gloo
    assert "already built" in said[-1]
    assert result.to_json()["wheel"] == result.wheel


def test_two_builds_of_one_wheel_wait(tmp_path: Path) -> None:
    """Who comes second is told that it waits, and goes on when the first one is done."""
    cache = WheelCache(tmp_path)
    cache.create("k")
    told = threading.Event()
    order: list[str] = []

    def second() -> None:
        def say(text: str) -> None:
            order.append(text)
            told.set()

        with cache.building("k", say):
            order.append("second builds")

    with cache.building("k", order.append):
        thread = threading.Thread(target=second)
        thread.start()
        assert told.wait(timeout=60)
        order.append("first is done")
    thread.join(timeout=60)
    assert [text.split(":")[0] for text in order] == [
        "another process builds this wheel",
        "first is done",
        "second builds",
    ]


# --- failures of a build


@pytest.fixture
def bench(tmp_path: Path) -> build._Bench:
    work = tmp_path / "work"
    work.mkdir()
    log = tmp_path / "build.log"
    log.write_bytes(b"")
    env = {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": str(tmp_path / "links"),
    }
    return build._Bench(work, log, env, lambda _: None)


def put_archive(folder: Path, setup: str) -> None:
    folder.mkdir()
    name = f"horovod-{recipe.HOROVOD_VERSION}"
    with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as tar:
        for file, text in (
            ("setup.py", setup),
            ("PKG-INFO", f"Metadata-Version: 2.1\nName: horovod\nVersion: {recipe.HOROVOD_VERSION}\n"),
        ):
            entry = tarfile.TarInfo(f"{name}/{file}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))


def test_wrong_archive_is_refused(bench: build._Bench, tmp_path: Path) -> None:
    """An archive of the right name with another content is neither used nor kept."""
    put_archive(tmp_path / "links", "from setuptools import setup\nsetup(name='horovod', version='0.28.1')\n")
    cache = WheelCache(tmp_path / "cache")
    cache.create("k")
    with pytest.raises(NeedsOperator) as caught:
        build._fetch(cache, bench)
    assert caught.value.code == "HW-BLD-005"
    assert recipe.SDIST_SHA256 in caught.value.because
    assert not list(cache.sdist_folder.iterdir())


def test_unreachable_index(bench: build._Bench, tmp_path: Path) -> None:
    """When nothing can be downloaded the error says so, with pip's words, the log and a way out."""
    (tmp_path / "links").mkdir()
    cache = WheelCache(tmp_path / "cache")
    cache.create("k")
    with pytest.raises(NeedsOperator) as caught:
        build._fetch(cache, bench)
    error = caught.value
    assert error.code == "HW-BLD-004"
    assert "No matching distribution" in error.because
    assert "sdist" in error.hint
    assert error.fields["log"] == str(bench.log)


def test_failed_compilation_shows_its_errors(bench: build._Bench) -> None:
    """A compilation that fails shows the compiler's error and where the whole log is."""
    source = bench.work / "source"
    source.mkdir()
    (source / "setup.py").write_text(
        "import sys\n"
        "from setuptools import setup\n"
        "if 'bdist_wheel' in sys.argv:\n"
        "    print('common.h:80:9: error: no member named logic_error')\n"
        "    sys.exit(2)\n"
        "setup(name='horovod', version='0.28.1')\n"
    )
    made = recipe.recipe_for(TORCH, TOOLS, ENVIRON, jobs=1)
    with pytest.raises(NeedsOperator) as caught:
        build._compile(made, source, bench)
    error = caught.value
    assert error.code == "HW-BLD-007"
    assert "common.h:80:9: error" in error.because
    assert str(bench.log) in error.hint
    assert "common.h:80:9" in bench.log.read_text()


def test_full_disk_and_memory_are_told_apart(tmp_path: Path) -> None:
    """A full disk has its own code; a compiler killed for memory gets the hint that helps."""
    full = build._failed("HW-BLD-007", "compiling", "write: No space left on device\n", tmp_path / "log")
    assert full.code == "HW-DISK-001"
    killed = build._failed("HW-BLD-007", "compiling", "g++: fatal error: Killed signal\n", tmp_path / "log")
    assert "--jobs 1" in killed.hint


def test_python_of_the_system_is_told_apart() -> None:
    """Where pip may not install into the system's Python, the error leads to a virtual environment."""
    refused = build._failed("HW-BLD-009", "installing", "error: externally-managed-environment\n", None)
    assert "python3 -m venv" in refused.hint


def test_relevant_errors() -> None:
    """Of a long log the first errors are shown, or the last lines when nothing calls itself one."""
    log = (
        "\n".join(f"[ {n}%] Building" for n in range(50)) + "\nx.cc:1: error: first\nERROR: Failed building\n"
    )
    assert steps.relevant_errors(log) == ["x.cc:1: error: first"]
    assert steps.relevant_errors("a\n\nb\n") == ["a", "b"]


def test_broken_wheel_is_refused(tmp_path: Path) -> None:
    """A Horovod that does not import is an error with the import's own words."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod/__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    with pytest.raises(NeedsOperator) as caught:
        build.import_horovod({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert caught.value.code == "HW-BLD-008"
    assert "undefined symbol" in caught.value.because


def test_installed_horovod_has_gloo() -> None:
    """The Horovod of this environment imports with this torch and has Gloo."""
    assert build.import_horovod(os.environ)["gloo"]


# --- long steps


def test_long_step_gives_signs_of_life(tmp_path: Path) -> None:
    """A long step says how long it has been running and how far it is, and returns its status."""
    go = tmp_path / "go"
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "%" in text:
            go.touch()

    script = (
        "import pathlib, sys, time\n"
        "print('[ 42%] Building CXX object', flush=True)\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        "sys.exit(7)\n"
    )
    status = steps.run_logged(
        [sys.executable, "-c", script],
        label="compiling",
        log=tmp_path / "log",
        say=say,
        env=os.environ,
        cwd=tmp_path,
        heartbeat_s=0.05,
    )
    assert status == 7
    assert said[-1] == "  compiling: 0 s so far, 42 % of the files"


@pytest.mark.parametrize("how", ["interrupt", "terminate"])
def test_interrupted_step_leaves_no_process(how: str, tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM end the whole family of the step, not only its first process."""
    held = tmp_path / "held"
    script = (
        "import fcntl, os, signal, sys\n"
        f"lock = open({str(held)!r}, 'w')\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "os.fork()\n"
        "print('[  1%]', flush=True)\n"
        "signal.pause()\n"
    )

    def interrupt(text: str) -> None:
        if "%" in text and how == "interrupt":
            raise KeyboardInterrupt
        if "%" in text:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt if how == "interrupt" else SystemExit):
        steps.run_logged(
            [sys.executable, "-c", script],
            label="compiling",
            log=tmp_path / "log",
            say=interrupt,
            env=os.environ,
            cwd=tmp_path,
            heartbeat_s=0.05,
        )
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with held.open() as lock:
        assert eventually(lambda: can_lock(lock.fileno()))


def can_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def eventually(condition: Callable[[], bool]) -> bool:
    for _ in range(1000):
        if condition():
            return True
        time.sleep(0.02)
    return False
