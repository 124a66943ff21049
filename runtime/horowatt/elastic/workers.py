# SPDX-License-Identifier: Apache-2.0
"""The worker processes of one job: starting them here or by ssh, watching them, ending them.

Every worker leads a process group of its own, so it is ended with all that it started. No shell ever
sees a command, and no variable of the environment ever stands on a command line.
"""

import json
import logging
import os
import pwd
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from horowatt.elastic import control
from horowatt.elastic.command import find_interpreter, parse_python
from horowatt.elastic.counters import read_counters
from horowatt.elastic.folder import JobFolder, LeaseFolder
from horowatt.elastic.hostfile import checked_address
from horowatt.elastic.verdict import EXIT_NOT_JOINED, WorkerEnd
from horowatt.errors import NeedsOperator
from horowatt.files import write_atomic
from horowatt.records import LaunchSpec, Lease

DRIVER_GRACE_S = 5.0
"""From SIGTERM to SIGKILL for a worker that Horovod's driver no longer wants, seconds."""
HEARTBEAT_S = 5.0
"""How often a remote worker's helper hears that its launcher lives, seconds."""
TAIL_BYTES = 16_384
CONNECTION_LOST = -int(signal.SIGHUP)
"""Exit code of a worker whose ssh connection broke: it is hung up."""

_BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PASSED_ON = ("LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
_SSH = (
    "ssh",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=10",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=3",
)

_log = logging.getLogger(__name__)


class Command(Protocol):
    """What is run where."""

    @property
    def command(self) -> Sequence[str]:
        """Argument vector."""

    @property
    def working_dir(self) -> str:
        """Where it starts."""


class Event(Protocol):
    """What of ``threading.Event`` is used here."""

    def is_set(self) -> bool:
        """Return True once the event happened."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How the workers of a job are started.

    Attributes:
        argv: The interpreter with its options, ready for ``-m horowatt.elastic.start``.
        environment: Of every worker, without what Horovod adds for its slot.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]


def prepare_launch(spec: LaunchSpec) -> Launch:
    """Return how to start the workers of ``spec``.

    Raises:
        NeedsOperator: ``HW-JOB-003`` when the working directory or the interpreter is missing.
    """
    if not Path(spec.working_dir).is_dir():
        raise NeedsOperator(
            "HW-JOB-003",
            f"the working directory {spec.working_dir!r} does not exist on this node",
            hint="submit from a folder that every node has, or give one with --working-dir",
            fields={"working_dir": spec.working_dir},
        )
    environment = _environment(spec)
    command = parse_python(spec.command)
    options: tuple[str, ...] = ()
    if command is None:
        interpreter: str | None = str(Path(spec.virtual_env) / "bin" / "python") if spec.virtual_env else None
        interpreter = interpreter or sys.executable
    else:
        interpreter = find_interpreter(command, spec.virtual_env, spec.environment, spec.working_dir)
        options = command.options
    if interpreter is None or not os.access(interpreter, os.X_OK):
        raise NeedsOperator(
            "HW-JOB-003",
            f"the Python interpreter of this job, {interpreter or spec.command[0]!r}, cannot be run",
            because="it does not exist or is not executable on this node",
            hint="name an existing virtual environment with Horowatt and Horovod in it (--venv)",
            fields={"virtual_env": spec.virtual_env or ""},
        )
    return Launch((interpreter, *options), environment)


def _environment(spec: LaunchSpec) -> dict[str, str]:
    """Return a small clean base, what the submitter asked for, and Horowatt's own variables."""
    user = pwd.getpwuid(os.getuid())
    environment = {
        "HOME": user.pw_dir,
        "USER": user.pw_name,
        "LOGNAME": user.pw_name,
        "SHELL": user.pw_shell,
        "PATH": _BASE_PATH,
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
    }
    environment |= {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    environment |= spec.environment
    if spec.virtual_env is not None:
        environment["VIRTUAL_ENV"] = spec.virtual_env
        environment["PATH"] = f"{spec.virtual_env}/bin:{environment['PATH']}"
    environment |= {name: value for name, value in os.environ.items() if name.startswith("HOROWATT_")}
    environment["HOROWATT_JOB_ID"] = spec.job_id
    return environment


@dataclass
class Worker:
    """One worker, from its start to after its end.

    Attributes:
        waiting: True for a standby until it is told to join.
        ready: True once a standby has nothing left to do but wait.
        about: Versions of what it runs with, by name, once it has told.
    """

    lease: Lease
    folder: LeaseFolder
    process: subprocess.Popen[bytes]
    events: Sequence[Event]
    remote: bool
    log_offset: int
    started_s: float
    exit_code: int | None = None
    ended_s: float = 0.0
    ended_by_launcher: bool = False
    killed: bool = False
    kill_at_s: float | None = None
    waiting: bool = False
    ready: bool = False
    about: Mapping[str, str] = field(default_factory=dict)
    channel: control.Channel | None = None
    done: threading.Event = field(default_factory=threading.Event)
    remote_end: Mapping[str, object] = field(default_factory=dict)
    pipe_lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def alive(self) -> bool:
        """True until its exit code is known."""
        return self.exit_code is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the worker."""
        self.ended_by_launcher = True
        if self.remote:
            self.tell(number.name)
            return
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return

    def say(self, message: control.Message) -> bool:
        """Send a message to the worker; False when it is known to be gone."""
        if self.remote:
            return self.tell(f"> {control.encode_line(message).decode().rstrip()}")
        return self.channel is not None and self.channel.say(message)

    def tell(self, line: str) -> bool:
        """Send one line to the helper on the worker's node; False when that is known to be gone."""
        pipe = self.process.stdin
        if pipe is None:
            return False
        try:
            with self.pipe_lock:
                pipe.write(f"{line}\n".encode())
                pipe.flush()
        except (OSError, ValueError):
            return False
        return True


class Workers:
    """All workers of one job. Horovod's threads start them; the launcher's main thread watches them."""

    def __init__(
        self,
        job: JobFolder,
        launch: Launch,
        spec: LaunchSpec,
        node: str,
        on_exit: Callable[[Worker], None],
        on_message: Callable[[Worker, control.Message], None] = lambda _worker, _message: None,
    ) -> None:
        self._job = job
        self._launch = launch
        self._spec = spec
        self._node = node
        self._on_exit = on_exit
        self._on_message = on_message
        self._lock = threading.Lock()
        self._workers: dict[str, Worker] = {}
        self._closed = False

    def run(self, lease: Lease, horovod_env: Mapping[str, str], events: Sequence[Event]) -> int:
        """Have the lease's standby join, or else start a worker; return its exit code when it has ended."""
        with self._lock:
            known = self._workers.get(lease.lease_id)
        if known is not None and known.waiting:
            # Also one that has died since it was ready: a second process in its lease would fare no better.
            known.events = events
            known.waiting = False
            known.say({"do": "join", "environment": dict(horovod_env)})
            worker = known
        else:
            worker = self._launch_worker(lease, horovod_env, events, standby=False)
        worker.done.wait()
        return worker.exit_code if worker.exit_code is not None else -int(signal.SIGTERM)

    def start_standby(self, lease: Lease, environment: Mapping[str, str]) -> Worker:
        """Start a worker that runs the script up to ``hvd.elastic.run`` and waits there.

        Raises:
            OSError, NeedsOperator: when it cannot be started.
        """
        return self._launch_worker(lease, environment, (), standby=True)

    def _launch_worker(
        self, lease: Lease, horovod_env: Mapping[str, str], events: Sequence[Event], *, standby: bool
    ) -> Worker:
        """Start a worker in a thread of its own, which lasts as long: the kernel ends the worker with it."""
        started: queue.SimpleQueue[Worker | BaseException] = queue.SimpleQueue()

        def supervise() -> None:
            try:
                with self._lock:
                    if self._closed:
                        raise InterruptedError("the job ends")
                    worker = self._start(lease, horovod_env, events, standby=standby)
                    self._workers[lease.lease_id] = worker
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                started.put(error)
                return
            started.put(worker)
            self._supervise(worker)

        threading.Thread(target=supervise, name=f"worker-{lease.lease_id}", daemon=True).start()
        outcome = started.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _supervise(self, worker: Worker) -> None:
        exit_code = self._wait_remote(worker) if worker.remote else wait_for_group(worker.process)
        if worker.waiting and exit_code == 0:
            # The lease's slot was granted to somebody who never came.
            exit_code = EXIT_NOT_JOINED
        if not worker.remote:
            write_atomic(worker.folder.exit_json, json.dumps({"exit_code": exit_code}).encode())
            if worker.channel is not None:
                worker.channel.close()
        worker.ended_s = time.time()
        worker.exit_code = exit_code
        self._on_exit(worker)
        worker.done.set()

    def _start(
        self, lease: Lease, horovod_env: Mapping[str, str], events: Sequence[Event], *, standby: bool
    ) -> Worker:
        folder = self._job.lease(lease.lease_id)
        environment = {**self._launch.environment, "HOROWATT_LEASE_ID": lease.lease_id, **horovod_env}
        remote = lease.node != self._node
        argv = [
            *self._launch.argv,
            *("-m", "horowatt.elastic.start"),
            *("--job-dir", str(self._job.root), "--lease", lease.lease_id),
            *(("--standby",) if standby else ()),
        ]
        if remote:
            process, offset, channel = self._start_remote(lease, argv, environment), 0, None
        else:
            process, offset, channel = start_here(
                folder, [*argv, "--parent", str(os.getpid())], self._spec, environment
            )
        _log.info(
            "started %s %s, process %d%s",
            "standby" if standby else "worker",
            lease.lease_id,
            process.pid,
            " (ssh)" if remote else "",
        )
        worker = Worker(
            lease, folder, process, events, remote, offset, time.time(), waiting=standby, channel=channel
        )
        if channel is not None:
            channel.listen(lambda line: self._hear(worker, line))
        return worker

    def _hear(self, worker: Worker, line: bytes) -> None:
        message = control.decode_line(line)
        if message is None:
            return
        if message.get("ready") is True:
            worker.ready = True
        about = message.get("about")
        if isinstance(about, dict):
            worker.about = {str(name): str(version) for name, version in about.items()}
        self._on_message(worker, message)

    def _start_remote(
        self, lease: Lease, argv: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        # ssh joins its words for the other side's shell, so only words that no shell changes may follow.
        helper = (self._launch.argv[0], "-m", "horowatt.elastic.remote")
        if any(not set(word) <= _PLAIN for word in helper):
            raise NeedsOperator(
                "HW-JOB-003",
                f"the interpreter {helper[0]!r} cannot be started on another node",
                because="ssh would pass its path through a shell, and it has characters with a meaning there",
                hint="use a virtual environment in a folder without spaces or special characters",
            )
        process = subprocess.Popen(
            [*_SSH, checked_address(lease.address), *helper],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            start_new_session=True,
        )
        document = {
            "job_dir": str(self._job.root),
            "lease_id": lease.lease_id,
            "argv": list(argv),
            "command": list(self._spec.command),
            "environment": dict(environment),
            "working_dir": self._spec.working_dir,
        }
        assert process.stdin is not None  # noqa: S101 - it was asked for
        try:
            process.stdin.write(json.dumps(document).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            _log.warning("ssh to %s ended at once", lease.address)
        return process

    def _wait_remote(self, worker: Worker) -> int:
        """Keep the helper informed that the launcher lives, and return what it says about its worker."""
        stdout: IO[bytes] | None = worker.process.stdout
        assert stdout is not None  # noqa: S101 - it was asked for
        answer: list[bytes] = []

        def read() -> None:
            for line in stdout:
                if line.startswith(b"< "):
                    self._hear(worker, line[2:])
                else:
                    answer[:] = [line]

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        while True:
            reader.join(HEARTBEAT_S)
            if not reader.is_alive():
                break
            worker.tell("alive")
        worker.process.wait()
        if worker.process.stdin is not None:
            try:
                worker.process.stdin.close()
            except OSError:
                _log.debug("the pipe to ssh was closed already")
        return self._remote_exit_code(worker, answer[0] if answer else b"")

    @staticmethod
    def _remote_exit_code(worker: Worker, answer: bytes) -> int:
        try:
            end = json.loads(answer.splitlines()[-1])
            worker.remote_end = end if isinstance(end, dict) else {}
            return int(end["exit_code"])
        except (IndexError, KeyError, TypeError, ValueError):
            _log.warning(
                "the connection to worker %s on %s broke (ssh exit code %d)",
                worker.lease.lease_id,
                worker.lease.address,
                worker.process.returncode,
            )
            return CONNECTION_LOST

    # ------------------------------------------------------------------------------- watching

    def all(self) -> list[Worker]:
        """Return every worker ever started, the latest of each lease."""
        with self._lock:
            return list(self._workers.values())

    def alive(self) -> list[Worker]:
        """Return the workers that have not ended."""
        return [worker for worker in self.all() if worker.alive]

    def training(self) -> list[Worker]:
        """Return the workers that have not ended and are no standbys."""
        return [worker for worker in self.alive() if not worker.waiting]

    def standbys(self) -> list[Worker]:
        """Return the standbys that have not ended."""
        return [worker for worker in self.alive() if worker.waiting]

    def require_alike(self, worker: Worker) -> None:
        """Refuse a worker that runs with other versions than those that train.

        Raises:
            NeedsOperator: ``HW-JOB-018``.
        """
        for other in self.training():
            if other is worker or not other.about or not worker.about:
                continue
            differing = [name for name, version in worker.about.items() if other.about.get(name) != version]
            if differing:
                name = differing[0]
                raise NeedsOperator(
                    "HW-JOB-018",
                    f"the Python environments of this job's workers differ: {name} is {worker.about[name]} "
                    f"on {worker.lease.node} and {other.about.get(name)} on {other.lease.node}",
                    because="workers of different versions may not understand each other",
                    hint="make the environments equal, or have all nodes use one on shared storage",
                )

    def watch(self, now_s: float) -> None:
        """Carry out what is due: ends that Horovod's driver asks for, and kills after a grace period."""
        for worker in self.alive():
            if worker.kill_at_s is None and any(event.is_set() for event in worker.events):
                self.end(worker, now_s, DRIVER_GRACE_S)
            elif worker.kill_at_s is not None and now_s >= worker.kill_at_s and not worker.killed:
                worker.killed = True
                worker.signal(signal.SIGKILL)

    def end(self, worker: Worker, now_s: float, grace_s: float) -> None:
        """Ask a worker to end, and have ``watch`` kill it after ``grace_s`` seconds; may be repeated."""
        if worker.alive and worker.kill_at_s is None:
            worker.kill_at_s = now_s + grace_s
            worker.signal(signal.SIGTERM)

    def close(self) -> None:
        """Start no more workers."""
        with self._lock:
            self._closed = True

    def describe_end(self, worker: Worker, *, in_last_world: bool) -> WorkerEnd:
        """Return how an ended worker ended."""
        steps, measurable, joined = self.progress(worker)
        tail = str(worker.remote_end.get("tail", "")) if worker.remote else self._tail(worker)
        return WorkerEnd(
            lease_id=worker.lease.lease_id,
            exit_code=worker.exit_code if worker.exit_code is not None else -int(signal.SIGKILL),
            steps=steps,
            measurable=measurable,
            joined=joined,
            in_last_world=in_last_world,
            ended_by_launcher=worker.ended_by_launcher,
            ended_s=worker.ended_s,
            tail=tail,
        )

    @staticmethod
    def progress(worker: Worker) -> tuple[int, bool, bool]:
        """Return (steps, whether they can be counted, whether it entered a world) as far as known here."""
        if worker.remote:
            end = worker.remote_end
            steps = end.get("steps", 0)
            return (
                steps if isinstance(steps, int) else 0,
                bool(end.get("measurable", False)),
                bool(end.get("joined", False)),
            )
        counters = read_counters(worker.folder.counters, os.getuid())
        if counters is None or counters.started_s < worker.started_s - 1.0:
            # Not there yet: it is still on its way to the script, or was refused.
            return 0, True, False
        return counters.steps, counters.measurable, counters.rank is not None

    @staticmethod
    def _tail(worker: Worker) -> str:
        return read_tail(worker.folder.output_log, worker.log_offset)


def start_here(
    folder: LeaseFolder, argv: Sequence[str], spec: Command, environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], int, control.Channel]:
    """Start a worker on this node.

    Args:
        argv: All but the channel's descriptor and the user's command.

    Returns:
        The process, where its output begins in the lease's log (bytes), and the channel to it.
    """
    folder.exit_json.unlink(missing_ok=True)
    ours, its = socket.socketpair()
    try:
        with folder.output_log.open("ab") as log:
            offset = log.tell()
            process = subprocess.Popen(
                [*argv, "--control", str(its.fileno()), "--", *spec.command],
                cwd=spec.working_dir,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(its.fileno(),),
            )
    except BaseException:
        ours.close()
        raise
    finally:
        its.close()
    return process, offset, control.Channel(ours)


def wait_for_group(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a group's leader when it has ended, and end what it left behind.

    The slot is not free while anything of the worker runs. The leader is reaped last, so that its number
    cannot have become another group's when the signal is sent.
    """
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        _log.debug("worker %d left nothing behind", process.pid)
    return process.wait()


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._+-")
"""Characters that no shell changes."""


def read_tail(path: Path, offset: int) -> str:
    """Return the last part of a log from ``offset`` on, decoded with replacement."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(offset, size - TAIL_BYTES))
            return log.read().decode("utf-8", "replace")
    except OSError:
        return ""
