# SPDX-License-Identifier: Apache-2.0
"""The two HTTP applications: all of it on the Unix socket, a little of it on loopback TCP.

On the socket every caller is known by the kernel. Over TCP nobody is: there the cluster's public
figures can be read, and everything else is refused with a hint to use the socket.
"""

import ipaddress
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response

from horowatt import __version__
from horowatt.errors import NotAllowed
from horowatt_allocator.service import routes_agents, routes_cluster, routes_jobs
from horowatt_allocator.service.dependencies import Services, json_response
from horowatt_allocator.service.problems import add_handlers, problem
from horowatt_allocator.service.readings import cluster_document, nodes_document, readiness


def create_socket_app(services: Services) -> FastAPI:
    """Return the application of the Unix socket."""
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
