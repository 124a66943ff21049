# SPDX-License-Identifier: Apache-2.0
"""What every route may ask for: the services of the process, who calls, and a bounded body."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
from fastapi import Depends, Request, Response

from horowatt.errors import InvalidInput, NotAllowed
from horowatt_allocator.service.core import Core
from horowatt_allocator.service.identity import Caller, PeerCred, Registry

MAX_SUBMIT_BYTES = 1 << 20
MAX_REPORT_BYTES = 8 << 20


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
