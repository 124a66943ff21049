# SPDX-License-Identifier: Apache-2.0
"""Figures and names as people read them, in reports and on the terminal.

Absent values read ``not measured`` or ``-``, never 0. Names come from tenants: nothing of them
may move the cursor, colour the terminal or reorder the text around it.
"""

import unicodedata

ABSENT = "-"
NOT_MEASURED = "not measured"

_KILO = 1e3
_KWH_FROM_J = 3.6e5
"""From a tenth of a kilowatt-hour on, kilowatt-hours read better than joules."""
_KW_FROM_W = 1e4
_WHOLE_FROM_PER_S = 100

# Control, format (bidirectional overrides among them), surrogate and unassigned characters.
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"})


def printable(text: str) -> str:
    """Return ``text`` with every character that could act on the reader's screen spelled out."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_spelled(char) for char in text)


def _spelled(char: str) -> str:
    if unicodedata.category(char) not in _UNPRINTABLE:
        return char
    return char.encode("unicode_escape", "backslashreplace").decode("ascii")


def energy_text(energy_j: float | None) -> str:
    """Return joules as ``870 J``, ``12.3 kJ`` or ``1.234 kWh``."""
    if energy_j is None:
        return NOT_MEASURED
    size_j = abs(energy_j)
    if size_j < _KILO:
        return f"{energy_j:.1f} J"
    if size_j < _KWH_FROM_J:
        return f"{energy_j / _KILO:.2f} kJ"
    # The records take a good part of a command's start-up time, and most figures are small.
    from horowatt_allocator.records.energy import J_PER_KWH

    return f"{energy_j / J_PER_KWH:,.3f} kWh"


def power_text(power_w: float | None) -> str:
    """Return watts as ``143 W`` or ``2.31 kW``."""
    if power_w is None:
        return ABSENT
    return f"{power_w:.0f} W" if abs(power_w) < _KW_FROM_W else f"{power_w / _KILO:,.2f} kW"


def rate_text(rate_per_s: float | None) -> str:
    """Return samples per second with three significant digits or more."""
    if rate_per_s is None:
        return ABSENT
    return f"{rate_per_s:,.0f}/s" if rate_per_s >= _WHOLE_FROM_PER_S else f"{rate_per_s:.3g}/s"


def ratio_text(ratio: float | None) -> str:
    """Return a share as a percentage with one decimal."""
    return ABSENT if ratio is None else f"{100 * ratio:.1f} %"


def count_text(count: int | None) -> str:
    """Return a count with thousands separated."""
    return ABSENT if count is None else f"{count:,}"


def per_joule_text(samples_per_j: float | None) -> str:
    """Return samples per joule with three significant digits."""
    return ABSENT if samples_per_j is None else f"{samples_per_j:.3g} /J"
