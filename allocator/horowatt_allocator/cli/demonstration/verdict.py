# SPDX-License-Identifier: Apache-2.0
"""What the demo showed, and whether it is what it was to show. Pure functions."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from horowatt_allocator.cli.demonstration.plan import ACCURACY_TOLERANCE
from horowatt_allocator.cli.terminal import Column, plain_lines
from horowatt_allocator.records.energy import JobEnergy
from horowatt_allocator.reports import figures
from horowatt_allocator.reports.balance import Balance

_ACCURACY = re.compile(r"accuracy=([0-9]*\.?[0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """One job of the demo at its end.

    Attributes:
        accuracy, alone_accuracy: Of the job, and of the same script run alone; None when its log
            does not say.
        widths: Width of each generation, in order.
        pauses_s: Pause before each generation but the first; None where it was not measured.
    """

    tenant: str
    job_id: str
    phase: str
    reason: str
    exit_code: int | None
    accuracy: float | None
    alone_accuracy: float | None
    widths: tuple[int, ...]
    pauses_s: tuple[float | None, ...]
    energy_j: float | None
    samples: int | None
    samples_per_j: float | None
    simulated: bool

    def to_json(self) -> dict[str, object]:
        """Return the result as plain JSON values."""
        return asdict(self)


def parse_accuracy(log: str) -> float | None:
    """Return the last ``accuracy=`` of a log."""
    found = _ACCURACY.findall(log)
    return float(found[-1]) if found else None


def result_of(
    *,
    tenant: str,
    phase: str,
    reason: str,
    exit_code: int | None,
    log: str,
    alone_log: str,
    energy: JobEnergy | None,
    job_id: str,
) -> JobResult:
    """Put together what is known of a job."""
    generations = () if energy is None else tuple(entry.generation for entry in energy.generations)
    return JobResult(
        tenant=tenant,
        job_id=job_id,
        phase=phase,
        reason=reason,
        exit_code=exit_code,
        accuracy=parse_accuracy(log),
        alone_accuracy=parse_accuracy(alone_log),
        widths=tuple(generation.width for generation in generations),
        pauses_s=tuple(generation.pause_s for generation in generations[1:]),
        energy_j=None if energy is None else energy.energy.energy_j,
        samples=None if energy is None else energy.samples,
        samples_per_j=None if energy is None else energy.samples_per_j,
        simulated=energy is not None and energy.energy.simulated,
    )


def grown_and_shrunk(widths: Sequence[int]) -> bool:
    """Tell whether a job trained on through both a larger and a smaller width."""
    steps = [(a, b) for a, b in pairwise(widths) if a > 0 and b > 0]
    return any(b > a for a, b in steps) and any(b < a for a, b in steps)


def problems(results: Sequence[JobResult], balance: Balance | None) -> list[str]:
    """Return everything that was to be shown and was not, one sentence each."""
    found = [sentence for result in results for sentence in _job_problems(result)]
    if not any(grown_and_shrunk(result.widths) for result in results):
        widths = "; ".join(f"{result.tenant} {widths_text(result.widths)}" for result in results)
        found.append(f"no job was both grown and shrunk ({widths})")
    if balance is None:
        found.append("there is no energy report")
    elif not balance.adds_up:
        found.append(f"the energy {balance.sentence}")
    return found


def _job_problems(result: JobResult) -> list[str]:
    if result.phase != "finished" or result.exit_code:
        return [f"{result.tenant} is {result.phase} (exit code {result.exit_code}): {result.reason}"]
    if result.accuracy is None:
        return [f"{result.tenant} printed no accuracy"]
    if result.alone_accuracy is None:
        return [f"the solo run of {result.tenant}'s script printed no accuracy"]
    if result.accuracy < result.alone_accuracy - ACCURACY_TOLERANCE:
        text = (
            f"{result.tenant} reached accuracy {result.accuracy:.4f}, more than {ACCURACY_TOLERANCE} below "
        )
        return [text + f"{result.alone_accuracy:.4f} of the same script run alone"]
    return []


def widths_text(widths: Sequence[int]) -> str:
    """Return the widths of the generations, e.g. ``1 > 4 > 2``."""
    return " > ".join(str(width) for width in widths) or "never ran"


def pauses_text(pauses_s: Sequence[float | None]) -> str:
    """Return the pauses between generations."""
    if not pauses_s:
        return figures.ABSENT
    return ", ".join(figures.NOT_MEASURED if pause is None else f"{pause:.1f} s" for pause in pauses_s)


def accuracy_text(accuracy: float | None) -> str:
    """Return an accuracy with four decimals."""
    return figures.ABSENT if accuracy is None else f"{accuracy:.4f}"


def result_lines(results: list[JobResult], *, simulated: bool) -> list[str]:
    """Return the table of results as lines of text."""
    columns = (
        Column("JOB"),
        Column("ACCURACY", right=True),
        Column("ALONE", right=True),
        Column("GENERATIONS", right=True),
        Column("WIDTHS"),
        Column("PAUSES"),
        Column("ENERGY", right=True),
        Column("SAMPLES/J", right=True),
    )
    mark = " sim" if simulated else ""
    rows = [
        [
            result.tenant,
            accuracy_text(result.accuracy),
            accuracy_text(result.alone_accuracy),
            str(len(result.widths)),
            widths_text(result.widths),
            pauses_text(result.pauses_s),
            figures.energy_text(result.energy_j) + mark,
            figures.per_joule_text(result.samples_per_j) + mark,
        ]
        for result in results
    ]
    lines = plain_lines(columns, rows)
    return [*lines, "sim: simulated devices, not a measurement of hardware"] if simulated else lines
