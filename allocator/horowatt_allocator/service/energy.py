# SPDX-License-Identifier: Apache-2.0
"""Energy reports as callers get to see them."""

from collections.abc import Iterable
from dataclasses import asdict, replace

from horowatt_allocator.records.cluster import State
from horowatt_allocator.records.energy import EnergyLine, EnergyReport, JobEnergy, TenantEnergy
from horowatt_allocator.service.identity import Caller
from horowatt_allocator.service.views import SCHEMA_VERSION, Document, may_see

OTHERS = "(others)"
"""Stands for all that a caller may not see."""


def for_caller(report: EnergyReport, state: State, caller: Caller) -> EnergyReport:
    """Return the report without what belongs to others.

    An operator gets it whole. Everybody else gets the own jobs, the own tenants' lines made of these,
    one line for all others together, and the totals: the lines still add up.
    """
    if caller.operator:
        return report
    mine = tuple(job for job in report.jobs if _is_own(job, state, caller))
    others = [job.energy for job in report.jobs if not _is_own(job, state, caller)]
    tenants = [
        _tenant_line(tenant, [job.energy for job in mine if job.tenant == tenant])
        for tenant in dict.fromkeys(job.tenant for job in mine)
    ]
    if others:
        tenants.append(_tenant_line(OTHERS, others))
    return replace(report, jobs=mine, tenants=tuple(tenants))


def narrowed(report: EnergyReport, job_id: str | None, tenant: str | None) -> EnergyReport:
    """Return the report with the jobs and tenants of one job or tenant only; totals stay."""
    jobs = report.jobs
    if job_id is not None:
        jobs = tuple(job for job in jobs if job.job_id == job_id)
    if tenant is not None:
        jobs = tuple(job for job in jobs if job.tenant == tenant)
    if job_id is None and tenant is None:
        return report
    kept = {job.tenant for job in jobs} | ({tenant} if tenant is not None else set())
    return replace(report, jobs=jobs, tenants=tuple(line for line in report.tenants if line.tenant in kept))


def energy_document(report: EnergyReport) -> Document:
    """Return the JSON document of a report, derived figures included."""
    document = asdict(report)
    document["schema_version"] = SCHEMA_VERSION
    document["sum_error"] = report.sum_error
    for name in ("idle", "unattributed", "total"):
        document[name] = _line(getattr(report, name))
    document["tenants"] = [{**asdict(line), "energy": _line(line.energy)} for line in report.tenants]
    document["jobs"] = [_job(job) for job in report.jobs]
    return document


def _job(job: JobEnergy) -> Document:
    generations = [
        {"generation": asdict(entry.generation), "energy": _line(entry.energy)} for entry in job.generations
    ]
    return {**asdict(job), "energy": _line(job.energy), "generations": generations}


def _line(line: EnergyLine) -> Document:
    return {**asdict(line), "kwh": line.kwh, "coverage": line.coverage}


def _is_own(job: JobEnergy, state: State, caller: Caller) -> bool:
    return job.job_id in state.jobs and may_see(caller, state.jobs[job.job_id])


def _tenant_line(tenant: str, lines: Iterable[EnergyLine]) -> TenantEnergy:
    found = list(lines)
    return TenantEnergy(
        tenant=tenant,
        num_jobs=len(found),
        energy=EnergyLine(
            energy_j=sum(line.energy_j for line in found),
            measured_s=sum(line.measured_s for line in found),
            unmeasured_s=sum(line.unmeasured_s for line in found),
            integrated_s=sum(line.integrated_s for line in found),
            bridged_s=sum(line.bridged_s for line in found),
            simulated=any(line.simulated for line in found),
        ),
    )
