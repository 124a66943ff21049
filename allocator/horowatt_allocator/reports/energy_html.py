# SPDX-License-Identifier: Apache-2.0
"""The energy report as one HTML file: no scripts, no external files, readable on paper too."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from horowatt.errors import NeedsOperator
from horowatt_allocator.records.energy import EnergyLine, EnergyReport, JobEnergy
from horowatt_allocator.reports import figures
from horowatt_allocator.reports.balance import check_balance
from horowatt_allocator.reports.instants import readable_duration, readable_utc
from horowatt_allocator.reports.shares import method_shares

if TYPE_CHECKING:
    from jinja2 import Template

_CHART_WIDTH_PX = 600.0
_CHART_HEIGHT_PX = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One piece of the bar that shows where the joules went. ``percent`` of the whole."""

    label: str
    percent: float
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthChart:
    """Steps of a job's width over time, as points of an SVG polyline."""

    points: str
    max_width: int
    start_utc: str
    end_utc: str


def render_html(report: EnergyReport) -> str:
    """Return the text of the HTML file.

    Raises:
        NeedsOperator: ``HW-REP-001`` when Jinja2 is not installed.
    """
    charts = {job.job_id: _width_chart(job, report.end_s) for job in report.jobs}
    return _template().render(
        report=report,
        balance=check_balance(report),
        shares=_shares(report),
        charts=charts,
        duration=readable_duration(max(0.0, report.end_s - report.start_s)),
    )


@cache
def _template() -> "Template":
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise NeedsOperator(
            "HW-REP-001",
            "the HTML report cannot be made here",
            because="Jinja2 is not installed; it belongs to the head node's part of Horowatt",
            hint="pip install 'horowatt[head]', or use --json",
        ) from error
    environment = Environment(
        loader=PackageLoader("horowatt_allocator", "reports/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "safe_name": figures.printable,
        "energy": figures.energy_text,
        "power": figures.power_text,
        "ratio": figures.ratio_text,
        "count": figures.count_text,
        "per_joule": figures.per_joule_text,
        "joules": lambda value: figures.NOT_MEASURED if value is None else f"{value:,.1f} J",
        "seconds": lambda value: figures.ABSENT if value is None else f"{value:.1f} s",
        "utc": lambda value: figures.ABSENT if value is None else readable_utc(value),
        "method": _method,
    }
    return environment.get_template("energy.html.j2")


def _method(line: EnergyLine) -> str:
    shares = method_shares(line)
    if shares is None:
        return figures.ABSENT
    named = (
        ("counter", shares.counter_ratio),
        ("integrated", shares.integrated_ratio),
        ("bridged", shares.bridged_ratio),
        ("missing", shares.missing_ratio),
    )
    return ", ".join(f"{name} {figures.ratio_text(share)}" for name, share in named if share > 0)


def _shares(report: EnergyReport) -> list[Share]:
    parts = [(tenant.tenant, tenant.energy.energy_j, "tenant") for tenant in report.tenants]
    parts += [
        ("idle", report.idle.energy_j, "idle"),
        ("unattributed", report.unattributed.energy_j, "unattributed"),
    ]
    whole_j = sum(max(0.0, energy_j) for _, energy_j, _ in parts)
    if whole_j <= 0:
        return []
    return [
        Share(label=label, percent=round(100 * energy_j / whole_j, 2), kind=kind)
        for label, energy_j, kind in parts
        if energy_j > 0
    ]


def _width_chart(job: JobEnergy, report_end_s: float) -> WidthChart | None:
    generations = [entry.generation for entry in job.generations]
    if not generations:
        return None
    start_s = generations[0].published_s
    last = generations[-1]
    end_s = last.ended_s if last.ended_s is not None else report_end_s
    top = max(generation.width for generation in generations)
    if end_s <= start_s or top <= 0:
        return None
    points: list[str] = []
    for index, generation in enumerate(generations):
        next_s = generations[index + 1].published_s if index + 1 < len(generations) else end_s
        y = _CHART_HEIGHT_PX * (1 - generation.width / top)
        for at_s in (generation.published_s, next_s):
            x = _CHART_WIDTH_PX * (at_s - start_s) / (end_s - start_s)
            points.append(f"{min(max(x, 0.0), _CHART_WIDTH_PX):.1f},{y:.1f}")
    return WidthChart(
        points=" ".join(points),
        max_width=top,
        start_utc=readable_utc(start_s),
        end_utc=readable_utc(end_s),
    )
