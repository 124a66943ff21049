# SPDX-License-Identifier: Apache-2.0
"""The service as a process: open, load, listen, decide, and end orderly."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from horowatt.errors import NeedsOperator
from horowatt_allocator.adapters.clock import SystemClock
from horowatt_allocator.adapters.config import load_config
from horowatt_allocator.adapters.inventory import load_inventory
from horowatt_allocator.adapters.store import SqlStore
from horowatt_allocator.service.app import create_public_app, create_socket_app
from horowatt_allocator.service.core import Core, Ticker
from horowatt_allocator.service.dependencies import Bell, Services
from horowatt_allocator.service.identity import Registry
from horowatt_allocator.service.listeners import bind_tcp, bind_unix, serve

DEFAULT_HTTP_PORT = 9477
CHECK_VARIABLE = "HOROWATT_CHECK_INVARIANTS"
"""Set to 1 to have every step checked against the invariants; tests do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How to run the service.

    Attributes:
        state_dir: Folder of the database; made when it is absent.
        http_host: A loopback address, or ``localhost``.
        http_port: Port of the read-only HTTP interface; 0 takes a free one, None opens none.
        config_path: Configuration file, or None for the defaults.
    """

    state_dir: Path
    socket_path: Path
    inventory_path: Path
    config_path: Path | None = None
    http_host: str = "127.0.0.1"
    http_port: int | None = DEFAULT_HTTP_PORT


def run(config: ServeConfig) -> int:
    """Serve until SIGTERM or SIGINT, then return 0.

    Prints one line when it answers. Running jobs go on when the service ends.

    Raises:
        HorowattError: when it cannot start; nothing is changed then, apart from migrations.
    """
    # Whatever the service writes is its own; the socket alone is opened to others, explicitly.
    os.umask(0o077)
    _log_to_stderr()
    inventory = load_inventory(config.inventory_path)
    settings = load_config(config.config_path)
    clock = SystemClock()
    _prepare_state_dir(config)
    with contextlib.ExitStack() as cleanup:
        store = SqlStore.open(config.state_dir, clock.now_s())
        cleanup.callback(store.close)
        core = Core(store, clock, inventory, settings, check_invariants=os.environ.get(CHECK_VARIABLE) == "1")
        bell = Bell()
        core.on_commit(bell.ring)
        services = Services(core, Registry(settings, os.geteuid()), bell)
        unix = bind_unix(config.socket_path)
        cleanup.callback(_remove_socket, config.socket_path, config.socket_path.stat().st_ino)
        cleanup.callback(unix.close)
        tcp = None if config.http_port is None else bind_tcp(config.http_host, config.http_port)
        if tcp is not None:
            cleanup.callback(tcp.close)
        ticker = Ticker(core)
        ticker.start()
        cleanup.callback(ticker.stop)
        asyncio.run(_serve(config, services, unix, tcp))
    return 0


async def _serve(
    config: ServeConfig, services: Services, unix: socket.socket, tcp: socket.socket | None
) -> None:
    services.bell.attach(asyncio.get_running_loop())

    def say_ready() -> None:
        places = [str(config.socket_path)]
        if tcp is not None:
            host, port = tcp.getsockname()[:2]
            places.append(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        sys.stdout.write(f"serving on {' and '.join(places)}, pid {os.getpid()}\n")
        sys.stdout.flush()

    await serve(
        (create_socket_app(services), unix),
        None if tcp is None else (create_public_app(services), tcp),
        on_ready=say_ready,
        on_signal=services.bell.close,
    )


def _prepare_state_dir(config: ServeConfig) -> None:
    folder = config.state_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid == os.geteuid():
            # Users must get through to a socket inside; what else is there is readable by nobody else.
            inside = config.socket_path.absolute().is_relative_to(folder.absolute())
            folder.chmod(0o711 if inside else 0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"user {os.geteuid()} may not write to it")
    except OSError as error:
        raise NeedsOperator(
            "HW-SRV-001",
            f"the state folder {folder} cannot be used",
            because=error.strerror or str(error),
            hint="choose another --state-dir, or give the folder to the service's user",
            fields={"state_dir": str(folder)},
        ) from error


def _remove_socket(path: Path, inode: int) -> None:
    # Somebody may have put another socket there meanwhile; that one is not ours to remove.
    with contextlib.suppress(OSError):
        if path.stat().st_ino == inode:
            path.unlink()


def _log_to_stderr() -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for noisy in ("alembic", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
