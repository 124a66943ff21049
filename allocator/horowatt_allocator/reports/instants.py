# SPDX-License-Identifier: Apache-2.0
"""Instants as text: always UTC, so that a report reads the same on every machine."""

from datetime import UTC, datetime

_MINUTE_S = 60
_HOUR_MIN = 60


def iso_utc(unix_s: float) -> str:
    """Return ISO-8601 in UTC with milliseconds, e.g. ``2026-03-01T12:00:00.000Z``."""
    stamp = datetime.fromtimestamp(unix_s, tz=UTC).isoformat(timespec="milliseconds")
    return stamp.replace("+00:00", "Z")


def readable_utc(unix_s: float) -> str:
    """Return an instant for people, e.g. ``2026-03-01 12:00:00 UTC``."""
    return datetime.fromtimestamp(unix_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def readable_duration(duration_s: float) -> str:
    """Return a length of time for people, e.g. ``1 h 02 min`` or ``12.3 s``."""
    if duration_s < _MINUTE_S:
        return f"{duration_s:.1f} s"
    minutes, seconds = divmod(round(duration_s), _MINUTE_S)
    if minutes < _HOUR_MIN:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, _HOUR_MIN)
    return f"{hours} h {minutes:02d} min"
