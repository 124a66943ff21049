# SPDX-License-Identifier: Apache-2.0
"""Runs one long command: output to a file, a sign of life every few seconds, nothing left behind."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

HEARTBEAT_S = 15.0
GRACE_S = 5.0
"""What a stopped compiler has to end by itself before it is killed."""

_TAIL_BYTES = 64 * 1024
_PERCENT = re.compile(rb"\[\s*(\d{1,3})%\]")
_ERROR_LINE = re.compile(
    r"\berror\b|\bKilled\b|No space left|cannot find|No matching distribution|undefined reference",
    re.IGNORECASE,
)
_NOISE_LINE = re.compile(
    r"note: This error originates|subprocess-exited-with-error|^\s*\u00d7|Failed to build|^ERROR: Failed"
)
_MAX_ERROR_LINES = 12


def run_logged(
    command: Sequence[str | Path],
    *,
    label: str,
    log: Path,
    say: Callable[[str], None],
    env: Mapping[str, str],
    cwd: Path,
    heartbeat_s: float = HEARTBEAT_S,
) -> int:
    """Run a command to its end and return its exit status.

    Args:
        label: What is going on, for the sign of life.
        log: Gets everything that the command prints, after what is already there.
        heartbeat_s: Seconds between two signs of life.
    """
    began_s = time.monotonic()
    with log.open("ab") as output:
        output.write(f"$ {' '.join(map(str, command))}\n".encode())
        output.flush()
        start = output.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
    with _stopped_with_us(process):
        while True:
            try:
                return process.wait(timeout=heartbeat_s)
            except subprocess.TimeoutExpired:
                say(f"  {label}: {elapsed(time.monotonic() - began_s)} so far{_percent(log, start)}")


def elapsed(seconds_s: float) -> str:
    """Return a duration in words."""
    minutes, seconds = divmod(int(seconds_s), 60)
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def relevant_errors(log_text: str) -> list[str]:
    """Return the lines of a log that say why it failed: the first errors, else the last lines."""
    lines = [line.rstrip() for line in log_text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.search(line) and not _NOISE_LINE.search(line)]
    return errors[:_MAX_ERROR_LINES] if errors else lines[-_MAX_ERROR_LINES:]


def _percent(log: Path, start: int) -> str:
    try:
        with log.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(start, stream.tell() - _TAIL_BYTES))
            found = _PERCENT.findall(stream.read())
    except OSError:
        return ""
    return f", {int(found[-1])} % of the files" if found else ""


@contextmanager
def _stopped_with_us(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """End the whole process group when this process is interrupted or asked to end."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, end) if main_thread else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            _end_group(process)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=GRACE_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
        else:
            break
