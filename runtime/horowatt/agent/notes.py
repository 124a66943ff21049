# SPDX-License-Identifier: Apache-2.0
"""What the agent says: one line per event on stderr, and notes to the head while they are true."""

import logging
import sys
import time
from collections.abc import Callable

from horowatt.errors import HorowattError

LOGGER_NAME = "horowatt.agent"
_LOG = logging.getLogger(LOGGER_NAME)


KEPT_S = 120.0
"""Seconds for which a note holds after it was last stated."""


class Notes:
    """Things an operator should know, by stable code; each is logged when it begins and ends."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._texts: dict[str, str] = {}
        self._stated_s: dict[str, float] = {}

    def set(self, code: str, text: str) -> None:
        """State that ``code`` holds; said on stderr once, however often it is stated."""
        # Names of files may hold bytes that are no text, which JSON could not carry.
        text = " ".join(text.split()).encode("utf-8", "replace").decode()
        if code not in self._texts:
            _LOG.warning("%s", text, extra={"code": code})
        self._texts[code] = text
        self._stated_s[code] = self._monotonic_s()

    def error(self, error: HorowattError) -> None:
        """State an error of ours."""
        self.set(error.code, f"{error.message}: {error.because}" if error.because else error.message)

    def clear(self, code: str) -> None:
        """State that ``code`` does not hold any more."""
        if self._texts.pop(code, None) is not None:
            _LOG.info("no longer so", extra={"code": code})

    def all(self) -> dict[str, str]:
        """Return the notes that hold now."""
        oldest_s = self._monotonic_s() - KEPT_S
        for code in [code for code in self._texts if self._stated_s[code] < oldest_s]:
            self.clear(code)
        return dict(self._texts)


def say(text: str, *, code: str = "-", level: int = logging.INFO) -> None:
    """Write one line about an event that is over once it is said."""
    _LOG.log(level, "%s", " ".join(text.split()), extra={"code": code})


class _Line(logging.Formatter):
    """``<UTC time> <level> <code> <text>``, always one line."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        text = " ".join(record.getMessage().split())
        return f"{at} {record.levelname.lower()} {getattr(record, 'code', '-')} {text}"


def log_to_stderr() -> None:
    """Send the agent's lines to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line())
    _LOG.handlers[:] = [handler]
    _LOG.setLevel(logging.INFO)
    _LOG.propagate = False
