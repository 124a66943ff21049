# SPDX-License-Identifier: Apache-2.0
"""Options that all commands share, and the way to the service."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

SYSTEM_SOCKET = Path("/run/horowatt/horowatt.sock")
SOCKET_VARIABLE = "HOROWATT_SOCKET"


def user_socket() -> Path | None:
    """Return where a user's own service listens, or None when the session has no such folder."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime_dir) / "horowatt" / "horowatt.sock" if runtime_dir else None


def default_socket() -> Path:
    """Return the user's own service if there is one, else the system's."""
    own = user_socket()
    if os.geteuid() != 0 and own is not None and own.exists():
        return own
    return SYSTEM_SOCKET


def json_option(function: F) -> F:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")(function)


def socket_option(function: F) -> F:
    """Add ``--socket``, with the environment variable behind it."""
    return click.option(
        "--socket",
        "socket_path",
        type=click.Path(path_type=Path),
        envvar=SOCKET_VARIABLE,
        show_envvar=True,
        help=f"Unix socket of the service [default: your own service's, else {SYSTEM_SOCKET}].",
    )(function)
