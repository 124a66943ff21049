# SPDX-License-Identifier: Apache-2.0
"""The start of a worker runs a script just as the interpreter would."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from horowatt.elastic.counters import is_held, read_counters
from horowatt.elastic.folder import JobFolder
from horowatt.elastic.hostfile import publish
from horowatt.records import BatchRule, LauncherKind, LaunchSpec, Lease, SlotsFile

PROBE = """
import json, sys
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "file": __file__, "name": __name__, "package": __package__,
    "spec": __spec__ and __spec__.name, "main": sys.modules["__main__"].__dict__ is globals(),
    "flags": list(sys.flags), "cached": globals().get("__cached__"), "doc": __doc__,
}))
"""


def _run(
    command: list[str | Path], cwd: Path, *, start: bool = True, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    prefix: list[str | Path] = []
    if start:
        flags = [str(word) for word in command[1:] if str(word) in ("-u", "-B", "-O")]
        prefix = [sys.executable, *flags, "-m", "horowatt.elastic.start", *options, "--"]
    return subprocess.run(
        [*prefix, *command], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


def _same(command: list[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command by the interpreter and by the start, and return the second after comparing them."""
    plain, started = _run(command, cwd, start=False), _run(command, cwd)
    assert started.returncode == plain.returncode
    assert started.stdout == plain.stdout
    assert started.stderr.replace("<frozen runpy>", "") == plain.stderr.replace("<frozen runpy>", "")
    return started


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize("name", ["t.py", "sub/t.py", "with space.py", "quote'\"$(x);.py", "no_suffix"])
def test_a_script_sees_what_the_interpreter_shows_it(name: str, tmp_path: Path) -> None:
    """Arguments, search path, file name, module attributes and flags are the same, for any name."""
    _script(tmp_path / name, PROBE)
    started = _same([sys.executable, "-u", "-B", name, "a b", "$(c)", ";", "--", "-m"], tmp_path)
    assert json.loads(started.stdout)["argv"] == [name, "a b", "$(c)", ";", "--", "-m"]


def test_a_link_to_a_script_is_found_like_the_interpreter_finds_it(tmp_path: Path) -> None:
    """The search path begins with the folder of the real script, the file name is that of the link."""
    _script(tmp_path / "real" / "t.py", PROBE)
    (tmp_path / "link.py").symlink_to("real/t.py")
    _same([sys.executable, "link.py"], tmp_path)


def test_a_module_sees_what_the_interpreter_shows_it(tmp_path: Path) -> None:
    """``python -m`` works for modules and packages, with relative imports."""
    _script(tmp_path / "pack" / "__init__.py", "")
    _script(tmp_path / "pack" / "other.py", "VALUE = 7")
    _script(tmp_path / "pack" / "__main__.py", "from .other import VALUE\nprint(VALUE)" + PROBE)
    _script(tmp_path / "mod.py", PROBE)
    for target in ("mod", "pack"):
        started = _run([sys.executable, "-m", target, "x"], tmp_path)
        plain = _run([sys.executable, "-m", target, "x"], tmp_path, start=False)
        assert started.stdout.replace(str(tmp_path), "") == plain.stdout.replace(str(tmp_path), "")


@pytest.mark.parametrize(
    "body",
    [
        "pass",
        "import sys; sys.exit()",
        "import sys; sys.exit(7)",
        "import sys; sys.exit('sorry')",
        "raise SystemExit(3)",
        "raise KeyboardInterrupt",
        "def f():\n    return 1 / 0\nf()",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('x') from error",
        "import os; os._exit(9)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import atexit; atexit.register(print, 'bye'); print('out')",
        "import threading; threading.Timer(0.1, print, ['late']).start()",
        "assert __name__ == '__main__'",
    ],
)
def test_a_script_ends_as_under_the_interpreter(body: str, tmp_path: Path) -> None:
    """Exit code, output and traceback are the same, without a line of Horowatt in it."""
    _script(tmp_path / "t.py", body)
    _same([sys.executable, "t.py"], tmp_path)


