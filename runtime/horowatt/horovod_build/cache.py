# SPDX-License-Identifier: Apache-2.0
"""Where finished wheels are kept, outside any clone, and how two builds keep out of each other's way.

    ROOT/sdist/horovod-0.28.1.tar.gz     the archive, checked each time it is used
    ROOT/<key>.lock                      held by ``flock`` while somebody builds that wheel
    ROOT/<key>/horovod-....whl           the wheel
    ROOT/<key>/key.json                  what is in it, and the wheel's own SHA-256
    ROOT/<key>/build.log                 everything that the last build printed

``key.json`` is written last. A wheel is only used when it has the SHA-256 that its ``key.json`` names,
so a half-written or damaged one is never installed.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from horowatt.errors import NeedsOperator
from horowatt.files import write_atomic

LOCK_POLL_S = 0.5
LOCK_NOTICE_S = 15.0
"""How often somebody who waits for another build is told so."""


@dataclass(frozen=True, slots=True)
class StoredWheel:
    """A wheel of the cache that is whole."""

    wheel: Path
    sha256: str
    features: Mapping[str, bool]
    """``gloo``, ``mpi``, ``nccl``: what was found to be built in when the wheel was first imported."""


def default_root(environ: Mapping[str, str]) -> Path:
    """Return the folder of Horovod's wheels: ``$HOROWATT_CACHE_DIR``, else the user's cache folder."""
    if environ.get("HOROWATT_CACHE_DIR"):
        return Path(environ["HOROWATT_CACHE_DIR"]).absolute() / "horovod"
    base = environ.get("XDG_CACHE_HOME", "")
    cache = Path(base) if base.startswith("/") else Path("~/.cache").expanduser()
    return cache / "horowatt" / "horovod"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class WheelCache:
    """The folders described above, for one root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def sdist_folder(self) -> Path:
        """Folder of the downloaded archive."""
        return self.root / "sdist"

    def folder(self, key: str) -> Path:
        """Return the folder of one wheel."""
        return self.root / key

    def create(self, key: str) -> None:
        """Make the folders of one wheel.

        Raises:
            NeedsOperator: ``HW-BLD-010`` when that is not possible.
        """
        try:
            self.sdist_folder.mkdir(parents=True, exist_ok=True)
            self.folder(key).mkdir(exist_ok=True)
        except OSError as error:
            raise NeedsOperator(
                "HW-BLD-010",
                f"the cache folder {self.root} cannot be written",
                because=error.strerror or str(error),
                hint="name another one with --cache-dir or HOROWATT_CACHE_DIR",
                fields={"cache_dir": str(self.root)},
            ) from error

    def find(self, key: str) -> StoredWheel | None:
        """Return the wheel of this key, or None when there is none that is whole."""
        folder = self.folder(key)
        try:
            about = json.loads((folder / "key.json").read_bytes())
            wheel = folder / Path(about["wheel"]).name
            if sha256_of(wheel) != about["sha256"]:
                return None
            features = {str(name): bool(value) for name, value in about["features"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return StoredWheel(wheel, about["sha256"], features)

    def store(
        self, key: str, wheel: Path, parts: Mapping[str, str], features: Mapping[str, bool]
    ) -> StoredWheel:
        """Move a finished wheel into the cache; until ``key.json`` names it, nobody uses it."""
        target = self.folder(key) / wheel.name
        sha256 = sha256_of(wheel)
        wheel.replace(target)
        about = {
            "wheel": target.name,
            "sha256": sha256,
            "features": dict(features),
            "built_at_s": time.time(),
            "ingredients": dict(parts),
        }
        write_atomic(target.parent / "key.json", json.dumps(about, indent=2).encode() + b"\n", mode=0o644)
        return StoredWheel(target, sha256, dict(features))

    @contextmanager
    def building(self, key: str, say: Callable[[str], None]) -> Iterator[None]:
        """Hold the right to build this wheel; who comes second waits and is told so."""
        with (self.root / f"{key}.lock").open("a+b") as lock:
            waited_s = 0.0
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if waited_s % LOCK_NOTICE_S < LOCK_POLL_S:
                        say(f"another process builds this wheel: waiting for it ({waited_s:.0f} s so far)")
                    time.sleep(LOCK_POLL_S)
                    waited_s += LOCK_POLL_S
            os.ftruncate(lock.fileno(), 0)
            os.write(lock.fileno(), f"{os.getpid()}\n".encode())
            yield
