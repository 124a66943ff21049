# SPDX-License-Identifier: Apache-2.0
"""Reading training commands as the Python interpreter reads them."""

import sys
from pathlib import Path

import pytest

from horowatt.elastic.command import Form, PythonCommand, find_interpreter, parse_python


@pytest.mark.parametrize(
    ("command", "options", "form", "target", "arguments"),
    [
        (["python", "t.py"], (), Form.SCRIPT, "t.py", ()),
        (["python3", "-u", "t.py", "-u", "--x"], ("-u",), Form.SCRIPT, "t.py", ("-u", "--x")),
        (
            ["/opt/py/bin/python3.11", "-uB", "-X", "dev", "t.py"],
            ("-uB", "-X", "dev"),
            Form.SCRIPT,
            "t.py",
            (),
        ),
        (["python", "-Wignore", "t.py"], ("-W", "ignore"), Form.SCRIPT, "t.py", ()),
        (["python", "-uXdev", "t.py"], ("-u", "-X", "dev"), Form.SCRIPT, "t.py", ()),
        (["python", "-m", "a.b", "-m", "c"], (), Form.MODULE, "a.b", ("-m", "c")),
        (["python", "-um", "a.b", "x y"], ("-u",), Form.MODULE, "a.b", ("x y",)),
        (["python", "-ma.b"], (), Form.MODULE, "a.b", ()),
        (["python", "a; $(b) 'c'.py", "$HOME"], (), Form.SCRIPT, "a; $(b) 'c'.py", ("$HOME",)),
    ],
)
def test_python_commands_are_taken_apart(
    command: list[str], options: tuple[str, ...], form: Form, target: str, arguments: tuple[str, ...]
) -> None:
    """Interpreter options, the script or module, and the script's own arguments are told apart."""
    assert parse_python(command) == PythonCommand(command[0], options, form, target, arguments)


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["bash", "t.sh"],
        ["./t.py"],
        ["pythonx", "t.py"],
        ["python"],
        ["python", "-"],
        ["python", "-c", "pass"],
        ["python", "-i", "t.py"],
        ["python", "-V"],
        ["python", "--version"],
        ["python", "-m"],
        ["python", "-u"],
    ],
)
def test_other_commands_are_left_alone(command: list[str]) -> None:
    """Whatever is not a script or a module of Python is not taken for one."""
    assert parse_python(command) is None


def _command(interpreter: str) -> PythonCommand:
    return PythonCommand(interpreter, (), Form.SCRIPT, "t.py", ())


def test_a_bare_python_is_the_virtual_environments(tmp_path: Path) -> None:
    """The virtual environment's interpreter is used by its own path, with its link kept."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    expected = str(tmp_path / "bin" / "python")
    assert find_interpreter(_command("python"), str(tmp_path), {}, "/") == expected
    assert find_interpreter(_command("python3.11"), str(tmp_path), {}, "/") == expected


def test_a_missing_interpreter_is_none(tmp_path: Path) -> None:
    """An interpreter that is not there is not replaced by another one."""
    assert find_interpreter(_command("python"), str(tmp_path), {}, "/") is None
    assert find_interpreter(_command("bin/python"), None, {}, str(tmp_path)) is None
    assert find_interpreter(_command("python"), None, {"PATH": str(tmp_path)}, "/") is None


def test_without_anything_else_horowatts_own_interpreter_is_used() -> None:
    """A bare python without a virtual environment or PATH is the one that runs Horowatt."""
    assert find_interpreter(_command("python"), None, {}, "/") == sys.executable