def test_classes_of_the_script_can_be_pickled_by_other_processes(tmp_path: Path) -> None:
    """``__main__`` is the script, also for processes that multiprocessing spawns."""
    _script(
        tmp_path / "t.py",
        """
        import multiprocessing
        def square(number):
            return number * number
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [3]))
        """,
    )
    assert _same([sys.executable, "t.py"], tmp_path).stdout == "[9]\n"


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    """A script or module that is not there is told in one clear error, exit code 127."""
    done = _run(["python", "absent.py"], tmp_path)
    assert done.returncode == 127
    assert "error[HW-JOB-001]" in done.stderr
    assert "absent.py" in done.stderr
    assert "Traceback" not in done.stderr
    done = _run(["python", "-m", "no_such_module.x"], tmp_path)
    assert (done.returncode, "error[HW-JOB-001]" in done.stderr) == (127, True)
    done = _run(["no-such-program"], tmp_path)
    assert (done.returncode, "error[HW-JOB-001]" in done.stderr) == (127, True)


@pytest.mark.parametrize("content", [b"#!/bin/sh\necho hi there\n", b"\x7fELF\x00\x01\x02", b"x = '\xff'\n"])
def test_what_is_not_python_is_named(content: bytes, tmp_path: Path) -> None:
    """A shell script or a binary given to python is told in one clear error, exit code 126."""
    (tmp_path / "t.py").write_bytes(content)
    done = _run(["python", "t.py"], tmp_path)
    assert done.returncode == 126
    assert "error[HW-JOB-002]" in done.stderr


def test_other_programs_are_run_as_they_are(tmp_path: Path) -> None:
    """A command that is not Python replaces the worker, with its words untouched by any shell."""
    done = _run(["printf", "%s|", "a b", "$(c)", ";'\""], tmp_path)
    assert (done.returncode, done.stdout) == (0, "a b|$(c)|;'\"|")


# ---------------------------------------------------------------------------------- with a lease


def _job(
    root: Path, launcher: LauncherKind = LauncherKind.HOROWATT, gpus: tuple[str, ...] = ("GPU-0", "GPU-1")
) -> JobFolder:
    root.mkdir(exist_ok=True)
    folder = JobFolder(root)
    uid, gid = os.getuid(), os.getgid()
    leases = tuple(
        Lease(
            lease_id=f"l{index}",
            job_id="j",
            node="n",
            address="127.0.0.1",
            gpu_uuid=gpu,
            gpu_type="t",
            slot_index=index,
            simulated=False,
        )
        for index, gpu in enumerate(gpus)
    )
    spec = LaunchSpec(
        job_id="j",
        name="j",
        tenant="t",
        uid=uid,
        gid=gid,
        username="u",
        launcher=launcher,
        command=("python", "t.py"),
        environment={},
        working_dir="/",
        virtual_env=None,
        min_width=1,
        max_width=4,
        batch_rule=BatchRule.PER_WORKER,
        batch_size=None,
    )
    publish(
        folder,
        spec,
        SlotsFile(job_id="j", generation=1, uid=uid, leases=leases, published_at_s=0.0),
        uid,
        gid,
    )
    return folder


def _with_lease(root: Path, lease_id: str) -> tuple[str, ...]:
    return ("--job-dir", str(root), "--lease", lease_id)


VISIBLE = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['NVIDIA_VISIBLE_DEVICES'])"


def test_a_worker_sees_its_own_gpu_only(tmp_path: Path) -> None:
    """Whatever the environment said before, the lease's GPU alone is visible, by UUID."""
    _job(tmp_path / "job")
    _script(tmp_path / "t.py", VISIBLE)
    done = _run(["python", "t.py"], tmp_path, options=_with_lease(tmp_path / "job", "l1"))
    assert done.stdout == "GPU-1 GPU-1\n", done.stderr


def test_an_attached_worker_sees_the_gpus_up_to_its_local_rank(tmp_path: Path) -> None:
    """``torch.cuda.set_device(hvd.local_rank())`` of the script must find its GPU."""
    _job(tmp_path / "job", LauncherKind.ATTACHED, ("GPU-a", "GPU-b", "GPU-c"))
    _script(tmp_path / "t.py", VISIBLE)
    done = _run(["python", "t.py"], tmp_path, options=_with_lease(tmp_path / "job", "l1"))
    assert done.stdout == "GPU-a,GPU-b GPU-a,GPU-b\n", done.stderr


