# SPDX-License-Identifier: Apache-2.0
"""The demo on a terminal, left by Ctrl-C while its jobs train: nothing may be left behind."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from horowatt_allocator.cli.demonstration.processes import descendants, read_table

HOROWATT = [sys.executable, "-m", "horowatt_allocator.cli.main"]
TRAINING_TIMEOUT_S = 150.0


def workers_below(pid: int) -> list[int]:
    """Return the descendants of the demo that are workers of a job."""
    found = []
    for child in descendants(pid, read_table()):
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"horowatt.elastic.start" in words:
            found.append(child)
    return found


@pytest.mark.horovod
def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    """Ctrl-C, pressed twice while workers run, ends all of them, the agent and the service; exit code 130."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*HOROWATT, "demo", "--simulate", "--out", str(tmp_path / "out")],
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "160"}, cwd=Path(__file__).parents[2],
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    drawn, family, presses = "", set[int](), 0
    end = time.monotonic() + TRAINING_TIMEOUT_S
    while True:
        assert time.monotonic() < end, drawn[-3000:]
        if presses == 0 and workers_below(process.pid):
            family = set(descendants(process.pid, read_table()))
        if presses < 2 and family:
            process.send_signal(signal.SIGINT)
            presses += 1
            time.sleep(0.5)
        if select.select([leader], [], [], 0.2)[0]:
            try:
                drawn += os.read(leader, 65_536).decode(errors="replace")
            except OSError:  # the last writer has closed the terminal
                break
    os.close(leader)
    assert process.wait(30) == 130
    assert "no process is left behind" in drawn
    assert "Traceback" not in drawn
    assert re.search(r"vision +\S*running|\x1b\[1A", drawn), "the table was never redrawn"
    assert len(family) >= 4
    assert family & {entry.pid for entry in read_table() if not entry.zombie} == set()
    assert not [path for path in Path("/tmp").glob("horowatt-demo-*") if str(path) in drawn]
