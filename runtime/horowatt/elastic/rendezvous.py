# SPDX-License-Identifier: Apache-2.0
"""Where a job's workers and its launcher find each other, closed to everybody else.

Horovod's rendezvous server answers whoever reaches its port, unpickles what it is sent
(CVE-2024-10190) and tells the keys of the workers' notification services. Here every request must carry
the job's token, which the launcher makes and its workers inherit as ``HOROWATT_RENDEZVOUS_TOKEN``. What
has no token, or another one, is refused before anything of it is looked at, and nothing that comes over
the network is unpickled by the server.

Three parties send the token: Horovod's C++ store (patched in ``horowatt.horovod_build.patches``),
Horovod's Python client (patched by ``client_hooks`` in the worker) and ``fetch``. Without a token in its
environment a worker behaves as Horovod does by itself, which is what a user's own ``horovodrun`` needs.

Ports come from ``HOROWATT_PORTS`` ("20000-20999") when it is set: those of this server, of the workers'
notification services and, through the patched Gloo, of the workers' connections among each other.
"""

import contextlib
import errno
import hmac
import http.client
import io
import logging
import os
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType
from typing import Any, TypeVar, cast

import msgspec

from horowatt.elastic.network import address_towards
from horowatt.errors import InvalidInput, NotAllowed, RetryLater
from horowatt.wire import decode, encode

TOKEN_VARIABLE = "HOROWATT_RENDEZVOUS_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_HEADER = "X-Horowatt-Token"  # noqa: S105 - the name of a header
PORTS_VARIABLE = "HOROWATT_PORTS"
ADDRESS_VARIABLE = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
PORT_VARIABLE = "HOROVOD_GLOO_RENDEZVOUS_PORT"
INTERFACE_VARIABLE = "HOROVOD_GLOO_IFACE"

TOKEN_BYTES = 32
HEADER_S = 5.0
"""From the connection to the end of the request's header, seconds, however it trickles in."""
HEADER_BYTES = 16 * 1024
BODY_S = 10.0
BODY_BYTES = 1024 * 1024
"""Largest value: the addresses that one worker of about 7,000 offers to its peers."""
SEND_S = 10.0
HOLD_S = 0.5
"""How long the answer to a question for a value that is not there yet is held back, seconds. Workers ask for
each other's addresses a hundred times a second otherwise, and learn of them ten milliseconds late."""
DRAIN_S = 1.0
DRAIN_BYTES = 64 * 1024
STRANGERS = 256
"""Connections without the token so far; the oldest makes room for the next one."""
BACKLOG = 1024
"""Connections the kernel queues: workers poll a hundred times a second each, and a full queue costs the one
that comes too late a whole second."""
ACCEPT_PAUSE_S = 0.05
MESSAGE_BYTES = 1024 * 1024
REQUEST_S = 10.0
"""How long a notification service waits for the next part of a request, seconds."""
_HIGHEST_PORT = 65535
_PATH_PARTS = 3
_LENGTH_DIGITS = 12
_WORKER_ADDRESSES = "worker_addresses"

T = TypeVar("T")
_log = logging.getLogger(__name__)


def new_token() -> str:
    """Return a new secret for one job, in hexadecimal."""
    return secrets.token_hex(TOKEN_BYTES)


# ------------------------------------------------------------------------------------------- ports


def parse_ports(text: str) -> range | None:
    """Return the ports that ``"20000-20999"`` names, both ends included, or None for an empty text.

    Raises:
        InvalidInput: ``HW-RDV-001`` when it is no range of ports.
    """
    if not text:
        return None
    first, dash, last = text.partition("-")
    if dash and first.isascii() and first.isdigit() and last.isascii() and last.isdigit():
        ports = range(int(first), int(last) + 1)
        if ports and ports[0] > 0 and ports[-1] <= _HIGHEST_PORT:
            return ports
    raise InvalidInput(
        "HW-RDV-001",
        f"{PORTS_VARIABLE}={text!r} is no range of ports",
        hint="write the first and the last one, such as 20000-20999, both between 1 and 65535",
        fields={PORTS_VARIABLE: text},
    )


