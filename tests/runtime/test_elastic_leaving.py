# SPDX-License-Identifier: Apache-2.0
"""Callbacks of a worker that leaves: real processes, real signals."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

SETUP = """
import atexit, os, signal, sys, time
from horowatt.elastic import leaving
from horowatt.elastic.leaving import on_leave
def say(text):
    print(text, flush=True)
"""
Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run() -> Iterator[Run]:
    started: list[subprocess.Popen[str]] = []

    def start(body: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", SETUP + body],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def after_sigterm(process: "subprocess.Popen[str]") -> tuple[int, list[str], str]:
    """Wait for the line "ready", send SIGTERM, and return exit code, further lines and errors."""
    assert process.stdout is not None
    lines = []
    while (line := process.stdout.readline().strip()) != "ready":
        assert line, process.communicate()
        lines.append(line)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    return process.returncode, lines + output.split("\n")[:-1], errors


def test_sigterm_runs_all_callbacks_once_in_order(run: Run) -> None:
    """One that fails or exits is printed and stops none; what was buffered arrives; the code is 143."""
    body = """
@on_leave
def first(): print("first")
on_leave(lambda: 1 / 0)
on_leave(lambda: sys.exit(3))
on_leave(lambda: os.kill(os.getpid(), signal.SIGTERM))
on_leave(lambda: print("last"))
say("ready")
try:
    time.sleep(60)
except BaseException:
    say("swallowed")
    time.sleep(60)
"""
    code, lines, errors = after_sigterm(run(body))
    assert (code, lines) == (143, ["first", "last"])
    assert "ZeroDivisionError" in errors
    assert "SystemExit: 3" in errors
    assert errors.count("a callback of on_leave failed") == 2


def test_without_callbacks_sigterm_is_what_it_was(run: Run) -> None:
    """A script that registered nothing is ended at once, also while it sits in a call into C."""
    code, lines, _ = after_sigterm(run("say('ready')\nimport ctypes\nctypes.CDLL(None).sleep(60)\n"))
    assert (code, lines) == (-signal.SIGTERM, [])


@pytest.mark.parametrize("first", [True, False])
def test_a_scripts_own_handler_is_left_alone(run: Run, *, first: bool) -> None:
    """Installed before the first callback or after it, the script's handler decides alone."""
    own = "signal.signal(signal.SIGTERM, lambda *_: (say('own'), os._exit(7)))\n"
    ours = "on_leave(lambda: say('ours'))\n"
    code, lines, _ = after_sigterm(
        run((own + ours if first else ours + own) + "say('ready')\ntime.sleep(60)\n")
    )
    assert (code, lines) == (7, ["own"])


@pytest.mark.parametrize(("how", "code"), [("leaving.run_callbacks(0)", 0), ("time.sleep(60)", 143)])
def test_callbacks_end_with_their_grace(run: Run, how: str, code: int) -> None:
    """A callback that hangs, even in C, costs the grace and not more; the exit stays orderly."""
    body = f"""
import ctypes
on_leave(lambda: say("one"))
on_leave(lambda: ctypes.PyDLL(None) and ctypes.CDLL(None).sleep(60))
on_leave(lambda: say("never"))
say("ready")
{how}
"""
    process = run(body, HOROWATT_RELEASE_GRACE_S="0.3")
    if code == 0:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        lines = output.split()[1:]
    else:
        found, lines, errors = after_sigterm(process)
        assert found == code
    assert lines == ["one"]
    assert "longer than 0.3 s" in errors


def test_a_forked_child_is_not_the_worker(run: Run) -> None:
    """Children of a worker (DataLoaders) die of SIGTERM as ever, and run none of its callbacks."""
    body = """
on_leave(lambda: say(f"left {os.getpid() == parent}"))
parent = os.getpid()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
os.kill(child, signal.SIGTERM)
say(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
say("ready")
time.sleep(60)
"""
    assert after_sigterm(run(body))[:2] == (143, ["-15", "left True"])


def test_a_standby_gives_nothing_back(run: Run) -> None:
    """Before it joins, a worker's callbacks do not run; after it, once, whoever asks."""
    body = """
leaving.stand_by()
on_leave(lambda: say("left"))
say(str(leaving.run_callbacks()))
leaving.join()
say(str(leaving.run_callbacks()))
say(str(leaving.run_callbacks()))
leaving._state.begun = False
leaving.stand_by()
say("ready")
time.sleep(60)
"""
    assert after_sigterm(run(body))[:2] == (143, ["False", "left", "True", "False"])


def test_only_what_can_be_called_is_taken(run: Run) -> None:
    """A mistake in the call shows where it was made, not at the end of the training."""
    process = run("on_leave(print('now'))\n")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "on_leave needs something to call, not NoneType" in errors
