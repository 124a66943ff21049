# SPDX-License-Identifier: Apache-2.0
"""TOML read strictly: every key is asked for by name and type, and a key nobody asked for is an error.

An operator who misspells ``num_gpus`` must hear of it, not get a default.
"""

import ipaddress
import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from horowatt.errors import InvalidInput

MAX_FILE_BYTES = 16 << 20
_MAX_NAME_LENGTH = 64
_HOST_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_MAX_HOST_LENGTH = 253


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """Error codes of one kind of file."""

    unreadable: str
    malformed: str
    unknown_key: str
    bad_value: str


def read_text(path: Path, codes: Codes, what: str) -> str:
    """Return the text of a configuration file.

    Raises:
        InvalidInput: ``codes.unreadable`` when it is absent, not a plain file, too large or not UTF-8.
    """
    because = ""
    try:
        if not path.is_file():
            because = "it is not a file" if path.exists() else "there is no such file"
        elif path.stat().st_size > MAX_FILE_BYTES:
            because = f"it is larger than {MAX_FILE_BYTES} bytes"
        else:
            return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        because = error.strerror or str(error)
    except UnicodeDecodeError as error:
        because = f"it is not UTF-8 text: {error}"
    raise InvalidInput(
        codes.unreadable,
        f"{path}: the {what} cannot be read",
        because=because,
        hint="check the path and the permissions of the file",
        fields={"file": str(path)},
    )


def parse(text: str, path: Path, codes: Codes, what: str) -> "Table":
    """Return the root table of a TOML text.

    Raises:
        InvalidInput: ``codes.malformed`` with the line when it is not TOML.
    """
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInput(
            codes.malformed,
            f"{path}: the {what} is not valid TOML",
            because=str(error),
            hint="compare it with the examples in hostfiles/",
            fields={"file": str(path)},
        ) from error
    return Table(values, path, codes, text)


class Table:
    """One TOML table whose keys are taken out one by one; ``finish`` refuses what is left."""

    def __init__(
        self, values: dict[str, object], path: Path, codes: Codes, text: str, where: str = ""
    ) -> None:
        self._left = dict(values)
        self._known: list[str] = []
        self._path = path
        self._codes = codes
        self._text = text
        self._where = where

    def bad(self, key: str, because: str, hint: str = "", *, code: str | None = None) -> NoReturn:
        """Raise the error for a value that cannot be used."""
        place = f"{self._where}{key}"
        raise InvalidInput(
            code or self._codes.bad_value,
            f"{self._path}: '{place}' cannot be used",
            because=because,
            hint=hint,
            fields={"file": str(self._path), "key": place},
        )

    def finish(self) -> None:
        """Refuse keys that were never asked for.

        Raises:
            InvalidInput: ``codes.unknown_key``.
        """
        for key in self._left:
            self.bad(
                key,
                "there is no such key",
                f"known here: {', '.join(self._known)}",
                code=self._codes.unknown_key,
            )

    def text(self, key: str, default: str | None = None) -> str | None:
        """Take a text: 1 to 64 printable characters without blanks around it."""
        value = self._take(key)
        if value is None:
            return default
        return self._check_text(key, value)

    def texts(self, key: str) -> tuple[str, ...]:
        """Take a list of texts without repetition; empty when the key is absent."""
        value = self._take(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            self.bad(key, f"{value!r} is not a list of texts")
        found = tuple(self._check_text(key, item) for item in value)
        if len(set(found)) != len(found):
            self.bad(key, "an entry stands there twice")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """Take true or false."""
        value = self._take(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.bad(key, f"{value!r} is neither true nor false")
        return value

    def whole(self, key: str, low: int, high: int) -> int | None:
        """Take a whole number from ``low`` to ``high``; None when the key is absent."""
        value = self._take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self.bad(key, f"{value!r} is not a whole number")
        if not low <= value <= high:
            self.bad(key, f"{value} is not between {low} and {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        """Take a number from ``low`` to ``high``; None when the key is absent."""
        value = self._take(key)
        return None if value is None else self._check_number(key, value, low, high)

    def numbers(self, key: str, low: float, high: float) -> tuple[float, ...] | None:
        """Take a list of numbers, each from ``low`` to ``high``; None when the key is absent."""
        value = self._take(key)
        if value is None:
            return None
        if not isinstance(value, list) or not value:
            self.bad(key, f"{value!r} is not a list of numbers")
        return tuple(self._check_number(key, item, low, high) for item in value)

    def host(self, key: str, default: str | None = None) -> str | None:
        """Take a host name or an IPv4 address."""
        value = self._take(key)
        if value is None:
            return default
        if not isinstance(value, str) or not is_host(value):
            self.bad(key, f"{value!r} is not a host name or an IPv4 address", HOST_HINT)
        return value

    def table(self, key: str) -> "Table":
        """Take a table; empty when the key is absent."""
        value = self._take(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            self.bad(key, f"{value!r} is not a table", f"write it as [{key}]")
        return Table(value, self._path, self._codes, self._text, f"{self._where}{key}.")

    def tables(self, key: str) -> list["Table"]:
        """Take an array of tables; empty when the key is absent."""
        value = self._take(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.bad(key, "it is not a list of tables", f"start each one with [[{key}]]")
        lines = self._header_lines(key)
        places = [f", line {line}" for line in lines] if len(lines) == len(value) else [""] * len(value)
        return [
            Table(item, self._path, self._codes, self._text, f"{key} {number}{place}: ")
            for number, (item, place) in enumerate(zip(value, places, strict=True), start=1)
        ]

    def _take(self, key: str) -> object:
        self._known.append(key)
        return self._left.pop(key, None)

    def _check_text(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            self.bad(key, f"{value!r} is not a text", "put it in quotes")
        if not is_name(value):
            self.bad(
                key,
                f"{value!r} is empty, longer than {_MAX_NAME_LENGTH} characters, "
                "has blanks around it or characters that cannot be printed",
            )
        return value

    def _check_number(self, key: str, value: object, low: float, high: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.bad(key, f"{value!r} is not a number")
        if not low <= value <= high:
            self.bad(key, f"{value} is not between {low:g} and {high:g}")
        return float(value)

    def _header_lines(self, key: str) -> list[int]:
        header = re.compile(rf"\s*\[\[\s*{re.escape(key)}\s*\]\]")
        return [n for n, line in enumerate(self._text.splitlines(), start=1) if header.match(line)]


def is_name(value: str) -> bool:
    """Tell whether a text can name something: printable, at most 64 characters, no blanks around it.

    Quotes, ``;`` and ``$()`` are allowed: no shell ever sees a name.
    """
    return 0 < len(value) <= _MAX_NAME_LENGTH and value.isprintable() and value.strip() == value


HOST_HINT = (
    "letters, digits, '-' and '.' make a host name; IPv6 addresses cannot be used because Horovod "
    "splits hosts at ':', give the host a name instead"
)


def is_host(value: str) -> bool:
    """Tell whether a text is a host name (RFC 1123) or an IPv4 address."""
    if not 0 < len(value) <= _MAX_HOST_LENGTH:
        return False
    labels = value.split(".")
    if not all(_HOST_LABEL.fullmatch(label) for label in labels):
        return False
    if labels[-1].isdigit():  # then it can only be an address, never a name
        try:
            ipaddress.IPv4Address(value)
        except ValueError:
            return False
    return True
