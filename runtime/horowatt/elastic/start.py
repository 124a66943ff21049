# SPDX-License-Identifier: Apache-2.0
"""The start of a worker: ``python -m horowatt.elastic.start [options] -- python train.py args``.

Takes the lease's lock, makes only the lease's GPU visible, and runs the user's script in this process
as ``__main__``, just as the interpreter would, with counting and repairs that come to life when the
script imports PyTorch or Horovod. A command that is not a Python script replaces this process: it is
pinned, but not measured.

The lock is inherited by every child, so it is free only when no process of the worker is left.
"""

import argparse
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

from horowatt.elastic import (
    control,
    horovod_fixes,
    import_hooks,
    leaving,
    priority,
    rendezvous,
    sampling,
)
from horowatt.elastic.command import Form, PythonCommand, parse_python
from horowatt.elastic.commits import DurableCommits, Written
from horowatt.elastic.counters import CountersWriter
from horowatt.elastic.events import append_event
from horowatt.elastic.folder import JobFolder, LeaseFolder
from horowatt.elastic.network import LOOPBACK_INTERFACE, interface_of
from horowatt.elastic.standby import Standby
from horowatt.elastic.throughput import DeclaredBatch, StepMeter
from horowatt.elastic.verdict import EXIT_MISSING, EXIT_NOT_PYTHON, EXIT_REFUSED
from horowatt.errors import HorowattError, InvalidInput, NotFound, RetryLater
from horowatt.records import BatchRule, LauncherKind, LaunchSpec, Lease, SlotsFile
from horowatt.wire import decode

LOCK_PATIENCE_S = 15.0
"""How long a predecessor of the same lease may take to die, seconds."""
COMMIT_DIR_VARIABLE = "HOROWATT_COMMIT_DIR"
"""A folder that all nodes share, for durable commits that outlive a node."""
COMMIT_INTERVAL_VARIABLE = "HOROWATT_COMMIT_EVERY_S"
COMMIT_INTERVAL_S = 60.0
"""How far apart durable commits are that nobody asked for, seconds."""
DRAIN_S = 10.0
_LOCK_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_CPU_SLOT = "CPU-"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one worker; returns only for a script that ran to its end, or with Horowatt's own error."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    try:
        if options.parent:
            die_with_parent(options.parent)
        if options.standby:
            priority.step_back()
        membership = _join_job(options) if options.job_dir else None
        command = parse_python(options.command)
        if command is None:
            if membership is not None:
                membership.not_measurable()
            _exec(options.command)
        _instrument(membership, options)
    except HorowattError as error:
        return _refuse(error)
    try:
        _run_python(command)
    except HorowattError as error:
        if error.code not in _EXIT_CODES:
            raise
        return _refuse(error)
    return 0


def _refuse(error: HorowattError) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"{error}\n")
    return _EXIT_CODES.get(error.code, EXIT_REFUSED)


_EXIT_CODES = {
    "HW-JOB-001": EXIT_MISSING,
    "HW-JOB-002": EXIT_NOT_PYTHON,
    "HW-JOB-007": EXIT_REFUSED,
    "HW-COMMIT-004": EXIT_REFUSED,
    "HW-COMMIT-005": EXIT_REFUSED,
}
"""What Horowatt finds while the script runs; a script may raise others, which keep their traceback."""


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m horowatt.elastic.start", allow_abbrev=False)
    parser.add_argument("--job-dir", type=Path, help="the job's folder on this node")
    parser.add_argument("--lease", help="id of the lease this worker holds")
    parser.add_argument(
        "--parent", type=int, default=0, help="process without which this worker must not live"
    )
    parser.add_argument("--control", type=int, default=-1, help="descriptor of the channel to the launcher")
    parser.add_argument(
        "--standby", action="store_true", help="run up to hvd.elastic.run and wait there to join"
    )
    parser.add_argument("command", nargs="+", help="training command, after '--'")
    options = parser.parse_args(argv)
    if (options.job_dir is None) != (options.lease is None):
        parser.error("--job-dir and --lease belong together")
    if options.standby and (options.control < 0 or options.job_dir is None):
        parser.error("--standby needs --job-dir and --control")
    return options


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends.

    The kernel means the thread of the parent that started this process; the launcher's waits for it.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


