# SPDX-License-Identifier: Apache-2.0
"""Where the service listens: a Unix socket whose callers the kernel names, and a port on loopback."""

import asyncio
import contextlib
import errno
import ipaddress
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from fastapi import FastAPI
from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from horowatt.errors import InvalidInput, NeedsOperator
from horowatt_allocator.service.identity import peer_of

MAX_SOCKET_PATH_BYTES = 107
"""What ``struct sockaddr_un`` of Linux holds, less its final zero."""
_BACKLOG = 1024
_CONNECT_TIMEOUT_S = 2.0
_GRACE_S = 5
"""How long requests under way may take once the service is told to end."""


class PeerProtocol(HttpToolsProtocol):
    """HTTP over a Unix socket that tells the application who is at the other end."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Ask the kernel once per connection; it remembers who connected."""
        connection = transport.get_extra_info("socket")
        # The state is handed to each request of this connection; no client can write to it.
        self.app_state = {**self.app_state, "peer": peer_of(connection)}
        super().connection_made(transport)


def bind_unix(path: Path) -> socket.socket:
    """Return a listening Unix socket that every user of the machine may connect to.

    That is safe because the kernel names every caller. A socket file that nobody answers on is left
    over from a service that was killed, and is replaced.

    Raises:
        InvalidInput: ``HW-SRV-007`` the path is too long, ``HW-SRV-008`` something else is there.
        NeedsOperator: ``HW-SRV-005`` a service answers there, ``HW-SRV-006`` the folder cannot be
            used.
    """
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise InvalidInput(
            "HW-SRV-007",
            f"the path of the socket is too long: {path}",
            because=f"it has {len(os.fsencode(path))} bytes, Linux allows {MAX_SOCKET_PATH_BYTES}",
            hint="choose a shorter path, for example under /run",
            fields={"socket": str(path)},
        )
    _prepare_folder(path)
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise _in_use(path) from error
        raise _folder_error(path, error.strerror or str(error)) from error
    listener.setblocking(False)
    return listener


def _prepare_folder(path: Path) -> None:
    folder = path.parent
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            folder.chmod(0o755)  # whatever the umask: users must reach the socket
        status = folder.stat()
    except OSError as error:
        raise _folder_error(path, error.strerror or str(error)) from error
    if not stat.S_ISDIR(status.st_mode):
        raise _folder_error(path, f"{folder} is not a folder")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise _folder_error(
            path, f"everybody may write to {folder}, so anybody could put another socket in its place"
        )


def _folder_error(path: Path, because: str) -> NeedsOperator:
    return NeedsOperator(
        "HW-SRV-006",
        f"the socket {path} cannot be made",
        because=because,
        hint="choose a folder that only the service's user can write to",
        fields={"socket": str(path)},
    )


def _in_use(path: Path) -> NeedsOperator:
    return NeedsOperator(
        "HW-SRV-005",
        f"a service already answers on {path}",
        hint="stop it first, or give this service another --socket",
        fields={"socket": str(path)},
    )


def _remove_stale(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise _folder_error(path, error.strerror or str(error)) from error
    if not stat.S_ISSOCK(status.st_mode):
        raise InvalidInput(
            "HW-SRV-008",
            f"{path} is there and is not a socket",
            because="the service would have to delete it",
            hint="move it away, or give the service another --socket",
            fields={"socket": str(path)},
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            # Full backlog or no permission: somebody is there.
            raise _in_use(path) from error
    raise _in_use(path)


def bind_tcp(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket on a loopback address.

    Raises:
        InvalidInput: ``HW-SRV-004`` the address is not a loopback address, or the port is none.
        NeedsOperator: ``HW-SRV-003`` the port is taken or may not be used.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        loopback = address.is_loopback
    except ValueError:
        loopback = False
    if not loopback or not 0 <= port < 1 << 16:
        raise InvalidInput(
            "HW-SRV-004",
            f"the service cannot listen on {host}:{port}",
            because="callers over TCP are anonymous, so only loopback addresses are possible",
            hint="use 127.0.0.1 with a free port, and forward it by ssh to look at it from elsewhere",
            fields={"host": host, "port": str(port)},
        )
    listener = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)  # noqa: PLR2004
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((str(address), port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise NeedsOperator(
            "HW-SRV-003",
            f"port {port} on {host} cannot be used",
            because="another program listens there"
            if error.errno == errno.EADDRINUSE
            else error.strerror or str(error),
            hint=f"'ss -ltnp sport = :{port}' names that program; stop it or choose another port with --http",
            fields={"host": host, "port": str(port)},
        ) from error
    listener.setblocking(False)
    return listener


class _Server(Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: two servers run in this process, and one handler ends both."""
        yield


def _server(app: FastAPI, protocol: type[asyncio.Protocol]) -> Server:
    return _Server(
        Config(
            app,
            http=protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )


async def serve(
    unix: tuple[FastAPI, socket.socket],
    tcp: tuple[FastAPI, socket.socket] | None,
    *,
    on_ready: Callable[[], None],
    on_signal: Callable[[], None],
) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends at once."""
    servers = [(_server(unix[0], PeerProtocol), unix[1])]
    if tcp is not None:
        servers.append((_server(tcp[0], HttpToolsProtocol), tcp[1]))

    def end() -> None:
        for server, _ in servers:
            server.force_exit = server.should_exit
            server.should_exit = True
        on_signal()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    tasks = [asyncio.create_task(server.serve(sockets=[listener])) for server, listener in servers]
    try:
        while not all(server.started for server, _ in servers):
            if done := next((task for task in tasks if task.done()), None):
                done.result()
                break
            await asyncio.sleep(0.01)
        else:
            on_ready()
        await asyncio.gather(*tasks)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
