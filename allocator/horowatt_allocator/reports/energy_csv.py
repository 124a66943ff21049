# SPDX-License-Identifier: Apache-2.0
"""The energy report as one flat CSV file.

One line per thing; the column ``kind`` says which: ``total``, ``idle``, ``unattributed``,
``tenant``, ``job``, ``generation``, ``device`` or ``check``. Columns keep their names and order
between releases; new ones are added at the end. An empty cell is an absent value, never zero.

Names come from tenants, and spreadsheets run cells that look like formulas. Text that begins like
one gets an apostrophe in front, which spreadsheets hide and treat as "this is text".
"""

import csv
import io
from collections.abc import Iterator

from horowatt_allocator.records.energy import (
    DeviceEnergy,
    EnergyLine,
    EnergyReport,
    GenerationEnergy,
    JobEnergy,
)
from horowatt_allocator.reports.instants import iso_utc

COLUMNS = (
    "kind",
    "cluster",
    "tenant",
    "job_id",
    "job_name",
    "phase",
    "generation",
    "width",
    "gpu_type",
    "limit_w",
    "node",
    "gpu_uuid",
    "start_utc",
    "end_utc",
    "energy_j",
    "energy_kwh",
    "coverage_ratio",
    "measured_gpu_s",
    "unmeasured_gpu_s",
    "integrated_gpu_s",
    "bridged_gpu_s",
    "num_jobs",
    "samples",
    "samples_per_j",
    "resizes",
    "pause_s",
    "counter_j",
    "booked_j",
    "idle_j",
    "unattributed_j",
    "sum_error_ratio",
    "simulated",
)

# The ASCII signs and their full-width twins, which spreadsheets accept as well.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")

Cell = str | int | float | bool | None


def render_csv(report: EnergyReport) -> str:
    """Return the text of the CSV file (RFC 4180, UTF-8, CRLF line ends)."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\r\n")
    writer.writerow(COLUMNS)
    for row in _rows(report):
        writer.writerow([_cell(row.get(column)) for column in COLUMNS])
    return buffer.getvalue()


def guarded(text: str) -> str:
    """Return ``text`` so that no spreadsheet takes it for a formula."""
    return f"'{text}" if text.lstrip(" \u00a0").startswith(_FORMULA_STARTS) else text


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return guarded(value)
    return repr(value)


def _rows(report: EnergyReport) -> Iterator[dict[str, Cell]]:
    whole: dict[str, Cell] = {
        "cluster": report.cluster,
        "start_utc": iso_utc(report.start_s),
        "end_utc": iso_utc(report.end_s),
    }
    for kind, line in (
        ("total", report.total),
        ("idle", report.idle),
        ("unattributed", report.unattributed),
    ):
        yield {**whole, "kind": kind, **_line(line)}
    for tenant in report.tenants:
        yield {
            **whole,
            "kind": "tenant",
            "tenant": tenant.tenant,
            "num_jobs": tenant.num_jobs,
            **_line(tenant.energy),
        }
    for job in report.jobs:
        yield {**whole, **_job(job)}
        for entry in job.generations:
            yield {"cluster": report.cluster, **_generation(job, entry)}
    for device in report.devices:
        yield {**whole, **_device(device)}
    yield {
        **whole,
        "kind": "check",
        "counter_j": report.devices_j,
        "booked_j": report.booked_on_counters_j,
        "sum_error_ratio": report.sum_error,
        "simulated": report.simulated,
    }


def _line(line: EnergyLine) -> dict[str, Cell]:
    return {
        "energy_j": line.energy_j,
        "energy_kwh": line.kwh,
        "coverage_ratio": line.coverage,
        "measured_gpu_s": line.measured_s,
        "unmeasured_gpu_s": line.unmeasured_s,
        "integrated_gpu_s": line.integrated_s,
        "bridged_gpu_s": line.bridged_s,
        "simulated": line.simulated,
    }


def _job(job: JobEnergy) -> dict[str, Cell]:
    return {
        "kind": "job",
        "tenant": job.tenant,
        "job_id": job.job_id,
        "job_name": job.name,
        "phase": job.phase,
        "samples": job.samples,
        "samples_per_j": job.samples_per_j,
        "resizes": job.resizes,
        "pause_s": job.pause_s,
        **_line(job.energy),
    }


def _generation(job: JobEnergy, entry: GenerationEnergy) -> dict[str, Cell]:
    generation = entry.generation
    return {
        "kind": "generation",
        "tenant": job.tenant,
        "job_id": job.job_id,
        "job_name": job.name,
        "generation": generation.number,
        "width": generation.width,
        "gpu_type": generation.gpu_type,
        "limit_w": generation.limit_w,
        "start_utc": iso_utc(generation.published_s),
        "end_utc": None if generation.ended_s is None else iso_utc(generation.ended_s),
        "samples": generation.samples,
        "pause_s": generation.pause_s,
        **_line(entry.energy),
    }


def _device(device: DeviceEnergy) -> dict[str, Cell]:
    return {
        "kind": "device",
        "node": device.node,
        "gpu_uuid": device.gpu_uuid,
        "gpu_type": device.gpu_type,
        "counter_j": device.counter_j,
        "booked_j": device.booked_j,
        "idle_j": device.idle_j,
        "unattributed_j": device.unattributed_j,
        "simulated": device.simulated,
    }
