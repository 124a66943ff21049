# SPDX-License-Identifier: Apache-2.0
"""Priorities of standbys, in real processes of an ordinary user."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRY = """
import os, resource, sys, threading, time
from pathlib import Path
# First, because the interpreter may lie in a folder that the other user cannot enter.
import encodings.ascii
from horowatt.elastic import priority
resource.setrlimit(resource.RLIMIT_NICE, (int(sys.argv[1]), int(sys.argv[1])))
os.setgid(65534)
os.setuid(65534)

def seen():
    group = Path("/proc/self/autogroup")
    nice = sorted({os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir("/proc/self/task")})
    return nice, group.read_text().split()[-1] if group.exists() else None

stop = threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()
back = priority.step_back()
low = seen()
threading.Thread(target=stop.wait, daemon=True).start()
priority.step_forward()
deadline = time.monotonic() + 20
while (normal := seen()) and normal[1] not in (None, "0") and time.monotonic() < deadline:
    time.sleep(0.05)
print(back, low[0], normal[0], normal[1] in (None, "0"))
"""


def attempt(limit: int) -> str:
    runtime = Path(__file__).resolve().parents[2] / "runtime"
    return subprocess.run(
        [sys.executable, "-c", TRY, str(limit)],
        env={**os.environ, "PYTHONPATH": str(runtime)},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
        start_new_session=True,
    ).stdout.strip()


@pytest.mark.root
def test_a_user_who_could_not_come_back_stays() -> None:
    """An ordinary user may lower its priority but not raise it again, so it does neither."""
    assert attempt(0) == "False [0] [0] True"


@pytest.mark.root
def test_a_user_who_may_come_back_does_with_all_threads() -> None:
    """With the limit that the agent gives launchers, every thread steps back and forward."""
    try:
        assert attempt(20) == "True [5] [0] True"
    except subprocess.CalledProcessError as error:
        if "raise maximum limit" in error.stderr:
            pytest.skip("raising RLIMIT_NICE needs CAP_SYS_RESOURCE, which this root has not")
        raise
