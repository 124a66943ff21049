# SPDX-License-Identifier: Apache-2.0
"""Deleting folders of ended jobs without waiting for it: commits are large, and metering must go on.

A folder is first moved, in one step, to where no job can have it any more, and then deleted by a process
of its own, one at a time. What an earlier run of the agent did not finish is taken up again.
"""

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from horowatt.agent.notes import Notes

RETRY_S = 60.0
"""Pause before a folder that could not be deleted is tried again, seconds."""
_NICENESS = 10
_KEPT_BYTES = 500
_READ_BYTES = 65536
_MOST_READS = 64


class Trash:
    """The folders of this node that are to be deleted.

    Args:
        root: Where they are moved to; on the file system of the jobs' folders.
    """

    def __init__(self, root: Path, notes: Notes, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._notes = notes
        self._monotonic_s = monotonic_s
        self._deleting: tuple[Path, subprocess.Popen[bytes]] | None = None
        self._said = b""
        self._not_before_s: dict[Path, float] = {}
        root.mkdir(mode=0o700, exist_ok=True)
        root.chmod(0o700)
        self._left = sorted(root.iterdir())

    def discard(self, path: Path) -> None:
        """Take ``path`` away at once, following no link; an absent one is fine.

        Raises:
            OSError: when it cannot be moved.
        """
        target = self._root / f"{path.name}.{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            path.rename(target)
            self._left.append(target)
        self.tend()

    def tend(self) -> None:
        """See how the deletion goes, and begin the next one."""
        if self._deleting is not None:
            path, process = self._deleting
            running = process.poll() is None
            self._listen(process)
            if running:
                return
            self._ended(path, process)
        now_s = self._monotonic_s()
        for path in self._left:
            if self._not_before_s.get(path, now_s) <= now_s:
                self._left.remove(path)
                self._begin(path)
                return

    def close(self, wait_s: float = 0.0) -> None:
        """Give the deletion that is under way ``wait_s`` seconds, and else let it go on by itself."""
        if self._deleting is None:
            return
        _, process = self._deleting
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
        if process.stderr is not None:
            process.stderr.close()
        self._deleting = None

    def _begin(self, path: Path) -> None:
        try:
            # A tenant can nest folders deeper than shutil.rmtree can recurse, and mount what hangs.
            process = subprocess.Popen(
                ["nice", "-n", str(_NICENESS), "rm", "-rf", "--one-file-system", "--", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._failed(path, str(error))
            return
        assert process.stderr is not None  # noqa: S101 - it was asked for
        os.set_blocking(process.stderr.fileno(), False)
        self._deleting, self._said = (path, process), b""

    def _listen(self, process: "subprocess.Popen[bytes]") -> None:
        """Take what rm complains about: an ever so long list must not keep it waiting for a reader."""
        assert process.stderr is not None  # noqa: S101 - it was asked for
        for _ in range(_MOST_READS):
            try:
                data = os.read(process.stderr.fileno(), _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                return
            self._said = (self._said + data)[:_KEPT_BYTES]

    def _ended(self, path: Path, process: "subprocess.Popen[bytes]") -> None:
        self._deleting = None
        if process.stderr is not None:
            process.stderr.close()
        if os.path.lexists(path):
            said = self._said.decode("utf-8", "replace").strip()
            self._failed(path, said or f"rm ended with {process.returncode}")
        else:
            self._not_before_s.pop(path, None)

    def _failed(self, path: Path, why: str) -> None:
        self._notes.set("HW-AGENT-017", f"{path}, of a job that is over, cannot be deleted: {why}")
        self._not_before_s[path] = self._monotonic_s() + RETRY_S
        self._left.append(path)
