# SPDX-License-Identifier: Apache-2.0
"""What commands print: results to stdout, prose to stderr, tables that fit where they go.

``rich`` is imported only for a table on a terminal; without it, or into a pipe, tables are plain
columns. Text that came from tenants goes through ``printable`` before it is shown.
"""

import json
import os
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from horowatt_allocator.reports.figures import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SCHEMA_VERSION = 1
"""Of every JSON object that a command prints; changes only when a field does."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; figures are aligned to the right."""

    title: str
    right: bool = False


def emit_json(document: Mapping[str, object]) -> None:
    """Print the one JSON object of a command."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **document}, ensure_ascii=False), flush=True)


def say(text: str) -> None:
    """Print prose to stderr."""
    print(text, file=sys.stderr, flush=True)


def is_terminal(stream: TextIO) -> bool:
    """Tell whether a person looks at the stream on a terminal that can be redrawn."""
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to stdout, with rich on a terminal."""
    if is_terminal(sys.stdout):
        try:
            console, table = console_for(sys.stdout), rich_table(columns, rows)
        except ImportError:
            pass
        else:
            console.print(table)
            return
    for line in plain_lines(columns, rows):
        print(line)


def console_for(stream: TextIO) -> "Console":
    """Return a rich console; rich itself honours ``NO_COLOR``."""
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, emoji=False)


def rich_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], title: str | None = None) -> "Table":
    """Return a rich table; cells are text, never markup."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, title=title, title_justify="left", pad_edge=False)
    for column in columns:
        table.add_column(
            column.title, justify="right" if column.right else "left", overflow="fold", no_wrap=column.right
        )
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def plain_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as lines of aligned text; the last column is not padded."""
    shown = [[printable(cell) for cell in row] for row in rows]
    table = [[column.title for column in columns], *shown]
    widths = [max(_cells(row[index]) for row in table) for index in range(len(columns))]
    return [
        "  ".join(_padded(cell, widths[i], columns[i].right) for i, cell in enumerate(row)).rstrip()
        for row in table
    ]


def _cells(text: str) -> int:
    """Return how many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(bool(unicodedata.combining(char)) for char in text)


def _padded(text: str, width: int, right: bool) -> str:
    gap = " " * (width - _cells(text))
    return gap + text if right else text + gap
