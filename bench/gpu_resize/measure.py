# SPDX-License-Identifier: Apache-2.0
"""Scale-out and scale-in of a CUDA job, both workers on one GPU, over Gloo, under Horowatt's launcher.

    python bench/gpu_resize/measure.py prepare FOLDER [--python 3.12]    with a network
    python bench/gpu_resize/measure.py run FOLDER [--out gpu.json]       without one, where the GPU is

``prepare`` puts Horovod's sources and the wheels that they and Horowatt need into ``FOLDER`` (8 MB).
``run`` needs only that folder, this repository, and a Python 3.11 to 3.13 that has torch: it builds Horovod
there with ``horowatt build-horovod``'s own builder, runs a job that grows from one worker to two and shrinks
back, several times, and prints one line ``figure  measured`` for each figure: pauses, and whether the GPU
memory of the worker that left is free. Without a GPU it runs on the CPU and says so. Nothing is installed.

Horovod is built without NCCL here, which refuses two ranks on one GPU: tensors are reduced through Gloo.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TRAIN = Path(__file__).with_name("train.py")
SDIST = "horovod-0.28.1.tar.gz"
BUILD_PACKAGES = ("setuptools", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml", "cffi", "pycparser")
RUN_PACKAGES = ("click", "msgspec", "nvidia-ml-py", "cloudpickle", "psutil", "pyyaml", "packaging", "cffi")
MODULES = {"nvidia-ml-py": "pynvml", "pyyaml": "yaml"}
"""Where the module of a package has another name."""
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
PATIENCE_S = 300.0
FREED_TOLERANCE_BYTES = 64 << 20
INNER = "HOROWATT_GPU_BENCH_INNER"


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare or run; return 0 when all went as it should."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    prepare_parser = verbs.add_parser("prepare", help="collect what the run needs, with a network")
    prepare_parser.add_argument("folder", type=Path)
    prepare_parser.add_argument("--python", help="version of the Python over there, such as 3.12")
    run_parser = verbs.add_parser("run", help="build and measure, without a network")
    run_parser.add_argument("folder", type=Path)
    run_parser.add_argument("--out", type=Path, help="JSON file for the figures")
    run_parser.add_argument("--rounds", type=int, default=3, help="how often to grow and shrink")
    run_parser.add_argument("--cache-dir", type=Path, help="where built wheels are kept [FOLDER/cache]")
    run_parser.add_argument("--keep", action="store_true", help="keep the job's folder and logs")
    options = parser.parse_args(argv)
    options.folder = options.folder.absolute()
    if options.verb == "prepare":
        return prepare(options.folder, options.python)
    if os.environ.get(INNER):
        return measure(options)
    return bootstrap(options, sys.argv[1:] if argv is None else list(argv))


# ---------------------------------------------------------------------------------------- prepare


def prepare(folder: Path, python: str | None) -> int:
    """Download Horovod's sources and wheels for one version of Python into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    into = ["--dest", str(folder)]
    if not (folder / SDIST).is_file():
        subprocess.run(
            [*pip, "--no-deps", "--no-build-isolation", "--no-binary", "horovod", *into, "horovod==0.28.1"],
            check=True,
        )
    version = python or platform.python_version().rpartition(".")[0]
    target = ["--python-version", version, "--implementation", "cp"]
    for name in PLATFORMS:
        target += ["--platform", name]
    subprocess.run(
        [*pip, "--only-binary=:all:", "--no-deps", *target, *into, *sorted({*BUILD_PACKAGES, *RUN_PACKAGES})],
        check=True,
    )
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    print(f"{folder} is ready for Python {version}: {size / 1e6:.0f} MB")
    return 0


# ------------------------------------------------------------------------------------------ build


