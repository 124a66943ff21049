# SPDX-License-Identifier: Apache-2.0
"""A job as a TOML file, read strictly: a key nobody knows is an error, not a default.

Keys are the flags of ``horowatt submit`` with ``_`` for ``-``::

    name = "resnet"
    tenant = "vision"
    command = ["python", "train.py", "--epochs", "90"]
    min = 1
    max = 8
    powers_of_two = true
    batch_size = 64
    batch_rule = "per-worker"
    epochs = 90
    deadline = "2026-03-01T18:00+01:00"
    wall_time = "12h"
    working_dir = "."
    venv = "../env"
    gpu_types = ["h100", "a100"]
    [env]
    OMP_NUM_THREADS = "4"

Relative folders are meant from the folder of the file.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from horowatt.errors import InvalidInput
from horowatt_allocator.cli.job_wish import JobWish
from horowatt_allocator.cli.widths import WidthWish

MAX_FILE_BYTES = 1 << 20


def read_job_file(path: Path) -> JobWish:
    """Return what a job file asks for.

    Raises:
        InvalidInput: ``HW-CLI-003`` unreadable, ``004`` not TOML, ``005`` unknown key, ``006`` bad value.
    """
    values = _parse(path, _read(path))
    unknown = [key for key in values if key not in _KEYS]
    if unknown:
        raise InvalidInput(
            "HW-CLI-005",
            f"{path}: there is no key {unknown[0]!r} in a job file",
            hint=f"known keys: {', '.join(sorted(_KEYS))}",
            fields={"file": str(path), "key": unknown[0]},
        )
    taken = {key: _KEYS[key](_Value(path, key, value)) for key, value in values.items()}
    widths = WidthWish(
        minimum=taken.pop("min", None),  # type: ignore[arg-type]  # checked by its reader below
        maximum=taken.pop("max", None),  # type: ignore[arg-type]
        step=taken.pop("width_step", None),  # type: ignore[arg-type]
        powers_of_two=taken.pop("powers_of_two", None),  # type: ignore[arg-type]
        listed=taken.pop("widths", None),  # type: ignore[arg-type]
    )
    return replace(JobWish(**taken), widths=widths)  # type: ignore[arg-type]


def _read(path: Path) -> str:
    try:
        if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
            return path.read_text(encoding="utf-8-sig")
        because = "it is not a file" if not path.is_file() else f"it is larger than {MAX_FILE_BYTES} bytes"
        because = because if path.exists() else "there is no such file"
    except OSError as error:
        because = error.strerror or str(error)
    except UnicodeDecodeError as error:
        because = f"it is not UTF-8 text: {error}"
    raise InvalidInput(
        "HW-CLI-003",
        f"{path}: the job file cannot be read",
        because=because,
        hint="check the path given to --file",
        fields={"file": str(path)},
    )


def _parse(path: Path, text: str) -> Mapping[str, object]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInput(
            "HW-CLI-004",
            f"{path}: the job file is not valid TOML",
            because=str(error),
            hint="texts stand in quotes, lists in square brackets",
            fields={"file": str(path)},
        ) from error


class _Value:
    """One value of a job file with what it takes to complain about it."""

    def __init__(self, path: Path, key: str, value: object) -> None:
        self.path = path
        self.key = key
        self.value = value

    def bad(self, expected: str) -> NoReturn:
        raise InvalidInput(
            "HW-CLI-006",
            f"{self.path}: {self.key!r} cannot be used",
            because=f"{self.value!r} is not {expected}",
            fields={"file": str(self.path), "key": self.key},
        )


def _text(value: _Value) -> str:
    if not isinstance(value.value, str) or not value.value:
        value.bad("a text")
    return value.value


def _duration(value: _Value) -> str:
    # TOML has dates of its own; written without quotes they mean the same.
    if isinstance(value.value, str):
        return _text(value)
    isoformat = getattr(value.value, "isoformat", None)
    if not callable(isoformat):
        value.bad('a text such as "2h"')
    return str(isoformat())


def _texts(value: _Value) -> tuple[str, ...]:
    if not isinstance(value.value, list) or not all(isinstance(entry, str) for entry in value.value):
        value.bad("a list of texts")
    return tuple(value.value)


def _command(value: _Value) -> tuple[str, ...]:
    if isinstance(value.value, str):
        value.bad('a list such as ["python", "train.py"]; no shell ever splits it')
    return _texts(value)


def _whole(value: _Value) -> int:
    if isinstance(value.value, bool) or not isinstance(value.value, int):
        value.bad("a whole number")
    return value.value


def _wholes(value: _Value) -> tuple[int, ...]:
    if not isinstance(value.value, list):
        value.bad("a list of whole numbers")
    return tuple(_whole(_Value(value.path, value.key, entry)) for entry in value.value)


def _number(value: _Value) -> float:
    if isinstance(value.value, bool) or not isinstance(value.value, int | float):
        value.bad("a number")
    return float(value.value)


def _flag(value: _Value) -> bool:
    if not isinstance(value.value, bool):
        value.bad("true or false")
    return value.value


def _environment(value: _Value) -> dict[str, str]:
    if not isinstance(value.value, dict):
        value.bad("a table of texts")
    for name, content in value.value.items():
        if not isinstance(content, str):
            _Value(value.path, f"{value.key}.{name}", content).bad("a text")
    return dict(value.value)


def _folder(value: _Value) -> str:
    return str((value.path.parent / Path(_text(value)).expanduser()).absolute())


_KEYS: Mapping[str, Callable[[_Value], object]] = {
    "name": _text,
    "tenant": _text,
    "command": _command,
    "min": _whole,
    "max": _whole,
    "width_step": _whole,
    "widths": _wholes,
    "powers_of_two": _flag,
    "batch_size": _whole,
    "batch_rule": _text,
    "total_samples": _whole,
    "epochs": _number,
    "deadline": _duration,
    "wall_time": _text,
    "env": _environment,
    "working_dir": _folder,
    "venv": _folder,
    "gpu_types": _texts,
    "weight": _number,
    "flexibility": _number,
    "attach": _flag,
}
