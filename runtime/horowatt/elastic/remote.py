# SPDX-License-Identifier: Apache-2.0
"""Helper that runs one worker on another node, started by the launcher over the tenant's own ssh.

Standard input carries one line of JSON (what to run, with its environment: nothing of it is ever on a
command line), then commands, one per line: a signal's name, ``> `` with a message for the worker, or
``alive`` every few seconds. Standard output carries ``< `` with each message of the worker, and as its last
line JSON: how the worker ended. The worker's own output goes to its lease's folder
on this node. Without its launcher, because the connection closed or went silent, the worker is ended.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horowatt.elastic.control import Channel, decode_line
from horowatt.elastic.counters import read_counters
from horowatt.elastic.folder import JobFolder
from horowatt.elastic.verdict import EXIT_MISSING, EXIT_NOT_JOINED
from horowatt.elastic.workers import DRIVER_GRACE_S, HEARTBEAT_S, read_tail, start_here, wait_for_group
from horowatt.errors import HorowattError, NeedsOperator
from horowatt.files import write_atomic

SILENCE_S = 6 * HEARTBEAT_S
"""Without a word from the launcher for this long, the worker is ended, seconds."""
_SIGNALS = {number.name: number for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)}
_READ_BYTES = 65_536
_STDIN = 0


def main() -> int:
    """Run the worker described on standard input; return 0 once its end has been reported."""
    # Unbuffered: what follows the first line is for the thread that obeys.
    document = json.loads(open(0, "rb", buffering=0, closefd=False).readline())  # noqa: SIM115
    try:
        end = _run(document)
    except HorowattError as error:
        end = {"exit_code": EXIT_MISSING, "tail": str(error)}
    except OSError as error:
        refused = NeedsOperator("HW-JOB-003", "the worker cannot be started on this node", because=str(error))
        end = {"exit_code": EXIT_MISSING, "tail": str(refused)}
    sys.stdout.write(json.dumps(end) + "\n")
    sys.stdout.flush()
    return 0


@dataclass(frozen=True, slots=True)
class _Command:
    command: list[str]
    working_dir: str


def _run(document: dict[str, Any]) -> dict[str, object]:
    folder = JobFolder(Path(document["job_dir"])).lease(document["lease_id"])
    command = _Command(document["command"], document["working_dir"])
    process, offset, channel = start_here(
        folder, [*document["argv"], "--parent", str(os.getpid())], command, document["environment"]
    )
    # What the worker says goes out before its end does: both through this one function.
    said = threading.Lock()

    def pass_on(line: bytes) -> None:
        with said:
            sys.stdout.write(f"< {line.decode('utf-8', 'replace')}\n")
            sys.stdout.flush()

    channel.listen(pass_on)
    joined = threading.Event()
    if "--standby" not in document["argv"]:
        joined.set()
    threading.Thread(target=_obey, args=(process, channel, joined), daemon=True).start()
    exit_code = wait_for_group(process)
    if exit_code == 0 and not joined.is_set():
        exit_code = EXIT_NOT_JOINED
    write_atomic(folder.exit_json, json.dumps({"exit_code": exit_code}).encode())
    counters = read_counters(folder.counters, os.getuid())
    said.acquire()
    return {
        "exit_code": exit_code,
        "steps": counters.steps if counters else 0,
        "measurable": counters.measurable if counters else True,
        "joined": counters is not None and counters.rank is not None,
        "tail": read_tail(folder.output_log, offset),
    }


def _obey(process: subprocess.Popen[bytes], channel: Channel, joined: threading.Event) -> None:
    """Pass signals and messages on until the launcher is gone; then end the worker."""
    with selectors.DefaultSelector() as selector:
        selector.register(_STDIN, selectors.EVENT_READ)
        rest = b""
        while selector.select(SILENCE_S):
            data = os.read(_STDIN, _READ_BYTES)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"> "):
                    if (decode_line(line[2:]) or {}).get("do") == "join":
                        joined.set()
                    channel.pass_on(line[2:] + b"\n")
                    continue
                number = _SIGNALS.get(line.decode("ascii", "replace"))
                if number is not None:
                    _signal(process, number)
    _signal(process, signal.SIGTERM)
    time.sleep(DRIVER_GRACE_S)
    _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.returncode is None:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return


if __name__ == "__main__":
    sys.exit(main())
