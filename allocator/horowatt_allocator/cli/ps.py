# SPDX-License-Identifier: Apache-2.0
"""``horowatt ps``: the jobs at a glance."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from horowatt.client import ServiceClient
from horowatt_allocator.cli import exits
from horowatt_allocator.cli.connection import default_socket, json_option, socket_option
from horowatt_allocator.cli.terminal import (
    Column,
    console_for,
    emit_json,
    is_terminal,
    plain_lines,
    print_table,
    rich_table,
    say,
)
from horowatt_allocator.cli.views import JobView, items, number_of, send, text_of
from horowatt_allocator.cli.waiting import POLL_S, Patience
from horowatt_allocator.reports.figures import ABSENT, energy_text, power_text, rate_text

COLUMNS = (
    Column("JOB"),
    Column("NAME"),
    Column("TENANT"),
    Column("PHASE"),
    Column("WIDTH", right=True),
    Column("GPU"),
    Column("LIMIT", right=True),
    Column("RATE", right=True),
    Column("POWER", right=True),
    Column("ENERGY", right=True),
    Column("REASON"),
)


@click.command()
@click.option("--watch", "-w", is_flag=True, help="Redraw every second until Ctrl-C.")
@click.option("--all", "-a", "show_all", is_flag=True, help="Ended jobs as well.")
@socket_option
@json_option
def ps(*, watch: bool, show_all: bool, socket_path: Path | None, as_json: bool) -> int:
    """List jobs: width (and what it is going to be), rate, power, energy, and the reason.

    With --watch, leaving by Ctrl-C is the normal end (exit code 0), and a restart of the service is
    waited for.
    """
    if watch and as_json:
        raise click.UsageError("--json prints one object, so it excludes --watch")
    client = ServiceClient(socket_path or default_socket())
    query = {"all": "true"} if show_all else None
    if watch:
        return _watch(lambda: send(client, "GET", "/v1/jobs", query=query))
    document = send(client, "GET", "/v1/jobs", query=query)
    if as_json:
        emit_json(document)
        return exits.OK
    jobs = items(document, "jobs")
    if jobs:
        print_table(COLUMNS, job_rows(jobs))
        if any(job.get("simulated") for job in jobs):
            say("sim: the figures of this job come from simulated devices")
    else:
        say(
            "no jobs" if show_all else "no jobs are waiting or running ('horowatt ps --all' shows ended ones)"
        )
    return exits.OK


def job_rows(jobs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return one row of ``COLUMNS`` for each job; figures of simulated devices say so."""
    return [_row(JobView(job)) for job in jobs]


def _row(job: JobView) -> list[str]:
    document = job.document
    mark = " sim" if document.get("simulated") else ""
    return [
        job.job_id,
        job.shown_name,
        job.shown_tenant,
        job.phase,
        width_text(job),
        text_of(document, "gpu_type") or ABSENT,
        power_text(number_of(document, "limit_w")),
        _marked(rate_text(number_of(document, "rate_per_s")), mark),
        _marked(power_text(number_of(document, "power_w")), mark),
        _energy_cell(document, mark),
        job.reason_text,
    ]


def _energy_cell(document: dict[str, Any], mark: str) -> str:
    energy_j = number_of(document, "energy_j")
    if energy_j is None and document.get("started_s") is None:
        return ABSENT  # there was nothing to measure yet
    return _marked(energy_text(energy_j), "" if energy_j is None else mark)


def width_text(job: JobView) -> str:
    """Return the width, with where it is going when that differs, e.g. ``2>4``."""
    if job.ended or job.target_width == job.width:
        return str(job.width)
    return f"{job.width}>{job.target_width}"


def _marked(text: str, mark: str) -> str:
    return text if text == ABSENT else text + mark


def _watch(fetch: Callable[[], dict[str, Any]]) -> int:
    """Show the table until Ctrl-C; the first answer must come, later ones may be missed."""
    document = fetch()
    try:
        if is_terminal(sys.stdout):
            _watch_live(fetch, document)
        else:
            _watch_plain(fetch, document)
    except KeyboardInterrupt:
        pass
    return exits.OK


def _watch_live(fetch: Callable[[], dict[str, Any]], document: dict[str, Any]) -> None:
    try:
        from rich.live import Live
    except ImportError:
        _watch_plain(fetch, document)
        return

    note = ""

    def remember(text: str) -> None:
        nonlocal note
        note = text

    patience = Patience(remember)
    with Live(console=console_for(sys.stdout), auto_refresh=False, screen=False) as live:
        while True:
            title = time.strftime("%H:%M:%S") + (f"  {note}" if patience.away else "")
            live.update(rich_table(COLUMNS, job_rows(items(document, "jobs")), title), refresh=True)
            time.sleep(POLL_S)
            with patience.through_absence():
                document = fetch()


def _watch_plain(fetch: Callable[[], dict[str, Any]], document: dict[str, Any]) -> None:
    patience = Patience(say)
    shown: list[str] = []
    while True:
        lines = plain_lines(COLUMNS, job_rows(items(document, "jobs")))
        if lines != shown:
            print("\n".join([time.strftime("%H:%M:%S"), *lines, ""]), flush=True)
            shown = lines
        time.sleep(POLL_S)
        with patience.through_absence():
            document = fetch()
