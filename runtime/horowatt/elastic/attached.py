# SPDX-License-Identifier: Apache-2.0
"""A worker under the user's own ``horovodrun``: ``horowatt worker -- python train.py args``.

``horovodrun`` starts this command once per slot. It finds the job's folder, takes the lease that belongs
to its host and local rank, and starts the script as Horowatt's launcher would.

Such jobs are cooperative, not isolated, and have stock Horovod's limits: when a host loses a slot,
Horovod takes away the worker with the highest local rank, so slots are to be taken from the end.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from horowatt.elastic.command import find_interpreter, parse_python
from horowatt.elastic.events import append_event
from horowatt.elastic.folder import JobFolder
from horowatt.elastic.network import resolve
from horowatt.elastic.verdict import EXIT_MISSING, EXIT_REFUSED
from horowatt.errors import HorowattError, InvalidInput, NotAllowed, NotFound
from horowatt.files import write_atomic
from horowatt.records import LauncherKind, LaunchSpec, Lease, SlotsFile
from horowatt.wire import decode

JOB_DIR_VARIABLE = "HOROWATT_JOB_DIR"
SLOT_PATIENCE_S = 5.0
"""How long the slots file may lag behind the hostfile that started this worker, seconds."""
_POLL_S = 0.1
_SCRIPT_OPTION = "--host-discovery-script"
_USAGE = "usage: horowatt worker [--job-dir DIR] -- COMMAND..."


def main(argv: list[str]) -> int:
    """Run one worker and return its exit code; Horowatt's own errors are printed, with 125 and up."""
    try:
        job_dir, command = _parse(argv)
        job = find_job(job_dir, os.environ)
        lease = _find_lease(job, os.environ)
        return _run(job, lease, command)
    except HorowattError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_MISSING if error.code == "HW-JOB-001" else EXIT_REFUSED


def _parse(argv: list[str]) -> tuple[Path | None, list[str]]:
    job_dir = None
    rest = list(argv)
    if rest[:1] == ["--job-dir"] and len(rest) > 1:
        job_dir, rest = Path(rest[1]), rest[2:]
    if rest[:1] == ["--"]:
        rest = rest[1:]
    if not rest or rest[0].startswith("-"):
        raise InvalidInput("HW-JOB-011", "there is no command for the worker to run", hint=_USAGE)
    return job_dir, rest


# -------------------------------------------------------------------------------- the job's folder


def find_job(given: Path | None, environ: Mapping[str, str]) -> JobFolder:
    """Return the job's folder: the one given, else of ``HOROWATT_JOB_DIR``, else of ``horovodrun``'s script.

    Raises:
        NotFound: ``HW-JOB-010`` when there is none.
        NotAllowed: ``HW-JOB-010`` when it is not a job folder of this user.
    """
    if given is None and environ.get(JOB_DIR_VARIABLE):
        given = Path(environ[JOB_DIR_VARIABLE])
    if given is None:
        given = _from_ancestors()
    if given is None:
        raise NotFound(
            "HW-JOB-010",
            "this worker does not belong to a job",
            because=f"{JOB_DIR_VARIABLE} is not set and no process above this one has {_SCRIPT_OPTION}",
            hint="start it by 'horovodrun --host-discovery-script SCRIPT horowatt worker -- COMMAND', with "
            "the script of a job that was submitted to be attached",
        )
    job = JobFolder(given.absolute())
    _check_own(job)
    return job


def _check_own(job: JobFolder) -> None:
    try:
        owner = job.root.stat().st_uid
        known = job.job_json.is_file()
    except OSError:
        owner, known = -1, False
    if owner != os.getuid() or not known:
        raise NotAllowed(
            "HW-JOB-010",
            f"{job.root} is not a job folder of this user",
            because="it does not exist, has no job.json, or belongs to somebody else",
            hint="use the discovery script of a job that you submitted",
            fields={"job_dir": str(job.root)},
        )


def _from_ancestors() -> Path | None:
    """Return the folder of the discovery script that a ``horovodrun`` above this process was given."""
    pid = os.getppid()
    while pid > 1:
        folder = Path("/proc", str(pid))
        try:
            words = (folder / "cmdline").read_bytes().decode("utf-8", "surrogateescape").split("\0")
            stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
            working_dir = (folder / "cwd").readlink()
        except OSError:
            return None
        script = _script_of(words)
        if script is not None:
            return (working_dir / script).parent
        # The command's name, in parentheses, may itself hold spaces and parentheses.
        pid = int(stat.rpartition(")")[2].split()[1])
    return None


