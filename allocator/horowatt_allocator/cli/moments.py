# SPDX-License-Identifier: Apache-2.0
"""Lengths of time and instants as people type them."""

import re
from datetime import datetime

from horowatt.errors import InvalidInput

_UNIT_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = r"(\d+(?:\.\d+)?)\s*(min|s|m|h|d)"
_DURATION = re.compile(rf"(?:{_PART}\s*)+", re.IGNORECASE)
_MAX_DURATION_S = 10 * 365 * 86_400.0
_DURATION_HINT = "write for example 90s, 20m, 2h, 1h30m or 3d"


def parse_duration_s(text: str, what: str) -> float:
    """Return the seconds of a duration such as ``20m`` or ``1h30m``.

    A bare number is refused: people mean seconds, minutes or hours by it.

    Args:
        what: Name of the option, for the message.

    Raises:
        InvalidInput: ``HW-CLI-002``.
    """
    stripped = text.strip()
    if not _DURATION.fullmatch(stripped):
        because = "a number needs a unit" if stripped.replace(".", "", 1).isdigit() else ""
        raise _bad(what, text, because, _DURATION_HINT)
    parts = re.findall(_PART, stripped, re.IGNORECASE)
    total_s = sum(float(number) * _UNIT_S[unit.lower()] for number, unit in parts)
    if not 0 < total_s <= _MAX_DURATION_S:
        raise _bad(what, text, "it must be longer than nothing and at most ten years", _DURATION_HINT)
    return total_s


def parse_deadline_s(text: str, now_s: float, what: str = "deadline") -> float:
    """Return the Unix time of a deadline: a duration from now, or ISO-8601 with a zone.

    Raises:
        InvalidInput: ``HW-CLI-002`` when it is neither, has no zone or has passed.
    """
    hint = "write for example 2h (from now) or 2026-03-01T18:00+01:00"
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        try:
            return now_s + parse_duration_s(text, what)
        except InvalidInput as error:
            raise _bad(what, text, error.because, hint) from error
    if moment.tzinfo is None:
        raise _bad(what, text, "it names no time zone, so it is a different instant elsewhere", hint)
    if moment.timestamp() <= now_s:
        raise _bad(what, text, "it has passed", hint)
    return moment.timestamp()


def _bad(what: str, text: str, because: str, hint: str) -> InvalidInput:
    return InvalidInput(
        "HW-CLI-002", f"{what} {text!r} cannot be used", because=because, hint=hint, fields={what: text}
    )


def clock_text(off_s: float) -> str:
    """Return what to say of a clock: seconds that it is behind the head's, or ahead of it below 0."""
    way = "behind" if off_s > 0 else "ahead of"
    return f"its clock is {abs(off_s):,.1f} s {way} the head's; times are corrected by that"
