# SPDX-License-Identifier: Apache-2.0
"""``horowatt report``: where every joule went, as HTML, CSV and JSON."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from horowatt.client import ServiceClient
from horowatt_allocator.cli import exits
from horowatt_allocator.cli.connection import default_socket, json_option, socket_option
from horowatt_allocator.cli.terminal import emit_json, say
from horowatt_allocator.reports.figures import energy_text, printable, ratio_text

if TYPE_CHECKING:
    from horowatt_allocator.records.energy import EnergyLine, EnergyReport


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("horowatt-report"),
    show_default=True,
    help="Folder for the files.",
)
@socket_option
@json_option
def report(*, out: Path, socket_path: Path | None, as_json: bool) -> int:
    """Write the energy report and print its totals.

    Joules are given per tenant, per job and per generation, with idle and unattributed energy apart.
    The sum check compares them with the devices' own counters.
    """
    from horowatt_allocator.reports.balance import check_balance
    from horowatt_allocator.reports.energy_files import write_files
    from horowatt_allocator.reports.energy_json import parse_report, report_document

    client = ServiceClient(socket_path or default_socket())
    found = parse_report(client.request("GET", "/v1/energy"))
    files = write_files(found, out)
    balance = check_balance(found)
    paths = {"html": str(files.html), "csv": str(files.csv), "json": str(files.json)}
    if as_json:
        emit_json({"report": report_document(found), "adds_up": balance.adds_up, "files": paths})
        return exits.OK
    for line in total_lines(found):
        print(line)
    print(f"sum check: {balance.sentence}")
    for path in paths.values():
        print(path)
    if balance.adds_up is False:
        say("warning: the report does not add up; 'horowatt nodes' shows devices that were lost")
    return exits.OK


def total_lines(found: "EnergyReport") -> list[str]:
    """Return the totals of a report as lines of text."""
    lines = [("total", found.total)]
    lines += [(f"tenant {printable(tenant.tenant)}", tenant.energy) for tenant in found.tenants]
    lines += [("idle", found.idle), ("unattributed", found.unattributed)]
    width = max(len(label) for label, _ in lines)
    return [f"{label:<{width}}  {_line_text(line)}" for label, line in lines]


def _line_text(line: "EnergyLine") -> str:
    simulated = "  (simulated devices)" if line.simulated else ""
    return f"{energy_text(line.energy_j):>12}  coverage {ratio_text(line.coverage):>7}{simulated}"
