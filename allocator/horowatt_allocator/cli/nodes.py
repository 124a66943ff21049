# SPDX-License-Identifier: Apache-2.0
"""``horowatt nodes``: nodes and their GPUs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from horowatt.client import ServiceClient
from horowatt_allocator.cli import exits
from horowatt_allocator.cli.connection import default_socket, json_option, socket_option
from horowatt_allocator.cli.moments import clock_text
from horowatt_allocator.cli.terminal import Column, emit_json, print_table, say
from horowatt_allocator.cli.views import items, number_of, send, text_of
from horowatt_allocator.reports.figures import ABSENT, power_text

_COLUMNS = (
    Column("NODE"),
    Column("STATE"),
    Column("GPU"),
    Column("TYPE"),
    Column("JOB"),
    Column("POWER", right=True),
    Column("LIMIT", right=True),
    Column("NOTE"),
)


@click.command()
@socket_option
@json_option
def nodes(*, socket_path: Path | None, as_json: bool) -> int:
    """List nodes and GPUs: who holds them, what they draw, and what an operator should know."""
    client = ServiceClient(socket_path or default_socket())
    document = send(client, "GET", "/v1/nodes")
    if as_json:
        emit_json(document)
        return exits.OK
    found = items(document, "nodes")
    if not found:
        say("the inventory names no nodes")
        return exits.OK
    print_table(_COLUMNS, [row for node in found for row in _rows(node)])
    for node in found:
        off_s = number_of(node, "clock_off_s")
        if off_s is not None:
            say(f"note: {text_of(node, 'name')}: {clock_text(off_s)}")
        notes = node.get("notes")
        for code, note in (notes if isinstance(notes, dict) else {}).items():
            say(f"note: {text_of(node, 'name')}: {code}: {note}")
    return exits.OK


def _rows(node: dict[str, Any]) -> Sequence[list[str]]:
    name = text_of(node, "name") or ABSENT
    state = text_of(node, "state") or ABSENT
    gpus = items(node, "gpus")
    if not gpus:
        return [[name, state, ABSENT, ABSENT, ABSENT, ABSENT, ABSENT, "no GPU was reported yet"]]
    isolated = "" if node.get("isolated") else "not isolated"
    return [[name, state, *_gpu_cells(gpu, isolated)] for gpu in gpus]


def _gpu_cells(gpu: dict[str, Any], isolated: str) -> list[str]:
    mark = " sim" if gpu.get("simulated") else ""
    notes = [
        "lost" if gpu.get("lost") else "",
        text_of(gpu, "withheld") or "",
        "simulated" if mark else "",
        isolated,
    ]
    power = power_text(number_of(gpu, "power_w"))
    return [
        text_of(gpu, "uuid") or ABSENT,
        text_of(gpu, "gpu_type") or ABSENT,
        text_of(gpu, "job_id") or ABSENT,
        power if power == ABSENT else power + mark,
        power_text(number_of(gpu, "limit_w")),
        ", ".join(note for note in notes if note),
    ]
