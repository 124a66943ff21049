# SPDX-License-Identifier: Apache-2.0
"""Write the three files of an energy report, each whole or not at all."""

from dataclasses import dataclass
from pathlib import Path

from horowatt.errors import InvalidInput
from horowatt.files import write_atomic
from horowatt_allocator.records.energy import EnergyReport
from horowatt_allocator.reports.energy_csv import render_csv
from horowatt_allocator.reports.energy_html import render_html
from horowatt_allocator.reports.energy_json import render_json

_FILE_MODE = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFiles:
    """Where the files of a report lie."""

    html: Path
    csv: Path
    json: Path


def write_files(report: EnergyReport, out_dir: Path) -> ReportFiles:
    """Write ``energy.html``, ``energy.csv`` and ``energy.json`` into ``out_dir``.

    All three are rendered before the first is written, so a report that cannot be rendered leaves
    the files of an earlier one alone.

    Raises:
        InvalidInput: ``HW-REP-002`` when the folder cannot be made or written to.
        NeedsOperator: ``HW-DISK-001`` when the file system is full.
    """
    files = ReportFiles(
        html=out_dir / "energy.html", csv=out_dir / "energy.csv", json=out_dir / "energy.json"
    )
    texts = (
        (files.html, render_html(report)),
        (files.csv, render_csv(report)),
        (files.json, render_json(report)),
    )
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for path, text in texts:
            write_atomic(path, text.encode("utf-8", "backslashreplace"), mode=_FILE_MODE)
    except OSError as error:
        raise InvalidInput(
            "HW-REP-002",
            f"the report cannot be written to {out_dir}",
            because=error.strerror or str(error),
            hint="name a folder you may write to with --out",
            fields={"out": str(out_dir)},
        ) from error
    return files