def bootstrap(options: argparse.Namespace, argv: list[str]) -> int:
    """Build Horovod, put it with what it needs into a folder of its own, and measure from there."""
    if importlib.util.find_spec("torch") is None:
        sys.exit(f"{sys.executable} has no torch: run this with the Python that has it")
    tag = f"{sys.implementation.cache_tag}-{platform.machine()}"
    site = options.folder / f"site-{tag}"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    # Offline on purpose, also where there is a network: this is what is to be tried.
    environment = {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(options.folder),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONPATH": os.pathsep.join((str(site), str(ROOT / "runtime"))),
        "PYTHONUNBUFFERED": "1",
    }
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site), "--no-deps"]
    lacking = [name for name in RUN_PACKAGES if importlib.util.find_spec(MODULES.get(name, name)) is None]
    if lacking:
        subprocess.run([*pip, *lacking], check=True, env=environment)
    cache = (options.cache_dir or options.folder / "cache").absolute()
    (cache / "sdist").mkdir(parents=True, exist_ok=True)
    if not (cache / "sdist" / SDIST).is_file():
        shutil.copyfile(options.folder / SDIST, cache / "sdist" / SDIST)
    began_s = time.monotonic()
    made = subprocess.run(
        [sys.executable, "-c", _BUILD, str(cache)],
        check=True,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    build = json.loads(made.stdout.splitlines()[-1])
    build["build_s"] = 0.0 if build["cached"] else time.monotonic() - began_s
    subprocess.run([*pip, build["wheel"]], check=True, env=environment)
    return subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), *argv],
        check=False,
        env={**environment, INNER: json.dumps(build)},
    ).returncode


_BUILD = """
import json, os, sys
from pathlib import Path
import torch
if torch.version.cuda:
    # An empty choice is a choice: no NCCL, which refuses two ranks on one GPU.
    os.environ["HOROVOD_GPU_OPERATIONS"] = ""
from horowatt.horovod_build import run
result = run(install=False, cache_dir=Path(sys.argv[1]), say=lambda text: print(text, file=sys.stderr))
print(json.dumps(result.to_json()))
"""


# ---------------------------------------------------------------------------------------- measure