def test_a_worker_of_a_cpu_slot_sees_no_gpu(tmp_path: Path) -> None:
    """A CPU slot does not open the node's GPUs."""
    _job(tmp_path / "job", gpus=("CPU-n-0",))
    _script(tmp_path / "t.py", VISIBLE)
    done = _run(["python", "t.py"], tmp_path, options=_with_lease(tmp_path / "job", "l0"))
    assert done.stdout == " none\n", done.stderr


def test_the_lock_is_held_until_the_last_child_is_gone(tmp_path: Path) -> None:
    """A lease is not free while a forked child of its worker lives, even when the worker has ended."""
    folder = _job(tmp_path / "job").lease("l0")
    _script(
        tmp_path / "t.py",
        """
        import os, sys
        if os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
        """,
    )
    argv = [sys.executable, "-m", "horowatt.elastic.start", *_with_lease(tmp_path / "job", "l0"), "--"]
    with subprocess.Popen([*argv, "python", "t.py"], cwd=tmp_path, stdin=subprocess.PIPE) as worker:
        worker.wait(timeout=60)
        assert is_held(folder.lock)
        assert worker.stdin is not None
        worker.stdin.close()
        deadline_s = time.monotonic() + 30
        while is_held(folder.lock) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not is_held(folder.lock)


def test_two_workers_never_share_a_lease(tmp_path: Path) -> None:
    """While one worker holds the lease, a second one does not run its script."""
    folder = _job(tmp_path / "job").lease("l0")
    _script(tmp_path / "t.py", "print('ran', flush=True); input()")
    argv = [sys.executable, "-m", "horowatt.elastic.start", *_with_lease(tmp_path / "job", "l0"), "--"]
    command = [*argv, "python", "t.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"ran\n"
        second = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
        )
        assert (second.returncode, second.stdout) == (125, "")
        assert "error[HW-JOB-014]" in second.stderr
        assert is_held(folder.lock)
        first.communicate(b"\n")


def test_a_lease_that_was_taken_back_is_not_used(tmp_path: Path) -> None:
    """A worker that starts too late for its lease runs nothing, so the next owner is alone."""
    _job(tmp_path / "job")
    _job(tmp_path / "job", gpus=("GPU-0",))
    _script(tmp_path / "t.py", "print('ran')")
    done = _run(["python", "t.py"], tmp_path, options=_with_lease(tmp_path / "job", "l1"))
    assert (done.returncode, done.stdout) == (125, "")
    assert "error[HW-JOB-009]" in done.stderr


def test_a_worker_dies_with_its_parent(tmp_path: Path) -> None:
    """A worker whose launcher is killed outright does not outlive it."""
    folder = _job(tmp_path / "job").lease("l0")
    _script(tmp_path / "t.py", "import time; print('up', flush=True); time.sleep(300)")
    options = [*_with_lease(tmp_path / "job", "l0"), "--parent"]
    parent = (
        "import os, subprocess, sys; subprocess.run([sys.executable, '-m', 'horowatt.elastic.start', "
        "*sys.argv[1:], str(os.getpid()), '--', 'python', 't.py'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent, *options], cwd=tmp_path, stdout=subprocess.PIPE
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"up\n"
        counters = read_counters(folder.counters, os.getuid())
        assert counters is not None
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        deadline_s = time.monotonic() + 30
        while is_held(folder.lock) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not is_held(folder.lock)
        stat = Path(f"/proc/{counters.pid}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def test_other_frameworks_are_marked_as_not_measurable(tmp_path: Path) -> None:
    """Zero steps of a program that is not Python are not taken for no training."""
    folder = _job(tmp_path / "job").lease("l0")
    _run(["true"], tmp_path, options=_with_lease(tmp_path / "job", "l0"))
    counters = read_counters(folder.counters, os.getuid())
    assert counters is not None
    assert not counters.measurable
