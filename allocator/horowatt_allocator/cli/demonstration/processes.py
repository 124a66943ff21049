# SPDX-License-Identifier: Apache-2.0
"""The demo's processes, down to the last grandchild, and their end.

The demo makes itself the reaper of its descendants: a process whose parent ended becomes its child
instead of ``init``'s. So everything that came from the demo can be found by walking from it, and
nothing else ever is. In return it must collect those that end.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_STEP_S = 0.1
TERM_GRACE_S = 15.0
KILL_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """A line of the kernel's process table."""

    pid: int
    parent: int
    zombie: bool


def become_subreaper() -> None:
    """Adopt descendants whose parents end. Without it (old kernels) they go to init unseen."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def read_table() -> list[ProcessEntry]:
    """Return the processes that can be seen now."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text(errors="replace")
        except OSError:
            continue
        # The name is in parentheses and may hold any character, so count from the last one.
        state, parent = text[text.rindex(")") + 2 :].split()[:2]
        found.append(ProcessEntry(int(entry.name), int(parent), state in {"Z", "X"}))
    return found


def descendants(root: int, table: Sequence[ProcessEntry]) -> list[int]:
    """Return the living descendants of a process, parents before children."""
    children: dict[int, list[ProcessEntry]] = {}
    for entry in table:
        children.setdefault(entry.parent, []).append(entry)
    found: list[int] = []
    queue = [root]
    while queue:
        for entry in children.get(queue.pop(0), []):
            queue.append(entry.pid)
            if not entry.zombie:
                found.append(entry.pid)
    return found


@dataclass(slots=True)
class Household:
    """All that the demo started and has to end."""

    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    logs: dict[str, Path] = field(default_factory=dict)

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        niceness: int = 0,
        folder: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own, so that Ctrl-C reaches only the demo.

        Args:
            niceness: Added to the priority of the demo; higher yields more.
        """
        command = ["nice", "-n", str(niceness), *arguments] if niceness else list(arguments)
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=None if environment is None else dict(environment),
                cwd=folder,
                start_new_session=True,
            )
        self.processes[name] = process
        self.logs[name] = log
        return process

    def reap_strays(self) -> None:
        """Collect ended processes that the demo adopted."""
        own = set()
        for process in self.processes.values():
            process.poll()
            own.add(process.pid)
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in own:
                return
            os.waitpid(ended.si_pid, 0)

    def tail(self, name: str, num_lines: int = 15) -> str:
        """Return the end of a process's log."""
        try:
            lines = self.logs[name].read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-num_lines:])

    def terminate(self, name: str, grace_s: float = TERM_GRACE_S) -> None:
        """Ask one process to end and wait for it."""
        process = self.processes.get(name)
        if process is None or process.poll() is not None:
            return
        process.terminate()
        self._until(lambda: process.poll() is not None, grace_s)

    def remaining(self) -> list[int]:
        """Return the living processes that came from the demo."""
        self.reap_strays()
        return descendants(os.getpid(), read_table())

    def end_all(self) -> list[int]:
        """End whatever is left, politely first; return the processes that outlived even that."""
        for number, grace_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, KILL_GRACE_S)):
            if not self.remaining():
                return []
            for pid in self.remaining():
                try:
                    os.kill(pid, number)
                except (ProcessLookupError, PermissionError):
                    continue
            self._until(lambda: not self.remaining(), grace_s)
        return self.remaining()

    def _until(self, done: Callable[[], bool], grace_s: float) -> bool:
        end = time.monotonic() + grace_s
        while not done():
            if time.monotonic() > end:
                return False
            time.sleep(_STEP_S)
            self.reap_strays()
        return True