def bind_in(ports: range | None, bind: Callable[[int], T]) -> T:
    """Return what ``bind`` makes of the first free port of a range, tried from a random one on.

    Args:
        ports: The range, or None for any port, for which ``bind`` is called with 0.
        bind: Binds and listens; ``OSError`` with ``EADDRINUSE`` means that somebody else has the port.

    Raises:
        RetryLater: ``HW-RDV-002`` when none of the ports is free.
    """
    if ports is None:
        return bind(0)
    start = secrets.randbelow(len(ports))
    for offset in range(len(ports)):
        try:
            return bind(ports[(start + offset) % len(ports)])
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise RetryLater(
        "HW-RDV-002",
        f"none of the ports {ports[0]} to {ports[-1]} is free",
        because=f"{PORTS_VARIABLE} allows no others, and the jobs of this machine use them all",
        hint="widen the range, or run fewer jobs on one machine",
    )


# ------------------------------------------------------------------------------------------ server


class _WorkerService(msgspec.Struct, frozen=True):
    """What a worker says about its notification service: JSON, where Horovod sends a pickle."""

    addresses: dict[str, list[tuple[str, int]]]
    """Addresses and ports by network interface."""
    key: str
    """Key of the service's messages, in hexadecimal."""


class _Incoming(io.RawIOBase):
    """What a connection sends, up to a time and a size: whoever is slow or verbose is cut off."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline_s = 0.0
        self._left = 0

    def allow(self, seconds_s: float, size: int) -> None:
        """Accept ``size`` more bytes, until ``seconds_s`` from now."""
        self._deadline_s = time.monotonic() + seconds_s
        self._left += size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        self._connection.settimeout(remaining_s)
        received = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= received
        return received


class _Guard(BaseHTTPRequestHandler):
    """Stands before Horovod's handler, which it leaves only the meaning of scopes and keys."""

    timeout = SEND_S
    disable_nagle_algorithm = True
    server: "_Listener"

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._incoming = _Incoming(self.connection)
        self._incoming.allow(HEADER_S, HEADER_BYTES)
        self.rfile = io.BufferedReader(self._incoming)

    def parse_request(self) -> bool:
        """Read the header, and go on only when the token in it is right."""
        if not super().parse_request():
            return False
        given = self.headers.get(TOKEN_HEADER, "")
        if not hmac.compare_digest(given.encode(), self.server.token):
            self.server.note_refusal(self.client_address[0])
            self._answer(HTTPStatus.FORBIDDEN, b"this is not the token of this job\n")
            self._drain()
            return False
        self.server.admit(self.connection)
        return True

    def do_GET(self) -> None:
        """Answer with the value of a key, or 404."""
        place = self._place()
        if place is None:
            return
        value = self._asked(lambda: self._value(*place))
        if value is not _FAILED:
            self._answer(HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK, value or b"")

    def do_PUT(self) -> None:
        """Store a value, or take note of a worker's notification service."""
        place = self._place()
        if place is None:
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) <= _LENGTH_DIGITS):
            self._answer(HTTPStatus.LENGTH_REQUIRED)
            return
        if int(length) > BODY_BYTES:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            self._drain()
            return
        self._incoming.allow(BODY_S, int(length))
        try:
            value = self.rfile.read(int(length))
        except TimeoutError:
            self._answer(HTTPStatus.REQUEST_TIMEOUT)
            return
        if len(value) < int(length):
            self._answer(HTTPStatus.BAD_REQUEST)
        elif self._asked(lambda: self._store(*place, value)) is not _FAILED:
            self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        """Take note that a worker is done with a scope; the last one takes the scope's keys with it."""
        place = self._place()
        if place is not None:
            self.server.finish(*place)
            self._answer(HTTPStatus.OK)

    def do_HEAD(self) -> None:
        """Refuse: what Horovod inherits here tells about the files of the working directory."""
        self._answer(HTTPStatus.NOT_IMPLEMENTED)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - named by http.server
        """Log nothing: workers ask hundreds of times per rendezvous."""

    def _place(self) -> tuple[str, str] | None:
        parts = self.path.split("/")
        if len(parts) == _PATH_PARTS and not parts[0] and parts[1] and parts[2]:
            return parts[1], parts[2]
        self._answer(HTTPStatus.BAD_REQUEST)
        return None

    def _value(self, scope: str, key: str) -> bytes | None:
        """Return a value, if need be as soon as it is there."""
        # Gloo asks for host names once, and goes on without those that are not there.
        if scope not in self.server.scope_size or key.startswith("rank_"):
            return cast("bytes | None", self._get_value(scope, key))  # type: ignore[attr-defined]
        deadline_s = time.monotonic() + HOLD_S
        with self.server.changed:
            while (value := self._get_value(scope, key)) is None:  # type: ignore[attr-defined]
                if not self.server.changed.wait(deadline_s - time.monotonic()):
                    return None
        return cast("bytes", value)

    def _store(self, scope: str, key: str, value: bytes) -> None:
        if scope == _WORKER_ADDRESSES and hasattr(self, "_put_worker_addresses"):
            host, _, local_rank = key.rpartition(":")
            service = decode(value, _WorkerService)
            # It is not stored as well: nobody asks for it, and it holds a key.
            self._put_worker_addresses(host, int(local_rank), service.addresses, bytes.fromhex(service.key))
        else:
            self._put_value(scope, key, value)  # type: ignore[attr-defined]
            with self.server.changed:
                self.server.changed.notify_all()

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """Return Horovod's answer, or ``_FAILED`` after having said to the worker that there is none."""
        try:
            return ask()
        except (ValueError, InvalidInput) as error:
            _log.warning("%s %s makes no sense: %s", self.command, self.path, error)
            self._answer(HTTPStatus.BAD_REQUEST)
        except Exception as error:  # noqa: BLE001 - the worker is told, whatever it is
            _log.warning("no answer to %s %s: %s: %s", self.command, self.path, type(error).__name__, error)
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE)
        return _FAILED

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        self.close_connection = True
        self.connection.settimeout(SEND_S)
        # A worker that died meanwhile does not need the answer.
        with contextlib.suppress(OSError):
            self.send_response_only(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def _drain(self) -> None:
        """Discard what still comes: who is cut off while sending never sees the answer."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self._incoming.allow(DRAIN_S, DRAIN_BYTES)
            while self.rfile.read1(HEADER_BYTES):
                pass


_FAILED = object()


class _Listener(socketserver.ThreadingMixIn, HTTPServer):
    """Accepts connections, each with a thread of its own, and knows which of them are strangers'."""

    # A handler blocks for as long as its worker waits for the others; it must not outlive the job.
    daemon_threads = True
    block_on_close = False
    request_queue_size = BACKLOG
    token: bytes
    # From Horovod's server.
    cache: dict[str, dict[str, bytes]]
    cache_lock: threading.Lock
    scope_size: dict[str, int]
    finished_list: dict[str, list[str]]
    finished_list_lock: threading.Lock

    def prepare(self, token: str) -> None:
        """Set what the requests need, before the first one is accepted."""
        self.token = token.encode()
        self.refused = 0
        self.changed = threading.Condition()
        self._strangers: dict[socket.socket, None] = {}
        self._strangers_lock = threading.Lock()
        self._closing = False

    def server_bind(self) -> None:
        # HTTPServer also looks up the host's name, which may take seconds and is used for nothing.
        socketserver.TCPServer.server_bind(self)

    def serve_forever(self, poll_interval: float = 0.5) -> None:  # noqa: ARG002
        """Accept until ``shutdown``, without ever waking up for nothing."""
        while not self._closing:
            try:
                request, client = self.get_request()
            except OSError:
                if not self._closing:
                    # Mostly out of descriptors, until some connection ends.
                    time.sleep(ACCEPT_PAUSE_S)
                continue
            try:
                self._meet(request)
                self.process_request(request, client)
            except Exception:  # noqa: BLE001 - no thread for this one: the next may get one
                self.handle_error(request, client)
                self.shutdown_request(request)

    def shutdown(self) -> None:
        """Stop accepting, at once; requests that are being answered go on."""
        self._closing = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        with self._strangers_lock:
            for connection in self._strangers:
                _hang_up(connection)

    def shutdown_request(self, request: Any) -> None:
        self.admit(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Say little: strangers can cause as many errors as they like."""
        _log.debug("a connection of %s failed", client_address, exc_info=True)

    def _meet(self, connection: socket.socket) -> None:
        with self._strangers_lock:
            if len(self._strangers) >= STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _hang_up(oldest)
            self._strangers[connection] = None

    def admit(self, connection: socket.socket) -> None:
        """Take note that a connection is no stranger's, or has ended."""
        with self._strangers_lock:
            self._strangers.pop(connection, None)

    def note_refusal(self, address: str) -> None:
        """Count a refused request, and log some of them: all would fill a disk."""
        with self._strangers_lock:
            self.refused += 1
            refused = self.refused
        if refused.bit_count() == 1:
            _log.warning("refused a request without the job's token from %s (%d so far)", address, refused)

    def finish(self, scope: str, key: str) -> None:
        """Take note that rank ``key`` needs nothing of a scope any more.

        The keys of a scope of the present world go once all its ranks have said so; those of a scope
        that workers made up themselves (process sets), rank by rank.
        """
        with self.finished_list_lock, self.cache_lock:
            size = self.scope_size.get(scope)
            if size is None:
                values = self.cache.get(scope, {})
                values.pop(key, None)
                values.pop(f"rank_{key}", None)
                if not values:
                    self.cache.pop(scope, None)
                return
            # A rank may come twice: its own last world's request may be late, and requests are repeated.
            finished = self.finished_list[scope]
            if key not in finished:
                finished.append(key)
            if len(finished) >= size:
                self.cache.pop(scope, None)
                del self.finished_list[scope]


def _hang_up(connection: socket.socket) -> None:
    # Not closed: its thread may be about to read from a descriptor that would be somebody else's then.
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def make_server(address: str, token: str, ports: range | None = None) -> Any:
    """Return Horovod's ``RendezvousServer``, closed to everybody without the token.

    ``start(handler_cls)`` takes what ``create_rendezvous_handler(driver)`` returns and gives the port;
    it raises ``RetryLater`` (``HW-RDV-002``) when no port of the range is free. ``stop()`` closes the
    socket and may be repeated; requests of workers that are waiting for the others stay unanswered.

    Args:
        address: IPv4 address of this node to listen on.
        token: Every request must carry it in the header ``X-Horowatt-Token``.
        ports: Ports to choose from; None for any.
    """
    if not token:
        raise ValueError("a rendezvous server without a token would be open to everybody")
    from horovod.runner.http import http_server

    class Listener(_Listener, http_server.RendezvousHTTPServer):  # type: ignore[misc]
        pass

    class RendezvousServer(http_server.RendezvousServer):  # type: ignore[misc]
        def start(self, handler_cls: Any = http_server.RendezvousHandler) -> int:
            handler = type("GuardedHandler", (_Guard, handler_cls), {})

            def bind(port: int) -> Any:
                return Listener((address, port), handler, self._verbose)

            self._httpd = bind_in(ports, bind)
            self._httpd.prepare(token)
            self._listen_thread = threading.Thread(
                target=self._httpd.serve_forever, name="rendezvous", daemon=True
            )
            self._listen_thread.start()
            return int(self._httpd.server_address[1])

        def stop(self) -> None:
            if self._httpd is not None:
                self._httpd.shutdown()
                self._listen_thread.join()
                self._httpd.server_close()

        @property
        def refused(self) -> int:
            """How many requests were refused."""
            return int(self._httpd.refused)

    return RendezvousServer()


# ----------------------------------------------------------------------------------------- workers


def fetch(path: str) -> bytes:
    """Return what the job's rendezvous server answers to a GET of ``path``, waiting as long as it does.

    Address, port and token are those of the environment at the time of the call.

    Raises:
        NotAllowed: ``HW-RDV-003`` when the token is not the job's.
        RetryLater: ``HW-RDV-004`` when the server cannot be reached or has no answer.
    """
    return _request(os.environ[ADDRESS_VARIABLE], int(os.environ[PORT_VARIABLE]), "GET", path)


def _request(address: str, port: int, method: str, path: str, body: bytes | None = None) -> bytes:
    # Neither proxies nor redirections: the environment of a user's script is for the outside.
    connection = http.client.HTTPConnection(address, port)
    token = os.environ.get(TOKEN_VARIABLE, "")
    path = f"/{path.lstrip('/')}"
    try:
        connection.request(method, path, body, {TOKEN_HEADER: token} if token else {})
        response = connection.getresponse()
        status, content = response.status, response.read(BODY_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise RetryLater(
            "HW-RDV-004",
            f"the job's launcher at {address} port {port} does not answer",
            because=str(error) or type(error).__name__,
            hint="see the job's stream 'launcher': 'horowatt logs JOB --stream launcher'",
        ) from error
    finally:
        connection.close()
    if status == HTTPStatus.FORBIDDEN:
        raise NotAllowed(
            "HW-RDV-003",
            f"the job's rendezvous server at {address} port {port} refused this worker",
            because=f"{TOKEN_VARIABLE} is {'not the token of that job' if token else 'not set'}",
            hint="workers get it from their launcher; a script must not change it",
        )
    if status != HTTPStatus.OK:
        raise RetryLater(
            "HW-RDV-004",
            f"the job's launcher at {address} port {port} has no answer to {method} {path}",
            because=f"HTTP status {status}",
            hint="see the job's stream 'launcher': 'horowatt logs JOB --stream launcher'",
        )
    return content


def client_hooks() -> Mapping[str, Callable[[ModuleType], None]]:
    """Return what to do to modules of Horovod once a worker's script has imported them, by module name.

    Horovod's client sends the token, and addresses as JSON; its notification service listens on the
    job's interface only, on a port of the range, and bounds what strangers can make it hold.
    """
    return {
        "horovod.runner.http.http_client": _patch_client,
        "horovod.runner.common.util.network": _patch_service,
    }


def _patch_client(module: ModuleType) -> None:
    put, read = module.put_data_into_kvstore, module.read_data_from_kvstore

    def put_data_into_kvstore(addr: str, port: int, scope: str, key: str, value: Any) -> None:
        if not os.environ.get(TOKEN_VARIABLE):
            put(addr, port, scope, key, value)
            return
        if scope == _WORKER_ADDRESSES:
            addresses, secret = value
            body = encode(_WorkerService(addresses=addresses, key=secret.hex()))
        else:
            body = module.codec.dumps_base64(value, to_ascii=False)
        _request(addr, int(port), "PUT", f"{scope}/{key}", body)

    def read_data_from_kvstore(addr: str, port: int, scope: str, key: str) -> Any:
        if not os.environ.get(TOKEN_VARIABLE):
            return read(addr, port, scope, key)
        return module.codec.loads_base64(_request(addr, int(port), "GET", f"{scope}/{key}"))

    module.put_data_into_kvstore = put_data_into_kvstore  # type: ignore[attr-defined]
    module.read_data_from_kvstore = read_data_from_kvstore  # type: ignore[attr-defined]


def _patch_service(module: ModuleType) -> None:
    find_port, service, wire = module.find_port, module.BasicService, module.Wire
    local_addresses, make_handler = service._get_local_addresses, service._make_handler  # noqa: SLF001

    def find_port_in_range(server_factory: Callable[[tuple[str, int]], Any]) -> tuple[Any, int]:
        ports = parse_ports(os.environ.get(PORTS_VARIABLE, ""))
        address = _own_address(module) if os.environ.get(TOKEN_VARIABLE) else ""
        if ports is None and not address:
            server, _ = find_port(server_factory)
        else:
            server = bind_in(ports, lambda port: server_factory((address, port)))
        # A stranger who connects and says nothing must not keep the worker from ending.
        server.daemon_threads = True
        server.block_on_close = False
        server.handle_error = _note_error
        return server, int(server.server_address[1])

    def own_addresses(self: Any) -> dict[str, list[tuple[str, int]]]:
        address, port = self._server.server_address
        if address == "0.0.0.0":  # noqa: S104 - a comparison
            addresses: dict[str, list[tuple[str, int]]] = local_addresses(self)
            return addresses
        return {os.environ.get(INTERFACE_VARIABLE, "own"): [(address, port)]}

    def make_patient_handler(self: Any) -> Any:
        handler = make_handler(self)
        handler.timeout = REQUEST_S
        return handler

    read = wire.read

    def read_bounded(self: Any, rfile: Any) -> Any:
        return read(self, _Bounded(rfile))

    module.find_port = find_port_in_range  # type: ignore[attr-defined]
    service._get_local_addresses = own_addresses  # noqa: SLF001
    service._make_handler = make_patient_handler  # noqa: SLF001
    wire.read = read_bounded


class _Bounded:
    """Reads no message whose announced length no real message has; it ends before it is authenticated."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MESSAGE_BYTES:
            raise EOFError(f"a message of {size} bytes")
        content: bytes = self._stream.read(size)
        if len(content) < size:
            raise EOFError("the message ended early")
        return content


def _note_error(request: Any, client_address: Any) -> None:  # noqa: ARG001
    _log.debug("a connection of %s to the notification service failed", client_address, exc_info=True)


def _own_address(network: ModuleType) -> str:
    """Return the IPv4 address of this worker that its launcher reaches, and Gloo uses."""
    interface = os.environ.get(INTERFACE_VARIABLE, "")
    for candidate in network.psutil.net_if_addrs().get(interface, []):
        if candidate.family == socket.AF_INET:
            return str(candidate.address)
    return address_towards(os.environ.get(ADDRESS_VARIABLE, "")) or ""