def _script_of(words: Sequence[str]) -> str | None:
    """Return the script of a ``--host-discovery-script`` among the words of a command line."""
    for number, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option != _SCRIPT_OPTION:
            continue
        text = value if equals else words[number + 1] if number + 1 < len(words) else ""
        try:
            # Horovod gives it to a shell, so a path with spaces is quoted in there.
            parts = shlex.split(text)
        except ValueError:
            return None
        return parts[-1] if parts else None
    return None


# -------------------------------------------------------------------------------------- the lease


def _find_lease(job: JobFolder, environ: Mapping[str, str]) -> Lease:
    try:
        host, local_rank = environ["HOROVOD_HOSTNAME"], int(environ["HOROVOD_LOCAL_RANK"])
    except (KeyError, ValueError) as error:
        raise InvalidInput(
            "HW-JOB-011",
            "this worker was not started by horovodrun",
            because="HOROVOD_HOSTNAME and HOROVOD_LOCAL_RANK are not set",
            hint="run 'horovodrun ... horowatt worker -- COMMAND', not 'horowatt worker' alone",
        ) from error
    spec = decode(job.job_json.read_bytes(), LaunchSpec)
    if spec.launcher is not LauncherKind.ATTACHED:
        raise InvalidInput(
            "HW-JOB-011",
            f"job {spec.job_id} has Horowatt's own launcher",
            hint="submit it with --attach to start it with your own horovodrun",
        )
    deadline_s = time.monotonic() + SLOT_PATIENCE_S
    while True:
        slots = decode(job.slots_json.read_bytes(), SlotsFile)
        lease = lease_of(slots, host, local_rank)
        if lease is not None:
            return lease
        if time.monotonic() >= deadline_s:
            raise NotFound(
                "HW-JOB-011",
                f"job {spec.job_id} has no slot for local rank {local_rank} on {host}",
                because=f"it has {len(slots.leases)} slots, on "
                f"{', '.join(sorted({lease.address for lease in slots.leases})) or 'no host'}",
                hint="let horovodrun take its hosts from the job's discovery script, not from -H",
            )
        time.sleep(_POLL_S)


def lease_of(slots: SlotsFile, host: str, local_rank: int) -> Lease | None:
    """Return the lease of a local rank on a host: its leases there, in the order of their slots."""
    here = [lease for lease in slots.leases if lease.address == host]
    if not here:
        address = resolve(host)
        here = [lease for lease in slots.leases if address is not None and resolve(lease.address) == address]
    here.sort(key=lambda lease: lease.slot_index)
    return here[local_rank] if 0 <= local_rank < len(here) else None


# ------------------------------------------------------------------------------------- the worker


def _run(job: JobFolder, lease: Lease, command: Sequence[str]) -> int:
    """Run the worker as a child, so that its exit code is noted however it ends."""
    folder = job.lease(lease.lease_id)
    folder.exit_json.unlink(missing_ok=True)
    python = parse_python(command)
    interpreter: str | None = sys.executable
    if python is not None:
        interpreter = find_interpreter(python, None, os.environ, os.getcwd())  # noqa: PTH109
    if interpreter is None:
        raise NotFound(
            "HW-JOB-001",
            f"the command {command[0]!r} cannot be run",
            because="there is no such interpreter on PATH",
            hint="activate the virtual environment, or give the interpreter's path",
        )
    argv = [
        interpreter,
        *(python.options if python else ()),
        *("-m", "horowatt.elastic.start"),
        *(
            "--job-dir",
            str(job.root),
            "--lease",
            lease.lease_id,
            "--parent",
            str(os.getpid()),
            "--",
            *command,
        ),
    ]
    process = subprocess.Popen(argv, close_fds=False)

    def pass_on(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    exit_code = process.wait()
    write_atomic(folder.exit_json, json.dumps({"exit_code": exit_code}).encode())
    append_event(job.events, "worker-exit", lease.lease_id, exit_code=exit_code)
    return exit_code if exit_code >= 0 else _SIGNAL_BASE - exit_code


_SIGNAL_BASE = 128
"""A shell's way of telling a signal in an exit code."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
