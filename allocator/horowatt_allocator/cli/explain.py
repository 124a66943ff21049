# SPDX-License-Identifier: Apache-2.0
"""``horowatt explain``: what a job has, why, and how that came."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from horowatt.client import ServiceClient
from horowatt_allocator.cli import exits
from horowatt_allocator.cli.attach import horovodrun_line
from horowatt_allocator.cli.connection import default_socket, json_option, socket_option
from horowatt_allocator.cli.ps import width_text
from horowatt_allocator.cli.resizes import cold_lines, resizes_document, resizes_lines
from horowatt_allocator.cli.terminal import Column, emit_json, plain_lines
from horowatt_allocator.cli.views import JobView, items, number_of, reason_of, send, text_of, whole_of
from horowatt_allocator.reports.figures import (
    ABSENT,
    count_text,
    energy_text,
    power_text,
    printable,
    rate_text,
    ratio_text,
)
from horowatt_allocator.reports.instants import readable_utc


@click.command()
@click.argument("job")
@click.option(
    "--last",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Lines of history, or resizes with --resizes.",
)
@click.option("--resizes", is_flag=True, help="Show instead how each start and resize went, phase by phase.")
@socket_option
@json_option
def explain(*, job: str, last: int, resizes: bool, socket_path: Path | None, as_json: bool) -> int:
    """Say what a job has and why: the plan, the measurements behind it, and the history of decisions."""
    client = ServiceClient(socket_path or default_socket())
    if resizes:
        details = send(client, "GET", f"/v1/jobs/{job}")
        if as_json:
            emit_json(resizes_document(details))
            return exits.OK
        for line in resizes_lines(details, last):
            print(line)
        return exits.OK
    document = send(client, "GET", f"/v1/jobs/{job}/explain")
    if as_json:
        emit_json(document)
        return exits.OK
    for line in explanation_lines(document, last):
        print(line)
    return exits.OK


def explanation_lines(document: dict[str, Any], last: int) -> Iterator[str]:
    """Yield the explanation as lines of text."""
    job = JobView.from_json(document)
    yield f"{job.job_id}  {job.shown_name}  (tenant {job.shown_tenant})"
    yield f"  {job.phase}, width {width_text(job)}: {job.reason_text} [{job.reason_code or ABSENT}]"
    yield from _queue_lines(document)
    yield from _state_lines(job)
    yield from _plan_lines(document)
    yield from _columns_lines(document)
    yield from _observation_lines(document)
    yield from _history_lines(document, last)
    if job.document.get("launcher") == "attached" and not job.ended:
        line = horovodrun_line(job, [str(word) for word in job.document.get("command", [])])
        yield "start it yourself:"
        yield f"  {printable(line) if line else 'once it has slots'}"


def _queue_lines(document: dict[str, Any]) -> Iterator[str]:
    position = whole_of(document, "queue_position")
    if position is not None:
        yield f"  waits as number {position} of {whole_of(document, 'queue_length') or position}"


def _state_lines(job: JobView) -> Iterator[str]:
    document = job.document
    mark = " (simulated devices)" if document.get("simulated") else ""
    done, total = whole_of(document, "samples"), whole_of(document, "total_samples")
    yield (
        f"  now: {text_of(document, 'gpu_type') or 'no GPU'}, limit {_limit(document)}, "
        f"rate {rate_text(number_of(document, 'rate_per_s'))}, "
        f"power {power_text(number_of(document, 'power_w'))}, "
        f"energy {energy_text(number_of(document, 'energy_j'))}{mark}"
    )
    share = ratio_text(done / total) if done is not None and total else "of unknown total"
    yield f"  work: {count_text(done)} samples, {share}"
    deadline_s = number_of(document, "deadline_s")
    if deadline_s is not None:
        left_s = deadline_s - time.time()
        yield f"  deadline: {readable_utc(deadline_s)} ({'passed' if left_s < 0 else f'in {left_s:.0f} s'})"
    yield from cold_lines(job)
    if document.get("isolated") is False:
        yield "  not isolated: other jobs on its nodes could open its GPUs"


def _limit(document: dict[str, Any]) -> str:
    limit_w = number_of(document, "limit_w")
    return "default" if limit_w is None else power_text(limit_w)


def _plan_lines(document: dict[str, Any]) -> Iterator[str]:
    plan = document.get("plan")
    if not isinstance(plan, dict):
        return
    gap = ratio_text(number_of(plan, "gap_ratio"))
    yield f"plan ({text_of(plan, 'status')}, gap {gap}, {text_of(plan, 'solver')}):"
    column = plan.get("column")
    if isinstance(column, dict):
        yield f"  {_column_text(column)}"
    binding = [printable(str(row)) for row in plan.get("binding") or []]
    yield f"  limits that bind: {', '.join(binding) or 'none'}"


def _column_text(column: dict[str, Any]) -> str:
    width = whole_of(column, "width") or 0
    if width == 0:
        return "wait"
    rates = [rate_text(number_of(column, key)) for key in ("rate_per_s", "low_rate_per_s", "high_rate_per_s")]
    expected = f"{rates[0]} expected ({rates[1]} to {rates[2]})"
    if rates[0] == ABSENT:
        expected = "not measured yet"
    return (
        f"{width} x {text_of(column, 'gpu_type') or ABSENT}, limit {_limit(column)}: {expected}, "
        f"{power_text(number_of(column, 'held_w'))}"
    )


_CANDIDATES = (
    Column(""),
    Column("GPU"),
    Column("WIDTH", right=True),
    Column("LIMIT", right=True),
    Column("RATE", right=True),
    Column("FROM", right=True),
    Column("TO", right=True),
    Column("POWER", right=True),
)


def _columns_lines(document: dict[str, Any]) -> Iterator[str]:
    candidates = items(document, "columns")
    if not candidates:
        return
    yield "columns considered (expected rate with its interval, power of its GPUs):"
    rows = [
        [
            "*" if column.get("chosen") else "",
            text_of(column, "gpu_type") or "wait",
            str(whole_of(column, "width") or 0),
            _limit(column) if column.get("gpu_type") else ABSENT,
            rate_text(number_of(column, "rate_per_s")),
            rate_text(number_of(column, "low_rate_per_s")),
            rate_text(number_of(column, "high_rate_per_s")),
            power_text(number_of(column, "held_w")),
        ]
        for column in candidates
    ]
    for line in plain_lines(_CANDIDATES, rows):
        yield f"  {line}"


_MEASURED = (
    Column("GPU"),
    Column("WIDTH", right=True),
    Column("LIMIT", right=True),
    Column("RATE", right=True),
    Column("POWER", right=True),
    Column("OVER", right=True),
)


def _observation_lines(document: dict[str, Any]) -> Iterator[str]:
    observations = items(document, "observations")
    if not observations:
        yield "measured: nothing yet"
        return
    yield "measured:"
    rows = [
        [
            text_of(seen, "gpu_type") or ABSENT,
            str(whole_of(seen, "width") or 0),
            _limit(seen),
            rate_text(number_of(seen, "rate_per_s")),
            power_text(number_of(seen, "power_w")),
            f"{number_of(seen, 'seconds_s') or 0.0:.0f} s",
        ]
        for seen in observations
    ]
    for line in plain_lines(_MEASURED, rows):
        yield f"  {line}"


def _history_lines(document: dict[str, Any], last: int) -> Iterator[str]:
    lines = [(number_of(told, "at_s") or 0.0, _told_text(told)) for told in items(document, "story")]
    for decision in items(document, "decisions"):
        at_s = number_of(decision, "at_s") or 0.0
        lines += [(at_s, _change_text(decision, change)) for change in items(decision, "changes")]
    lines.sort(key=lambda line: line[0])
    if lines:
        yield "history:"
    if len(lines) > last:
        yield f"  ... {len(lines) - last} earlier lines (--last N shows more)"
    for at_s, text in lines[-last:]:
        yield f"  {readable_utc(at_s)}  {text}"


def _told_text(told: dict[str, Any]) -> str:
    return f"{text_of(told, 'sentence') or ''} [{text_of(told, 'code') or ABSENT}]"


def _change_text(decision: dict[str, Any], change: dict[str, Any]) -> str:
    code, sentence = reason_of(change)
    head = f"decision {whole_of(decision, 'number')} ({text_of(decision, 'trigger')})"
    before, after = whole_of(change, "width_before"), whole_of(change, "width_after")
    return f"{head}: width {before} -> {after}: {sentence} [{code or ABSENT}]"