class Gpu:
    """What NVML says about the first GPU, or nothing where there is none."""

    def __init__(self) -> None:
        import torch

        self.name = "no GPU: this ran on the CPU"
        self.uuid = ""
        self._handle: Any = None
        if not torch.cuda.is_available():
            return
        self.name = torch.cuda.get_device_name(0)
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            self.uuid = pynvml.nvmlDeviceGetUUID(self._handle)
        except Exception as error:  # noqa: BLE001 - without NVML the pauses can be measured all the same
            self._handle = None
            self.uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
            print(f"NVML cannot be used ({error}): GPU memory is not looked at")

    def used_bytes(self) -> int | None:
        """Return the memory in use on the GPU, by all processes."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used) if self._handle else None

    def has_process(self, pid: int) -> bool | None:
        """Return whether the driver counts a process among those that compute on the GPU."""
        if not self._handle:
            return None
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return any(process.pid == pid for process in processes)


class Job:
    """One job in a temporary folder, resized by publishing slots files."""

    def __init__(self, root: Path, gpu: Gpu) -> None:
        from horowatt.elastic.folder import JobFolder
        from horowatt.records import BatchRule, LauncherKind, LaunchSpec

        self.work = root / "work"
        self.work.mkdir()
        self.folder = JobFolder(root / "job")
        self.folder.root.mkdir(mode=0o700)
        self._gpu = gpu
        self._generation = 0
        self._spec = LaunchSpec(
            job_id="gpu-bench",
            name="gpu-bench",
            tenant="t",
            uid=os.getuid(),
            gid=os.getgid(),
            username="u",
            launcher=LauncherKind.HOROWATT,
            command=(sys.executable, str(TRAIN)),
            environment={
                name: os.environ[name]
                for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "PATH", "HOROVOD_LOG_LEVEL")
                if name in os.environ
            }
            | {"OMP_NUM_THREADS": "1"},
            working_dir=str(self.work),
            virtual_env=None,
            min_width=1,
            max_width=2,
            batch_rule=BatchRule.PER_WORKER,
            batch_size=None,
        )
        self._launcher: subprocess.Popen[bytes] | None = None

    def publish(self, *lease_ids: str) -> float:
        """Grant these leases, all on the one GPU; return the time of it, Unix seconds."""
        from horowatt.elastic.hostfile import publish
        from horowatt.records import Lease, SlotsFile

        self._generation += 1
        leases = tuple(
            Lease(
                lease_id=lease_id,
                job_id="gpu-bench",
                node="n",
                address="127.0.0.1",
                gpu_uuid=self._gpu.uuid or f"CPU-{lease_id}",
                gpu_type="t",
                slot_index=index,
                simulated=False,
            )
            for index, lease_id in enumerate(lease_ids)
        )
        now_s = time.time()
        slots = SlotsFile(
            job_id="gpu-bench",
            generation=self._generation,
            uid=os.getuid(),
            leases=leases,
            published_at_s=now_s,
        )
        publish(self.folder, self._spec, slots, os.getuid(), os.getgid())
        return now_s

    def start(self) -> None:
        """Start the launcher, which starts the workers."""
        self._launcher = subprocess.Popen(
            [sys.executable, "-m", "horowatt.elastic.launcher", str(self.folder.root)],
            stdin=subprocess.DEVNULL,
        )

    def events(self, kind: str, since_s: float) -> list[dict[str, Any]]:
        """Return the events of a kind since a time."""
        try:
            lines = self.folder.events.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in lines]
        return [event for event in found if event["kind"] == kind and event["at_s"] >= since_s]

    def wait(self, what: str, true: Callable[[], bool]) -> None:
        """Wait until something holds.

        Raises:
            RuntimeError: When it never does, or the launcher ended; the message has the logs.
        """
        assert self._launcher is not None
        deadline_s = time.monotonic() + PATIENCE_S
        while not true():
            if time.monotonic() > deadline_s or self._launcher.poll() is not None:
                raise RuntimeError(f"{what} did not happen\n{self.story()}")
            time.sleep(0.02)

    def wait_resumed(self, lease_ids: Sequence[str], since_s: float) -> dict[str, dict[str, Any]]:
        """Wait until exactly these workers train in a world of their own; return how each resumed."""

        def resumed() -> dict[str, dict[str, Any]]:
            return {
                event["lease_id"]: event
                for event in self.events("resumed", since_s)
                if event["world_size"] == len(lease_ids)
            }

        self.wait(f"a world of {' '.join(lease_ids)}", lambda: set(resumed()) == set(lease_ids))
        return resumed()

    def pid(self, lease_id: str) -> int:
        """Return the process of a worker."""
        return int((self.work / f"pid-{lease_id}").read_text(encoding="ascii"))

    def held(self, lease_id: str) -> bool:
        """Return whether a process of a worker lives."""
        from horowatt.elastic.counters import is_held

        return is_held(self.folder.lease(lease_id).root / "lock")

    def finish(self) -> str:
        """End the training in order; return what the workers printed last."""
        assert self._launcher is not None
        (self.work / "stop").touch()
        self._launcher.wait(PATIENCE_S)
        status = json.loads(self.folder.launcher_json.read_text(encoding="utf-8"))
        if status["state"] != "finished":
            raise RuntimeError(f"the job did not finish\n{self.story()}")
        return (self.folder.lease("a").output_log).read_text(encoding="utf-8").strip().splitlines()[-1]

    def close(self) -> None:
        """End what still runs."""
        if self._launcher is not None and self._launcher.poll() is None:
            self._launcher.terminate()
            try:
                self._launcher.wait(60)
            except subprocess.TimeoutExpired:
                self._launcher.kill()
                self._launcher.wait()

    def story(self) -> str:
        """Return all logs."""
        logs = [self.folder.launcher_json, self.folder.launcher_log, self.folder.events]
        logs += sorted(self.folder.leases.glob("*/output.log"))
        return "\n".join(
            f"--- {log.name}\n{log.read_text(encoding='utf-8', errors='replace')}"
            for log in logs
            if log.exists()
        )


def _pause_s(resumed: dict[str, dict[str, Any]]) -> float:
    """Return for how long no worker trained: from the last step of the old world to the first of the new."""
    last_s = max(
        event["last_step_end_s"] for event in resumed.values() if event["last_step_end_s"] is not None
    )
    return float(min(event["first_step_end_s"] for event in resumed.values()) - last_s)


def measure(options: argparse.Namespace) -> int:
    """Run the job and print the figures."""
    import torch

    build = json.loads(os.environ[INNER])
    gpu = Gpu()
    on_gpu = torch.cuda.is_available()
    root = Path(tempfile.mkdtemp(prefix="gpu-resize-"))
    job = Job(root, gpu)
    out_s, in_s, decided_s, released_s = [], [], [], []
    joined_bytes, kept_bytes, still_listed = [], [], []
    try:
        job.publish("a")
        job.start()
        job.wait_resumed(["a"], 0.0)
        for number in range(options.rounds):
            lease = f"b{number}"
            before = gpu.used_bytes()
            since_s = job.publish("a", lease)
            resumed = job.wait_resumed(["a", lease], since_s)
            out_s.append(_pause_s(resumed))
            decided_s.append(max(event["first_step_end_s"] for event in resumed.values()) - since_s)
            during, pid = gpu.used_bytes(), job.pid(lease)
            since_s = job.publish("a")
            in_s.append(_pause_s(job.wait_resumed(["a"], since_s)))
            job.wait(f"the end of {lease}", lambda lease=lease: not job.held(lease))  # type: ignore[misc]
            released_s.append(time.time() - since_s)
            if before is not None and during is not None:
                after, listed = gpu.used_bytes() or 0, gpu.has_process(pid)
                joined_bytes.append(during - before)
                kept_bytes.append(after - before)
                still_listed.append(bool(listed))
            print(f"round {number + 1}: out {out_s[-1]:.3f} s, in {in_s[-1]:.3f} s", flush=True)
        last_line = job.finish()
    finally:
        job.close()
        if options.keep:
            print(f"logs: {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)
    freed = all(kept <= FREED_TOLERANCE_BYTES for kept in kept_bytes) and not any(still_listed)
    figures: dict[str, Any] = {
        "device": gpu.name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processors": len(os.sched_getaffinity(0)),
        "build_s": build["build_s"],
        "rounds": options.rounds,
        "scale_out_pause_s": statistics.median(out_s),
        "scale_out_pauses_s": out_s,
        "scale_in_pause_s": statistics.median(in_s),
        "scale_in_pauses_s": in_s,
        "decision_to_first_step_s": statistics.median(decided_s),
        "slot_released_after_s": statistics.median(released_s),
        "gpu_memory_of_newcomer_bytes": joined_bytes or None,
        "gpu_memory_left_behind_bytes": kept_bytes or None,
        "gpu_memory_freed": freed if kept_bytes else None,
        "last_line": last_line,
    }
    rows = [
        ("device", figures["device"]),
        ("Python, torch, processors", f"{figures['python']}, {figures['torch']}, {figures['processors']}"),
        ("build of Horovod", f"{build['build_s']:.0f} s" if build["build_s"] else "was in the cache"),
        ("pause 1 to 2, median", f"{figures['scale_out_pause_s']:.3f} s"),
        ("pause 2 to 1, median", f"{figures['scale_in_pause_s']:.3f} s"),
        ("grant to first step of the wider world", f"{figures['decision_to_first_step_s']:.2f} s"),
        ("withdrawal to free slot", f"{figures['slot_released_after_s']:.2f} s"),
        (
            "GPU memory of the worker that left",
            f"{'free' if freed else 'NOT FREE'}: {max(kept_bytes) / 1e6:+.0f} MB left of "
            f"{min(joined_bytes) / 1e6:.0f} MB"
            if kept_bytes
            else "not measured: no GPU, or no NVML",
        ),
        ("end of the job", last_line),
    ]
    for name, measured in rows:
        print(f"{name:<40} {measured}")
    if not on_gpu:
        print("This machine has no GPU that torch can use: the job ran on the CPU.")
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if freed or not kept_bytes else 1


if __name__ == "__main__":
    sys.exit(main())
