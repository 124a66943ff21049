# SPDX-License-Identifier: Apache-2.0
"""The events of a job: one JSON object per line, appended by the launcher and by the workers."""

import json
import os
import time
from pathlib import Path


def append_event(path: Path, kind: str, lease_id: str = "", **fields: object) -> None:
    """Append one event, whole, in one ``write``: lines of several processes never mix.

    A full disk loses the event, not the training.
    """
    event = {"kind": kind, "at_s": time.time(), "lease_id": lease_id, **fields}
    line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
    try:
        descriptor = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
    except OSError:
        return
    try:
        os.write(descriptor, line)
    except OSError:
        return
    finally:
        os.close(descriptor)
