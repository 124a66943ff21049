# SPDX-License-Identifier: Apache-2.0
"""Every error of the HTTP interface as an RFC 9457 problem document with a stable code."""

import json

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from horowatt.errors import HorowattError, InvalidInput, NotFound

_NOT_FOUND = 404
_METHOD_NOT_ALLOWED = 405


def problem(error: HorowattError, status: int | None = None, *, close: bool = False) -> Response:
    """Return the response that describes an error.

    Args:
        status: Another HTTP status than the error's own.
        close: True to end the connection, because the rest of the request is not read.
    """
    document = error.to_problem()
    if status is not None:
        document["status"] = status
    return Response(
        json.dumps(document),
        status_code=int(str(document["status"])),
        media_type="application/problem+json",
        headers={"connection": "close"} if close else None,
    )


def add_handlers(app: FastAPI) -> None:
    """Have an application answer every error as a problem document."""

    @app.exception_handler(HorowattError)
    async def _known(_: Request, error: HorowattError) -> Response:
        return problem(error, close=error.code == "HW-API-004")

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> Response:
        fields = {
            ".".join(str(part) for part in item["loc"][1:]): str(item["msg"]) for item in error.errors()
        }
        return problem(
            InvalidInput(
                "HW-API-002",
                "this request cannot be read",
                because="; ".join(f"{name}: {message}" for name, message in fields.items()),
                hint="compare it with /openapi.json on the service's socket",
                fields=fields,
            )
        )

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if error.status_code == _METHOD_NOT_ALLOWED:
            return problem(
                InvalidInput(
                    "HW-API-005", f"{request.method} cannot be done here", fields={"path": request.url.path}
                ),
                _METHOD_NOT_ALLOWED,
            )
        if error.status_code == _NOT_FOUND:
            return problem(
                NotFound(
                    "HW-API-003",
                    "there is nothing under this address",
                    hint="check that both sides run the same version of Horowatt",
                    fields={"path": request.url.path},
                )
            )
        return problem(InvalidInput("HW-API-002", str(error.detail)), error.status_code)

    @app.exception_handler(Exception)
    async def _unknown(_: Request, __: Exception) -> Response:
        # The server writes the traceback to the service's log; callers get none of it.
        return problem(
            HorowattError(
                "HW-SRV-000",
                "the service made an error",
                because="this is a defect of Horowatt, not of the request",
                hint="see the service's log for the traceback and report it",
            )
        )
