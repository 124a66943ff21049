# SPDX-License-Identifier: Apache-2.0
"""Reading a training command the way the Python interpreter would read it."""

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_INTERPRETER = re.compile(r"python(?:\d+(?:\.\d+)?)?")
_FLAGS = frozenset("bBdEIOPqsSuvx")
"""Interpreter options without an argument that leave a script a script."""
_FLAGS_WITH_ARGUMENT = frozenset("WX")


class Form(StrEnum):
    """What the interpreter is told to run."""

    SCRIPT = "script"
    MODULE = "module"


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """A command of the form ``python [options] script.py args`` or ``python [options] -m module args``."""

    interpreter: str
    options: tuple[str, ...]
    form: Form
    target: str
    arguments: tuple[str, ...]


def parse_python(command: Sequence[str]) -> PythonCommand | None:
    """Return the parts of a Python command, or None when it is another program or another form.

    ``python -c``, standard input and interactive sessions are other forms: they run, unmeasured.
    """
    if not command or not _INTERPRETER.fullmatch(Path(command[0]).name):
        return None
    options: list[str] = []
    position = 1
    while position < len(command):
        word = command[position]
        if not word.startswith("-"):
            rest = tuple(command[position + 1 :])
            return PythonCommand(command[0], tuple(options), Form.SCRIPT, word, rest)
        step = _parse_word(word, command[position + 1 :])
        if step is None:
            return None
        kept, module, used = step
        options += kept
        position += 1 + used
        if module is not None:
            return PythonCommand(command[0], tuple(options), Form.MODULE, module, tuple(command[position:]))
    return None


def _parse_word(word: str, following: Sequence[str]) -> tuple[list[str], str | None, int] | None:
    """Return (options to keep, module to run, following words used), or None for another form."""
    flags = ""
    for index, letter in enumerate(word[1:], start=1):
        attached = word[index + 1 :]
        if letter in _FLAGS:
            flags += letter
            continue
        if letter not in {*_FLAGS_WITH_ARGUMENT, "m"} or not (attached or following):
            return None
        kept = [f"-{flags}"] if flags else []
        value, used = (attached, 0) if attached else (following[0], 1)
        if letter == "m":
            return kept, value, used
        return [*kept, f"-{letter}", value], None, used
    return ([f"-{flags}"], None, 0) if flags else None


def find_interpreter(
    command: PythonCommand, virtual_env: str | None, environment: Mapping[str, str], working_dir: str
) -> str | None:
    """Return the path of the interpreter that runs ``command``, or None when there is none.

    A path is taken as it is. A bare ``python`` is the virtual environment's, else the first one on the
    ``PATH`` that the job asked for, else the one that runs Horowatt. Links are not resolved, because a
    virtual environment is found by the place of its link.
    """
    name = command.interpreter
    if "/" in name:
        path = Path(working_dir) / name
    elif virtual_env is not None:
        folder = Path(virtual_env) / "bin"
        path = folder / name if (folder / name).exists() else folder / "python"
    elif "PATH" in environment:
        return shutil.which(name, path=environment["PATH"])
    else:
        path = Path(sys.executable)
    return str(path) if os.access(path, os.X_OK) and path.is_file() else None
