# SPDX-License-Identifier: Apache-2.0
"""``horowatt explain JOB --resizes``: how each resize went, phase by phase."""

from collections.abc import Iterator, Mapping
from typing import Any

from horowatt_allocator.cli.moments import clock_text
from horowatt_allocator.cli.terminal import Column, plain_lines
from horowatt_allocator.cli.views import JobView, items, number_of, text_of, whole_of
from horowatt_allocator.reports.figures import NOT_MEASURED, printable
from horowatt_allocator.reports.instants import readable_utc

_PHASES = (
    Column("PHASE"),
    Column("FROM", right=True),
    Column("TO", right=True),
    Column("TOOK", right=True),
    Column(""),
)
_NAMES = {
    "standby-started": "standbys started",
    "standby-ready": "standbys ready",
    "standby-failed": "standby failed",
    "committed": "state committed",
    "published": "published to Horovod",
    "stopped": "last step before",
    "interrupted": "workers interrupted",
    "world-restarted": "world restarted",
    "assigned": "ranks assigned",
    "world": "rendezvous done",
    "synced": "state synced",
    "resumed": "first step after",
    "left": "workers left",
}
_KINDS = {"start": "starts", "grow": "grows", "shrink": "shrinks", "same-width": "stays as wide"}


def resizes_document(document: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a job's document that is about its resizes."""
    job = JobView.from_json(document).document
    keys = ("job_id", "name", "cold", "last_commit_s", "num_commits")
    return {**{key: job.get(key) for key in keys}, "resizes": items(job, "resizes")}


def resizes_lines(document: dict[str, Any], last: int) -> Iterator[str]:
    """Yield the latest resizes as lines of text, oldest first, one block each.

    Args:
        last: Most resizes shown.
    """
    job = JobView.from_json(document)
    yield f"{job.job_id}  {job.shown_name}  (tenant {job.shown_tenant})"
    yield from cold_lines(job)
    resizes = items(job.document, "resizes")
    if not resizes:
        yield "no slots yet, so no resizes"
        return
    if len(resizes) > last:
        yield f"... {len(resizes) - last} earlier resizes (--last N shows more)"
    yield "seconds after the decision; TOOK is from the phase before"
    for resize in resizes[-last:]:
        yield from _block(resize)


def cold_lines(job: JobView) -> Iterator[str]:
    """Yield why new workers of a job start cold, if they do."""
    cold = text_of(job.document, "cold")
    if cold:
        yield f"  its new workers start cold, without standbys: {cold}"


def _block(resize: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield _head(resize)
    yield f"  decided {readable_utc(number_of(resize, 'decided_s') or 0.0)}; {_figures(resize)}"
    phases = items(resize, "phases")
    if phases:
        names = {**_NAMES, "standby-started": "no standbys (cold)"} if resize.get("cold") else _NAMES
        for line in plain_lines(_PHASES, [_row(phase, names) for phase in phases]):
            yield f"  {line}"
    else:
        yield "  nothing was heard of it yet"
    why = text_of(resize, "why")
    if why:
        code = text_of(resize, "code")
        yield f"  went wrong: {why}{f' [{code}]' if code else ''}"
    clocks = resize.get("clocks_s")
    clocks = clocks if isinstance(clocks, dict) else {}
    for node in sorted(clocks):
        off_s = number_of(clocks, node)
        if off_s is not None:
            yield f"  node {printable(node)}: {clock_text(off_s)}"


def _head(resize: dict[str, Any]) -> str:
    kind = text_of(resize, "kind") or ""
    before, width = whole_of(resize, "width_before") or 0, whole_of(resize, "width") or 0
    words = [f"{_KINDS.get(kind, kind)} {before} -> {width}"]
    cold = resize.get("cold")
    if isinstance(cold, bool):
        words.append("cold" if cold else "warm")
    words.append(text_of(resize, "outcome") or "under way")
    return f"generation {whole_of(resize, 'number')}: {', '.join(words)}"


def _figures(resize: dict[str, Any]) -> str:
    first_s, pause_s = number_of(resize, "first_step_after_s"), number_of(resize, "pause_s")
    first = "no first step seen" if first_s is None else f"first step after {first_s:,.3f} s"
    if text_of(resize, "kind") == "start":
        return first
    return f"pause {NOT_MEASURED if pause_s is None else f'{pause_s:,.3f} s'}; {first}"


def _row(phase: dict[str, Any], names: Mapping[str, str]) -> list[str]:
    name = text_of(phase, "phase") or ""
    first_s, last_s = number_of(phase, "first_after_s"), number_of(phase, "last_after_s")
    took_s, count = number_of(phase, "took_s"), whole_of(phase, "count") or 0
    notes = []
    if count > 1:
        notes.append(f"{count} times")
    if phase.get("slowest"):
        notes.append("slowest")
    lease_id = text_of(phase, "last_lease_id")
    if count > 1 and lease_id and first_s != last_s:
        notes.append(f"last {lease_id}")
    return [
        names.get(name, name),
        _seconds(first_s),
        "" if first_s == last_s else _seconds(last_s),
        _seconds(took_s),
        ", ".join(notes),
    ]


def _seconds(value_s: float | None) -> str:
    return "" if value_s is None else f"{value_s:,.3f}"
