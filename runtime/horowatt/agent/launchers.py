# SPDX-License-Identifier: Apache-2.0
"""The launcher of one job: started once per attempt, watched, judged when it dies wordless."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from horowatt.agent.book import JobMemory, Start
from horowatt.agent.folders import read_status, read_tail
from horowatt.agent.processes import (
    ProcessId,
    clean_environment,
    find_user,
    identify,
    is_alive,
    lock_holders,
    start_detached,
)
from horowatt.elastic.counters import is_held
from horowatt.elastic.folder import JobFolder
from horowatt.errors import NotAllowed
from horowatt.records import LauncherState, LauncherStatus

LAUNCHER_MODULE = "horowatt.elastic.launcher"
FINAL = frozenset({LauncherState.FINISHED, LauncherState.FAILED, LauncherState.LOST, LauncherState.STOPPED})
_BLIND_S = 30.0
"""Seconds that a start whose process is not known may take to appear; the agent died in it."""


class Launcher:
    """The launcher process of one job on this node.

    Args:
        environment: Variables of the agent that launchers need, such as those of simulated GPUs.
    """

    def __init__(self, folder: JobFolder, node: str, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._node = node
        self._environment = environment
        self._child: subprocess.Popen[bytes] | None = None

    def reap(self) -> None:
        """Take the exit code of a launcher that this agent started, if it has ended."""
        if self._child is not None:
            self._child.poll()

    def alive(self, start: Start | None, now_s: float) -> bool:
        """Tell whether a launcher lives, or may be about to appear."""
        # The process first: probing the lock takes it for an instant, in which a launcher that just
        # starts would not get it.
        if start is not None and start.process is not None and is_alive(start.process):
            return True
        if is_held(self._folder.launcher_lock):
            return True
        blind = start is not None and start.process is None and self._child is None
        # Before its start there is no now, unless the wall clock was set back since.
        return blind and start is not None and 0.0 <= now_s - start.at_s < _BLIND_S

    def processes(self, start: Start | None, uid: int) -> tuple[ProcessId, ...]:
        """Return the living launcher, as the agent remembers it or as the lock's holder."""
        if start is not None and start.process is not None and is_alive(start.process):
            return (start.process,)
        return lock_holders([self._folder.launcher_lock], uid)

    def said(self, uid: int, attempt: int) -> LauncherStatus | None:
        """Return what the launcher of this attempt last said about itself."""
        status = read_status(self._folder, uid)
        if status is None or status.attempt != attempt or status.job_id != self._folder.root.name:
            return None
        return status

    def start(self, memory: JobMemory) -> ProcessId | LauncherStatus:
        """Start the launcher; return its process, or the verdict when it cannot be started."""
        spec = memory.spec
        user = find_user(spec.uid, spec.gid, spec.username)
        program = Path(spec.virtual_env) / "bin" / "python" if spec.virtual_env else Path(sys.executable)
        arguments = [str(program), "-m", LAUNCHER_MODULE, str(self._folder.root.absolute())]
        arguments += ["--attempt", str(memory.attempt), "--node", self._node]
        try:
            child = start_detached(
                arguments,
                user=user,
                folder=self._folder.root,
                log=self._folder.launcher_log,
                environment=clean_environment(user, program, self._environment),
            )
        except (OSError, NotAllowed) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            return status_of(
                memory,
                LauncherState.FAILED,
                "HW-AGENT-004",
                f"the launcher cannot be started with {program} as {user.name} on {self._node}: {why}",
            )
        # The one before may have died since the last look.
        self.reap()
        self._child = child
        # A child that has died already has no start tick any more; with 0 it is simply not alive.
        return identify(child.pid) or ProcessId(pid=child.pid, start_ticks=0)

    def judge(self, memory: JobMemory) -> LauncherStatus:
        """Return the verdict on a launcher that died without a last word."""
        self.reap()
        spec, start = memory.spec, memory.start
        said = self.said(spec.uid, memory.attempt)
        exit_code = self._child.returncode if self._child is not None else None
        tail = read_tail(self._folder.launcher_log, spec.uid)
        ending = f"; its last lines:\n{tail}" if tail else ""
        pid = start.process.pid if start is not None and start.process is not None else 0
        if said is None and exit_code is not None and exit_code > 0:
            return status_of(
                memory,
                LauncherState.FAILED,
                "HW-AGENT-005",
                f"the launcher ended at once with exit code {exit_code}{ending}",
                exit_code=exit_code,
                pid=pid,
            )
        how = "" if exit_code is None else f" ({_describe(exit_code)})"
        return status_of(
            memory,
            LauncherState.LOST,
            "HW-JOB-006",
            f"the launcher died without saying why{how}{ending}",
            exit_code=exit_code,
            pid=pid,
            generation_applied=said.generation_applied if said else 0,
        )


def status_of(
    memory: JobMemory,
    state: LauncherState,
    code: str = "",
    message: str = "",
    *,
    exit_code: int | None = None,
    pid: int = 0,
    generation_applied: int = 0,
) -> LauncherStatus:
    """Return a status that the agent itself makes for the ordered attempt."""
    return LauncherStatus(
        job_id=memory.spec.job_id,
        attempt=memory.attempt,
        state=state,
        pid=pid,
        generation_applied=generation_applied,
        exit_code=exit_code,
        code=code,
        message=message,
        updated_at_s=time.time(),
    )


def refusal(memory: JobMemory, node: str) -> LauncherStatus | None:
    """Return why this agent cannot run processes of the job's user, or None when it can."""
    me = os.geteuid()
    if me in (0, memory.spec.uid):
        return None
    mine = find_user(me, os.getegid(), f"user {me}").name
    return status_of(
        memory,
        LauncherState.FAILED,
        "HW-AGENT-003",
        f"the agent on {node} runs as {mine} and cannot start jobs of {memory.spec.username}; "
        "run it as root for jobs of several users",
    )


def _describe(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
