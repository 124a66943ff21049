# SPDX-License-Identifier: Apache-2.0
"""JSON for the records of :mod:`horowatt.records`, validated on the way in."""

from typing import TypeVar

import msgspec

from horowatt.errors import InvalidInput

T = TypeVar("T")


def encode(record: object) -> bytes:
    """Return the JSON of a record (dataclasses, enums, tuples and mappings of them)."""
    return msgspec.json.encode(record)


def decode(data: bytes | str, kind: type[T]) -> T:
    """Return the record of type ``kind`` that ``data`` describes.

    Raises:
        InvalidInput: ``HW-WIRE-001`` when the text is not JSON, does not fit the record, or is nested so
            deeply that only malice explains it; the message names the field.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(
            "HW-WIRE-001",
            f"this is not a valid {kind.__name__}",
            because=str(error),
            hint="check that both sides run the same version of Horowatt",
        ) from error
