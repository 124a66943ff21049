# SPDX-License-Identifier: Apache-2.0
"""Errors of the HTTP interface: stable documents, and nothing of the inside for the caller."""

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI

from horowatt.errors import HorowattError, NeedsOperator
from horowatt_allocator.service.problems import add_handlers


def application() -> FastAPI:
    app = FastAPI()
    add_handlers(app)

    @app.get("/defect")
    def defect() -> None:
        raise RuntimeError("the password is swordfish")

    @app.get("/known")
    def known() -> None:
        raise NeedsOperator("HW-X-001", "it broke", because="of that", hint="mend it", fields={"a": "b"})

    return app


def call(app: FastAPI, method: str, path: str, sent: list[dict[str, Any]]) -> dict[str, Any]:
    """Send one request to an ASGI application and return the decoded body; ``sent`` gets the messages."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
        "scheme": "http",
        "server": ("localhost", 80),
        "client": None,
        "root_path": "",
        "state": {},
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    document = json.loads(b"".join(message.get("body", b"") for message in sent))
    assert isinstance(document, dict)
    return document


def test_a_defect_shows_nothing_of_the_inside() -> None:
    """An unexpected error is a problem document without its text; the server still gets to log it."""
    sent: list[dict[str, Any]] = []
    with pytest.raises(RuntimeError, match="swordfish"):
        call(application(), "GET", "/defect", sent)
    assert sent[0]["status"] == 500
    body = b"".join(message.get("body", b"") for message in sent).decode()
    assert json.loads(body)["code"] == "HW-SRV-000"
    assert "swordfish" not in body
    assert "Traceback" not in body


def test_a_known_error_comes_back_as_it_was() -> None:
    """What the service raises is what the client raises again."""
    sent: list[dict[str, Any]] = []
    problem = call(application(), "GET", "/known", sent)
    assert (b"content-type", b"application/problem+json") in sent[0]["headers"]
    assert sent[0]["status"] == problem["status"] == 507
    error = HorowattError.from_problem(problem)
    assert isinstance(error, NeedsOperator)
    assert (error.code, error.message, error.because, error.hint, error.fields) == (
        "HW-X-001",
        "it broke",
        "of that",
        "mend it",
        {"a": "b"},
    )


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/nothing", 404, "HW-API-003"), ("POST", "/known", 405, "HW-API-005")],
)
def test_unknown_addresses_and_methods_have_codes(method: str, path: str, status: int, code: str) -> None:
    """The framework's own errors are problem documents as well."""
    sent: list[dict[str, Any]] = []
    problem = call(application(), method, path, sent)
    assert (sent[0]["status"], problem["code"]) == (status, code)
