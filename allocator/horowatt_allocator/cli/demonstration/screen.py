# SPDX-License-Identifier: Apache-2.0
"""What is seen while the demo runs: a live table on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from horowatt_allocator.cli.ps import width_text
from horowatt_allocator.cli.terminal import Column, console_for, is_terminal, rich_table
from horowatt_allocator.cli.views import JobView, items, number_of, reason_of, text_of, whole_of
from horowatt_allocator.reports.figures import ABSENT, energy_text, power_text, rate_text

if TYPE_CHECKING:
    from rich.live import Live

STATUS_EVERY_S = 5.0
"""Between two status lines where nothing can be redrawn."""

_COLUMNS = (
    Column("JOB"),
    Column("PHASE"),
    Column("WIDTH", right=True),
    Column("RATE", right=True),
    Column("POWER", right=True),
    Column("ENERGY", right=True),
    Column("REASON"),
)


class Screen:
    """Steps, decisions and the state of the jobs, in order of time.

    Args:
        stream: Where it is shown; stderr when stdout belongs to ``--json``.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._began_s = time.monotonic()
        self._live: Live | None = None
        self._last_status_s = 0.0
        self._wanted = is_terminal(stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_table()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self._began_s

    def say(self, text: str) -> None:
        """Show a line above the table, with the time since the demo began."""
        self.line(f"[{self.elapsed_s:5.0f} s] {text}")

    def line(self, text: str) -> None:
        """Show a line as it is."""
        if self._live is not None:
            self._live.console.print(text, soft_wrap=True)
            return
        # A terminal that was closed must not keep the demo from ending its processes.
        try:
            print(text, file=self._stream, flush=True)
        except OSError:
            return

    def decision(self, decision: dict[str, Any], names: dict[str, str]) -> None:
        """Show what a decision changed and why, one line for each change."""
        for text in decision_lines(decision, names):
            self.say(text)

    def jobs(self, jobs: Sequence[dict[str, Any]]) -> None:
        """Show the jobs: redraw the table, or print a status line every few seconds."""
        if self._wanted:
            self._redraw(jobs)
        elif self.elapsed_s - self._last_status_s >= STATUS_EVERY_S:
            self._last_status_s = self.elapsed_s
            self.say(status_line(jobs))

    def end_table(self) -> None:
        """Leave the table as it is and print below it from now on."""
        if self._live is not None:
            live, self._live = self._live, None
            try:
                live.stop()
            except OSError:
                return

    def _redraw(self, jobs: Sequence[dict[str, Any]]) -> None:
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=console_for(self._stream), auto_refresh=False)
            self._live.start()
        title = f"{self.elapsed_s:.0f} s"
        if any(job.get("simulated") for job in jobs):
            title += "  figures are of simulated devices"
        self._live.update(rich_table(_COLUMNS, [_row(job) for job in jobs], title), refresh=True)


def decision_lines(decision: dict[str, Any], names: dict[str, str]) -> list[str]:
    """Return the lines of a decision; one that changed nothing says so in one line."""
    head = f"decision {whole_of(decision, 'number')} ({text_of(decision, 'trigger')})"
    changes = items(decision, "changes")
    if not changes:
        power = power_text(number_of(decision, "power_w"))
        return [f"{head}: everything stays, {power} expected"]
    return [f"{head}: {_change_text(change, names)}" for change in changes]


def _change_text(change: dict[str, Any], names: dict[str, str]) -> str:
    job_id = text_of(change, "job_id") or ""
    name = names.get(job_id) or text_of(change, "name") or job_id
    before, after = whole_of(change, "width_before"), whole_of(change, "width_after")
    unit = "GPU" if after == 1 else "GPUs"
    moves = [f"{before} -> {after} {unit}" if before != after else f"{after} {unit}"]
    limits = number_of(change, "limit_before_w"), number_of(change, "limit_after_w")
    if limits[0] != limits[1] and after:
        moves.append(f"limit {_limit_text(limits[0])} -> {_limit_text(limits[1])}")
    code, sentence = reason_of(change)
    return f"{name} {', '.join(moves)}: {sentence or code}"


def _limit_text(limit_w: float | None) -> str:
    return "default" if limit_w is None else power_text(limit_w)


def status_line(jobs: Sequence[dict[str, Any]]) -> str:
    """Return the state of all jobs in one line."""
    return " | ".join(_short(JobView(job)) for job in jobs) or "no jobs yet"


def _short(job: JobView) -> str:
    if job.phase != "running":
        return f"{job.shown_name} {job.phase}"
    figures = [
        rate_text(number_of(job.document, "rate_per_s")),
        power_text(number_of(job.document, "power_w")),
    ]
    shown = " ".join(figure for figure in figures if figure != ABSENT) or "starting"
    mark = " sim" if job.document.get("simulated") and shown != "starting" else ""
    return f"{job.shown_name} width {width_text(job)} {shown}{mark}"


def _row(document: dict[str, Any]) -> list[str]:
    job = JobView(document)
    return [
        job.shown_name,
        job.phase,
        width_text(job),
        rate_text(number_of(document, "rate_per_s")),
        power_text(number_of(document, "power_w")),
        energy_text(number_of(document, "energy_j")),
        job.reason_text,
    ]


def stream_for(as_json: bool) -> TextIO:
    """Return where the demo is shown: stdout, or stderr when stdout belongs to the JSON object."""
    return sys.stderr if as_json else sys.stdout