# -------------------------------------------------------------------------------------- the lease


def _join_job(options: argparse.Namespace) -> "_Membership":
    job = JobFolder(options.job_dir)
    folder = job.lease(options.lease)
    spec = decode(job.job_json.read_bytes(), LaunchSpec)
    take_lock(folder)
    # Read after the lock was taken: an agent that publishes, then looks at the lock, sees one of the two.
    slots = decode(job.slots_json.read_bytes(), SlotsFile)
    lease = next((lease for lease in slots.leases if lease.lease_id == options.lease), None)
    if lease is None:
        raise RetryLater(
            "HW-JOB-009",
            f"lease {options.lease} was taken back before its worker started",
            hint="nothing to do: the job goes on, or is started again, with the slots it has",
        )
    _pin(lease, slots, spec)
    _choose_interface(lease)
    return _Membership(job, folder, spec, lease)


def take_lock(folder: LeaseFolder) -> None:
    """Take the lease's lock for the life of this process and of its children.

    Raises:
        RetryLater: ``HW-JOB-014`` when somebody else holds it.
    """
    descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    deadline_s = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if time.monotonic() >= deadline_s:
                raise RetryLater(
                    "HW-JOB-014",
                    f"lease {folder.root.name} is still held by an earlier worker",
                    because=f"{folder.lock} is locked by another process",
                    hint="end that process; 'horowatt nodes' shows who holds which GPU",
                ) from error
            time.sleep(_LOCK_POLL_S)
    os.set_inheritable(descriptor, True)


def _pin(lease: Lease, slots: SlotsFile, spec: LaunchSpec) -> None:
    """Make only the worker's own GPU visible.

    A worker of a user's ``horovodrun`` also sees the job's GPUs of lower local rank on its host, because
    scripts choose theirs by ``torch.cuda.set_device(hvd.local_rank())``.
    """
    mine = [lease]
    if spec.launcher is LauncherKind.ATTACHED:
        on_host = [other for other in slots.leases if other.address == lease.address]
        mine = sorted(
            (other for other in on_host if other.slot_index <= lease.slot_index),
            key=lambda other: other.slot_index,
        )
    visible = ",".join(other.gpu_uuid for other in mine if not other.gpu_uuid.startswith(_CPU_SLOT))
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    os.environ["NVIDIA_VISIBLE_DEVICES"] = visible or "none"


def _choose_interface(lease: Lease) -> None:
    """Bind Gloo and NCCL to the interface of this node that the other hosts reach."""
    if "HOROVOD_GLOO_IFACE" in os.environ:
        return
    interface = interface_of(lease.address)
    if interface is None:
        return
    os.environ["HOROVOD_GLOO_IFACE"] = interface
    if interface != LOOPBACK_INTERFACE:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


