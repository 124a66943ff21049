# SPDX-License-Identifier: Apache-2.0
"""The two HTTP applications: all of it on the Unix socket, a little of it on loopback TCP.

On the socket every caller is known by the kernel. Over TCP nobody is: there the cluster's public
figures can be read, and everything else is refused with a hint to use the socket.
"""

import asyncio
import contextlib
import ipaddress
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
from fastapi import Depends, FastAPI, Request, Response

from horowatt import __version__
from horowatt.errors import InvalidInput, NotAllowed, RetryLater
from horowatt_allocator.service.core import Core
from horowatt_allocator.service.identity import Caller, PeerCred, Registry
from horowatt_allocator.service.problems import add_handlers, problem
from horowatt_allocator.service.views import Document, cluster_view, listing, node_view

MAX_SUBMIT_BYTES = 1 << 20
MAX_REPORT_BYTES = 8 << 20

STALE_AFTER_S = 30.0
"""A core that committed nothing for so long, although it ticks every second, is not ready."""


class Bell:
    """Wakes coroutines of one event loop when something was committed on any thread.

    A coroutine takes a ticket before it looks, and waits with it afterwards: what rings in between
    is not missed.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()
        self.closing = False

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the loop whose coroutines wait."""
        self._loop = loop

    def ring(self) -> None:
        """Wake all who wait; may be called from any thread."""
        if self._loop is not None:
            # The loop closes while the last commits still come in.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        """Wake all who wait, for good."""
        self.closing = True
        self.ring()

    def time(self) -> float:
        """Return the loop's time, seconds."""
        return asyncio.get_running_loop().time()

    def ticket(self) -> asyncio.Event:
        """Return what the next ring sets."""
        return self._event

    def _wake(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, ticket: asyncio.Event, timeout_s: float) -> None:
        """Wait until the bell rings after the ticket was taken, or the time is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ticket.wait(), timeout_s)


class Services:
    """What the routes need; one object per process, found in ``app.state.services``."""

    def __init__(self, core: Core, registry: Registry, bell: Bell) -> None:
        self.core = core
        self.registry = registry
        self.bell = bell


def json_response(document: object, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(document), status_code=status, media_type="application/json")


def services_of(request: Request) -> Services:
    """Return what the routes need."""
    services: Services = request.app.state.services
    return services


def caller_of(request: Request) -> Caller:
    """Return who calls over the socket."""
    peer = request.scope.get("state", {}).get("peer")
    if not isinstance(peer, PeerCred):
        raise NotAllowed(
            "HW-API-006",
            "it is not known who calls",
            because="the connection did not come over the Unix socket",
            hint="use the service's Unix socket",
        )
    return services_of(request).registry.caller(peer)


TheServices = Annotated[Services, Depends(services_of)]
TheCaller = Annotated[Caller, Depends(caller_of)]


def body_of_at_most(limit_bytes: int) -> Callable[[Request], Awaitable[bytes]]:
    """Return a dependency that reads the body of a request, but not more than it may be."""

    async def read(request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit_bytes:
                raise InvalidInput(
                    "HW-API-004",
                    "the body of this request is too large",
                    because=f"it has more than {limit_bytes} bytes",
                    hint="shorten the command or the environment",
                )
            parts.append(part)
        return b"".join(parts)

    return read


SubmitBytes = Annotated[bytes, Depends(body_of_at_most(MAX_SUBMIT_BYTES))]
ReportBytes = Annotated[bytes, Depends(body_of_at_most(MAX_REPORT_BYTES))]


def create_socket_app(services: Services) -> FastAPI:
    """Return the application of the Unix socket."""
    from horowatt_allocator.service import routes_agents, routes_cluster, routes_jobs

    app = FastAPI(title="Horowatt", version=__version__, docs_url=None, redoc_url=None)
    app.state.services = services
    add_handlers(app)
    for router in (routes_jobs.router, routes_cluster.router, routes_agents.router):
        app.include_router(router)
    return app


def create_public_app(services: Services) -> FastAPI:
    """Return the application of the loopback port: read-only, anonymous."""
    app = FastAPI(title="Horowatt", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.services = services
    add_handlers(app)

    @app.middleware("http")
    async def _local_names_only(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        # A web page can make a browser connect to loopback under a name of the page's own; the
        # browser then sends that name.
        if not _is_local(request.headers.get("host", "")):
            return problem(
                NotAllowed(
                    "HW-API-007",
                    "this host name is not served",
                    because="the Host header is neither localhost nor a loopback address",
                    hint="use http://localhost with the port",
                )
            )
        return await call_next(request)

    app.add_api_route("/healthz", lambda: json_response({"status": "ok"}), methods=["GET"])
    app.add_api_route("/readyz", lambda: readiness(services), methods=["GET"])
    app.add_api_route("/v1/nodes", lambda: json_response(nodes_document(services, None)), methods=["GET"])
    app.add_api_route("/v1/cluster", lambda: json_response(cluster_document(services)), methods=["GET"])

    @app.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    async def _refused(path: str) -> Response:
        raise NotAllowed(
            "HW-API-008",
            "this can only be done over the service's Unix socket",
            because="callers over TCP are anonymous",
            hint="use the horowatt command on this machine, or curl --unix-socket",
            fields={"path": f"/{path}"},
        )

    return app


def _is_local(host: str) -> bool:
    name = host.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") <= 1:
        name = name.partition(":")[0]
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def readiness(services: Services) -> Response:
    """Return whether the service decides and stores."""
    core = services.core
    health, now_s = core.health, core.clock.now_s()
    age_s = max(0.0, now_s - health.committed_s)
    ready = health.failing is None and age_s < STALE_AFTER_S
    document: Document = {
        "schema_version": 1,
        "ready": ready,
        "last_commit_age_s": age_s,
        "last_decision_s": core.state.last_decision_s,
        "nodes_up": sum(
            node.last_seen_s is not None and not node.silent for node in core.state.nodes.values()
        ),
        "error": None if health.failing is None else health.failing.to_problem(),
    }
    if ready:
        return json_response(document)
    error = RetryLater(
        "HW-SRV-009",
        "the service is not ready",
        because="it decides no more" if health.failing is None else health.failing.message,
        hint="see the service's log" if health.failing is None else health.failing.hint,
    )
    return json_response({**document, **error.to_problem()}, error.http_status)


def nodes_document(services: Services, caller: Caller | None) -> Document:
    """Return all nodes as a caller sees them; None is an anonymous caller."""
    core = services.core
    state, now_s = core.state, core.clock.now_s()
    return listing("nodes", [node_view(state, node, caller, now_s) for node in state.nodes.values()])


def cluster_document(services: Services) -> Document:
    """Return the cluster as a whole."""
    return cluster_view(services.core.state, services.core.inventory.name)
