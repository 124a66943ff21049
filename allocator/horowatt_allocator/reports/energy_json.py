# SPDX-License-Identifier: Apache-2.0
"""The energy report as JSON, and back from what the service sends."""

import json
from dataclasses import asdict

from horowatt.wire import decode
from horowatt_allocator.records.energy import (
    DeviceEnergy,
    EnergyLine,
    EnergyReport,
    GenerationEnergy,
    JobEnergy,
)
from horowatt_allocator.reports.shares import method_shares

SCHEMA_VERSION = 1
"""Of the JSON and CSV files; grows only when a field changes its meaning or goes away."""


def parse_report(payload: bytes | str) -> EnergyReport:
    """Return the report that the service's JSON describes; fields beyond the record are ignored.

    Raises:
        InvalidInput: ``HW-WIRE-001`` when the text does not describe an energy report.
    """
    return decode(payload, EnergyReport)


def report_document(report: EnergyReport) -> dict[str, object]:
    """Return the report as a JSON document: raw units (J, W, s), null for what is absent."""
    return {
        "schema_version": SCHEMA_VERSION,
        "cluster": report.cluster,
        "start_s": report.start_s,
        "end_s": report.end_s,
        "made_s": report.made_s,
        "scope": report.scope,
        "simulated": report.simulated,
        "total": _line(report.total),
        "idle": _line(report.idle),
        "unattributed": _line(report.unattributed),
        "tenants": [
            {"tenant": tenant.tenant, "num_jobs": tenant.num_jobs, "energy": _line(tenant.energy)}
            for tenant in report.tenants
        ],
        "jobs": [_job(job) for job in report.jobs],
        "devices": [_device(device) for device in report.devices],
        "devices_j": report.devices_j,
        "booked_on_counters_j": report.booked_on_counters_j,
        "sum_error": report.sum_error,
    }


def render_json(report: EnergyReport) -> str:
    """Return the text of the JSON file."""
    return json.dumps(report_document(report), indent=2, ensure_ascii=False) + "\n"


def _line(line: EnergyLine) -> dict[str, object]:
    shares = method_shares(line)
    return {
        "energy_j": line.energy_j,
        "kwh": line.kwh,
        "coverage": line.coverage,
        "measured_s": line.measured_s,
        "unmeasured_s": line.unmeasured_s,
        "integrated_s": line.integrated_s,
        "bridged_s": line.bridged_s,
        "method_shares": None if shares is None else asdict(shares),
        "simulated": line.simulated,
    }


def _job(job: JobEnergy) -> dict[str, object]:
    return {
        "job_id": job.job_id,
        "name": job.name,
        "tenant": job.tenant,
        "phase": job.phase,
        "energy": _line(job.energy),
        "samples": job.samples,
        "samples_per_j": job.samples_per_j,
        "resizes": job.resizes,
        "pause_s": job.pause_s,
        "generations": [_generation(entry) for entry in job.generations],
    }


def _generation(entry: GenerationEnergy) -> dict[str, object]:
    generation = entry.generation
    # Named one by one: what the controller adds to its records is no part of this file's schema.
    return {
        "generation": {
            "number": generation.number,
            "width": generation.width,
            "gpu_type": generation.gpu_type,
            "limit_w": generation.limit_w,
            "published_s": generation.published_s,
            "first_step_end_s": generation.first_step_end_s,
            "pause_s": generation.pause_s,
            "ended_s": generation.ended_s,
            "samples": generation.samples,
        },
        "energy": _line(entry.energy),
    }


def _device(device: DeviceEnergy) -> dict[str, object]:
    return {
        "node": device.node,
        "gpu_uuid": device.gpu_uuid,
        "gpu_type": device.gpu_type,
        "simulated": device.simulated,
        "counter_j": device.counter_j,
        "booked_j": device.booked_j,
        "idle_j": device.idle_j,
        "unattributed_j": device.unattributed_j,
    }