class _Membership:
    """This worker's place in its job: its counters, its meter, its events."""

    def __init__(self, job: JobFolder, folder: LeaseFolder, spec: LaunchSpec, lease: Lease) -> None:
        self.spec = spec
        self._garbage_held = False
        self._job = job
        self._events = job.events
        self._lease = lease
        self._counters = CountersWriter(folder.counters)
        atexit.register(self._show_last_counts)
        declared = None
        if spec.batch_size is not None:
            declared = DeclaredBatch(spec.batch_size, total=spec.batch_rule is BatchRule.TOTAL)
        self.meter = StepMeter(self._counters, declared, self._occupancy(), self._resumed)

    def _show_last_counts(self) -> None:
        # A forked child of the script ends here as well, with counts from before its birth.
        if os.getpid() == self._counters.pid:
            self._counters.publish()

    def not_measurable(self) -> None:
        self._counters.not_measurable()

    def enter_world(self, rank: int, world_size: int) -> None:
        self.meter.enter_world(rank, world_size)
        append_event(self._events, "world", self._lease.lease_id, rank=rank, world_size=world_size)

    def hold_garbage(self) -> None:
        """Put the garbage collector off until the first step of the next world.

        A full collection takes a tenth of a second with PyTorch imported, and the others would wait for it.
        """
        if gc.isenabled():
            gc.disable()
            self._garbage_held = True

    def note(self, kind: str) -> None:
        """Note how far a resize has come in this worker."""
        if kind == "interrupted":
            self.hold_garbage()
        append_event(self._events, kind, self._lease.lease_id, world_size=max(self._counters.world_size, 1))

    def steps(self) -> int:
        """Return the optimizer steps of this worker so far."""
        return self._counters.steps

    def commit_folder(self) -> Path:
        """Return where this job's durable commits are."""
        shared = os.environ.get(COMMIT_DIR_VARIABLE)
        return Path(shared) / self.spec.job_id if shared else self._job.commits

    def note_commit(self, written: Written) -> None:
        """Note a commit that is on disk."""
        append_event(
            self._events,
            "committed",
            self._lease.lease_id,
            commit=written.number,
            bytes=written.num_bytes,
            write_s=round(written.write_s, 4),
            blocked_s=round(written.blocked_s, 4),
            trigger=written.trigger,
        )

    def _resumed(self, last_step_end_s: float | None, first_step_end_s: float) -> None:
        if self._garbage_held:
            self._garbage_held = False
            gc.enable()
        append_event(
            self._events,
            "resumed",
            self._lease.lease_id,
            world_size=max(self._counters.world_size, 1),
            last_step_end_s=last_step_end_s,
            first_step_end_s=first_step_end_s,
        )

    def _occupancy(self) -> Callable[[object, int | None], None] | None:
        if not self._lease.simulated or self._lease.gpu_uuid.startswith(_CPU_SLOT):
            return None
        from horowatt.devices.simulated import SimulatedGpu
        from horowatt.elastic.occupancy import SimulatedOccupancy

        counters = self._counters
        with contextlib.suppress(FileNotFoundError):
            # What the node says wins over what another node's launcher passed on.
            os.environ.update(decode(self._job.node_json.read_bytes(), dict[str, str]))
        gpu = SimulatedGpu(self._lease.gpu_uuid)
        return SimulatedOccupancy(gpu, lambda: max(counters.world_size, 1)).after_step


def _instrument(membership: _Membership | None, options: argparse.Namespace) -> None:
    if membership is None:
        return
    meter = membership.meter
    channel = control.from_descriptor(options.control) if options.control >= 0 else None
    standby = None
    if options.standby and channel is not None:
        standby = Standby(channel, meter.uncounted, on_join=membership.hold_garbage)
        leaving.stand_by()

    def written(commit: Written) -> None:
        membership.note_commit(commit)
        if channel is not None:
            channel.say({"written": {"trigger": commit.trigger, "write_s": commit.write_s}})

    commits = DurableCommits(
        membership.commit_folder(),
        every_s=commit_interval_s(os.environ),
        shared=True if COMMIT_DIR_VARIABLE in os.environ else None,
        on_written=written,
        restore=standby is None,
        steps=membership.steps,
    )
    if channel is not None:
        _obey(channel, standby, commits)
        channel.say({"about": _versions()})

    def leave() -> None:
        membership.note("left")
        sys.stderr.write("horowatt: this worker's slot was taken back; it leaves the job\n")
        # The others train again by now, and this process's end must not slow them down.
        priority.step_aside()
        commits.drain(DRAIN_S)
        leaving.run_callbacks()

    import_hooks.install(
        import_hooks.merged(
            meter.hooks(),
            rendezvous.client_hooks(),
            horovod_fixes.worker_hooks(
                on_world=membership.enter_world,
                on_leave=leave,
                uncounted=meter.uncounted,
                on_phase=membership.note,
                standby=standby,
            ),
            sampling.hooks(sampling.Settings.of_job(membership.spec, os.environ)),
            commits.hooks(),
            standby.hooks() if standby is not None else {},
            {name: lambda _: membership.not_measurable() for name in ("tensorflow", "jax", "mxnet")},
        )
    )


def _obey(channel: control.Channel, standby: Standby | None, commits: DurableCommits) -> None:
    """Do what the launcher says."""

    def on_line(line: bytes) -> None:
        message = control.decode_line(line) or {}
        if message.get("do") == "join" and standby is not None:
            standby.join(message)
        elif message.get("do") == "persist":
            commits.request(str(message.get("trigger")))

    channel.listen(on_line, on_end=lambda: standby.join(None) if standby is not None else None)


