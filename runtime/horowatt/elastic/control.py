# SPDX-License-Identifier: Apache-2.0
"""The channel between the launcher and one worker: a Unix socket that carries one JSON object per line.

The launcher says ``{"do": "join", "environment": {...}}`` to a standby and ``{"do": "persist", "trigger":
"..."}`` to a worker; a worker says ``{"ready": true}`` and ``{"written": {...}}``. On another node the ssh
helper passes the lines on. Either side may be gone: what cannot be said is not said.
"""

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

MAX_LINE_BYTES = 1_048_576
"""A longer line is no message: the other end is the user's own process, but may be out of order."""
_READ_BYTES = 65_536

Message = Mapping[str, Any]


def encode_line(message: Message) -> bytes:
    """Return a message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode_line(line: bytes) -> Message | None:
    """Return the message of a line, or None when it is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


class Channel:
    """One end of the channel. Reads in a thread of its own, so that nobody ever waits for the other end."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()

    def say(self, message: Message) -> bool:
        """Send a message; False when the other end is gone."""
        return self.pass_on(encode_line(message))

    def pass_on(self, line: bytes) -> bool:
        """Send a line as it is; False when the other end is gone."""
        try:
            with self._lock:
                self._socket.sendall(line)
        except OSError:
            return False
        return True

    def listen(self, on_line: Callable[[bytes], None], on_end: Callable[[], None] | None = None) -> None:
        """Call ``on_line`` with each line that comes, from a daemon thread, and ``on_end`` after the last."""
        threading.Thread(target=self._read, args=(on_line, on_end), name="control", daemon=True).start()

    def _read(self, on_line: Callable[[bytes], None], on_end: Callable[[], None] | None) -> None:
        rest = b""
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError:
                data = b""
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                on_line(line)
            if len(rest) > MAX_LINE_BYTES:
                rest = b""
        if on_end is not None:
            on_end()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def from_descriptor(descriptor: int) -> Channel:
    """Return the channel that a parent left open for this process; no child of this one inherits it."""
    os.set_inheritable(descriptor, False)
    return Channel(socket.socket(fileno=descriptor))
