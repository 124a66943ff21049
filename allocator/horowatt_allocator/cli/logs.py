# SPDX-License-Identifier: Apache-2.0
"""``horowatt logs``: what a job printed."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from horowatt.client import ServiceClient
from horowatt_allocator.cli import exits
from horowatt_allocator.cli.connection import default_socket, json_option, socket_option
from horowatt_allocator.cli.terminal import SCHEMA_VERSION, emit_json, is_terminal, say
from horowatt_allocator.cli.views import items, send
from horowatt_allocator.cli.waiting import Patience
from horowatt_allocator.reports.figures import printable

_WAIT_S = 20
"""How long one request waits at the service for something new."""
_RETRY_S = 1.0


@click.command()
@click.argument("job")
@click.option("--follow", "-f", is_flag=True, help="Go on until the job has ended.")
@click.option("--raw", is_flag=True, help="Without the prefix of each line.")
@click.option("--stream", help="Only this one: launcher, events, lease/ID, or all.")
@socket_option
@json_option
def logs(
    *, job: str, follow: bool, raw: bool, stream: str | None, socket_path: Path | None, as_json: bool
) -> int:
    """Show what a job printed, each line with the worker that printed it.

    -f follows until the job has ended and waits for a service that is restarted; Ctrl-C leaves it
    (exit code 130) and does nothing to the job. With --json and -f there is one object per line.
    """
    reader = _Reader(ServiceClient(socket_path or default_socket()), job, stream)
    if as_json and not follow:
        lines: list[dict[str, Any]] = []
        reader.read_all(lines.append)
        emit_json({"lines": lines, "cursor": reader.cursor, "ended": reader.ended})
        return exits.OK
    show = _print_json if as_json else _Printer(raw=raw).show
    reader.read_all(show)
    if follow:
        reader.follow(show)
    return exits.OK


Show = Callable[[dict[str, Any]], None]


class _Reader:
    """Reads a job's log from where it last was, so that nothing is lost or shown twice."""

    def __init__(self, client: ServiceClient, job: str, stream: str | None) -> None:
        self._client = client
        self._job = job
        self._stream = stream
        self.cursor = ""
        self.ended = False

    def read_all(self, show: Show) -> None:
        """Read what is there now."""
        while self._page(show, wait_s=0):
            pass

    def follow(self, show: Show) -> None:
        """Read until nothing more will come."""
        patience = Patience(say)
        while not self.ended:
            with patience.through_absence():
                self._page(show, wait_s=_WAIT_S)
            if patience.away:
                time.sleep(_RETRY_S)

    def _page(self, show: Show, *, wait_s: int) -> bool:
        """Read one page; tell whether there is another one now."""
        query = {"cursor": self.cursor, "wait_s": str(wait_s)}
        if self._stream is not None:
            query["stream"] = self._stream
        document = send(self._client, "GET", f"/v1/jobs/{self._job}/logs", query=query)
        for line in items(document, "lines"):
            show(line)
        self.cursor = str(document.get("cursor") or self.cursor)
        more = bool(document.get("more"))
        self.ended = bool(document.get("ended")) and not more
        return more


class _Printer:
    """Prints the lines of a log; lines of several workers are told apart by a prefix."""

    def __init__(self, *, raw: bool) -> None:
        self._raw = raw
        # A file gets the bytes as they came; on a terminal nothing may move the cursor.
        self._safe = is_terminal(sys.stdout)

    def show(self, line: dict[str, Any]) -> None:
        """Print one line."""
        text = str(line.get("text", ""))
        if self._raw:
            print(text, flush=True)
            return
        prefix = printable(str(line.get("stream", "")).removeprefix("lease/"))
        # Progress bars overwrite their line with carriage returns: the last state is what counts.
        text = text.rstrip("\r").rpartition("\r")[2] if self._safe else text
        print(f"{prefix} | {printable(text) if self._safe else text}", flush=True)


def _print_json(line: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **line}, ensure_ascii=False), flush=True)