def commit_interval_s(environment: Mapping[str, str]) -> float:
    """Return how far apart durable commits are to be, seconds."""
    text = environment.get(COMMIT_INTERVAL_VARIABLE, "")
    try:
        return max(float(text), 0.0) if text else COMMIT_INTERVAL_S
    except ValueError as error:
        raise InvalidInput(
            "HW-JOB-019",
            f"{COMMIT_INTERVAL_VARIABLE}={text} is not a number of seconds",
            hint=f"for example {COMMIT_INTERVAL_VARIABLE}=60",
        ) from error


def _versions() -> dict[str, str]:
    """Return the versions that all workers of a job must share, by name."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in ("torch", "horovod", "horowatt"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# ------------------------------------------------------------------------------------- the script


def _exec(command: Sequence[str]) -> NoReturn:
    """Replace this process by ``command``.

    Raises:
        NotFound: ``HW-JOB-001`` when it cannot be run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(command[0], list(command))  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise NotFound(
            "HW-JOB-001",
            f"the command {command[0]!r} cannot be run",
            because=error.strerror or str(error),
            hint="check its name, its permissions and the job's working directory",
        ) from error


def _run_python(command: PythonCommand) -> None:
    """Run the script as the interpreter would; errors of the script are not caught here."""
    _hide_own_frames()
    if command.form is Form.MODULE:
        # The interpreter was started with -m as well, so the first entry of sys.path is right already.
        sys.argv[:] = [command.target, *command.arguments]
        _require_module(command.target)
        runpy.run_module(command.target, run_name="__main__", alter_sys=True)
        return
    script = Path(command.target)
    sys.argv[:] = [command.target, *command.arguments]
    if script.is_dir() or script.suffix in {".zip", ".pyz"}:
        if not sys.flags.safe_path:
            sys.path.pop(0)
        runpy.run_path(command.target, run_name="__main__")
        return
    code = _compile(script)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))  # noqa: PTH120 - as the interpreter does it
    module = _main_module(os.path.abspath(script))  # noqa: PTH100 - links stay, as the interpreter has it
    exec(code, module.__dict__)  # noqa: S102 - running the user's script is what this process is for


def _require_module(name: str) -> None:
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        found = False
    if not found:
        raise NotFound(
            "HW-JOB-001",
            f"there is no module {name!r} to run",
            because=f"{sys.executable} does not find it, nor does the working directory {Path.cwd()} hold it",
            hint="install it in the job's virtual environment, or check the working directory",
        )


def _compile(script: Path) -> CodeType:
    try:
        source = script.read_bytes()
    except OSError as error:
        raise NotFound(
            "HW-JOB-001",
            f"the script {str(script)!r} cannot be read",
            because=f"{error.strerror or error}, in the working directory {Path.cwd()}",
            hint="give its path relative to the job's working directory, or an absolute one",
        ) from error
    try:
        return compile(source, os.path.abspath(script), "exec", dont_inherit=True)  # noqa: PTH100
    except (SyntaxError, ValueError) as error:
        traceback.print_exception(type(error), error, None)
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise InvalidInput(
            "HW-JOB-002",
            f"the script {str(script)!r} is not a Python program for Python {sys.version.split()[0]}",
            because=f"{getattr(error, 'msg', None) or error}{line}",
            hint="for a program in another language, name it as the command without 'python'",
        ) from error


def _main_module(path: str) -> ModuleType:
    """Return a fresh ``__main__`` with the attributes that the interpreter gives a script's."""
    module = ModuleType("__main__")
    module.__dict__.update(
        __builtins__=__builtins__,
        __annotations__={},
        __cached__=None,
        __file__=path,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
        __package__=None,
        __spec__=None,
    )
    sys.modules["__main__"] = module
    return module


def _hide_own_frames() -> None:
    """Let tracebacks of the script begin with the script."""
    shown = sys.excepthook
    own = {__file__, runpy.__file__, "<frozen runpy>"}

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        first = trace
        while first is not None and first.tb_frame.f_code.co_filename in own:
            first = first.tb_next
        shown(kind, error.with_traceback(first or trace), first or trace)

    sys.excepthook = excepthook


if __name__ == "__main__":
    sys.exit(main())
