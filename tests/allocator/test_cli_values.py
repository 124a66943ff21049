# SPDX-License-Identifier: Apache-2.0
"""What users type: durations, deadlines, widths, environment, job files, and how they become a request."""

import json
import os
from pathlib import Path

import pytest

from horowatt.errors import HorowattError, InvalidInput, NotAllowed, NotFound, RetryLater
from horowatt_allocator.cli import exits
from horowatt_allocator.cli.attach import horovodrun_line
from horowatt_allocator.cli.daemons import parse_http
from horowatt_allocator.cli.job_file import read_job_file
from horowatt_allocator.cli.job_wish import (
    JobWish,
    local_warnings,
    name_of,
    parse_environment,
    script_of,
    to_request,
)
from horowatt_allocator.cli.moments import parse_deadline_s, parse_duration_s
from horowatt_allocator.cli.views import JobView
from horowatt_allocator.cli.widths import WidthWish, legal_widths, parse_list

NOW_S = 1_767_225_600.0  # 2026-01-01T00:00:00Z


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0), ("20m", 1200.0), ("20min", 1200.0), ("2h", 7200.0), ("1h30m", 5400.0),
        ("1.5h", 5400.0), ("3d", 259_200.0), (" 2 H ", 7200.0), ("1h 5m 3s", 3903.0),
    ],
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    """A duration is the sum of its parts, with or without blanks."""
    assert parse_duration_s(text, "deadline") == seconds


@pytest.mark.parametrize("text", ["", "90", "2 fortnights", "h", "-2h", "0s", "1h-", "9999d", "2h30", "nan"])
def test_durations_that_cannot_be_meant(text: str) -> None:
    """A number without unit, nothing, and the past are refused with an example of what is right."""
    with pytest.raises(InvalidInput) as caught:
        parse_duration_s(text, "deadline")
    assert caught.value.code == "HW-CLI-002"
    assert "90s" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "at_s"),
    [
        ("2h", NOW_S + 7200), ("2026-01-01T01:00Z", NOW_S + 3600),
        ("2026-01-01T03:00+02:00", NOW_S + 3600), ("2026-01-01 01:00:00+00:00", NOW_S + 3600),
    ],
)  # fmt: skip
def test_deadlines(text: str, at_s: float) -> None:
    """A deadline is a duration from now or an instant with its zone."""
    assert parse_deadline_s(text, NOW_S) == at_s


@pytest.mark.parametrize(
    ("text", "because"),
    [("2026-01-01T01:00", "time zone"), ("2025-12-31T23:00Z", "passed"), ("soon", ""), ("120", "unit")],
)
def test_deadlines_that_cannot_be_meant(text: str, because: str) -> None:
    """A deadline without zone, in the past or in no known form is refused, and why."""
    with pytest.raises(InvalidInput) as caught:
        parse_deadline_s(text, NOW_S)
    assert because in caught.value.because


@pytest.mark.parametrize(
    ("wish", "widths"),
    [
        (WidthWish(), (1,)),
        (WidthWish(maximum=4), (1, 2, 3, 4)),
        (WidthWish(minimum=2), (2,)),
        (WidthWish(minimum=2, maximum=8, step=2), (2, 4, 6, 8)),
        (WidthWish(minimum=2, maximum=20, powers_of_two=True), (2, 4, 8, 16)),
        (WidthWish(listed=(4, 1, 2)), (1, 2, 4)),
    ],
)
def test_widths(wish: WidthWish, widths: tuple[int, ...]) -> None:
    """A range, a step, powers of two and a list give the legal widths, ascending."""
    assert legal_widths(wish) == widths


@pytest.mark.parametrize(
    "wish",
    [
        WidthWish(minimum=4, maximum=2),
        WidthWish(minimum=0),
        WidthWish(minimum=5, maximum=7, powers_of_two=True),
        WidthWish(maximum=8, step=0),
        WidthWish(maximum=8, step=2, powers_of_two=True),
        WidthWish(listed=(1, 1)),
        WidthWish(listed=()),
        WidthWish(listed=(1, 2), maximum=4),
        WidthWish(maximum=1_000_000_000),
        WidthWish(maximum=65_536),
    ],
)
def test_widths_that_contradict_themselves(wish: WidthWish) -> None:
    """A wish that allows no width, or far too many, is refused at once."""
    with pytest.raises(InvalidInput) as caught:
        legal_widths(wish)
    assert caught.value.code == "HW-CLI-007"


def test_width_lists_are_read_strictly() -> None:
    """A list of widths is whole numbers and commas."""
    assert parse_list("1, 2,4") == (1, 2, 4)
    for text in ("", "1,,2", "1-4", "1,two", "\u0661"):
        with pytest.raises(InvalidInput):
            parse_list(text)


def test_width_flags_win_over_the_file() -> None:
    """Flags complete a range of the file, and a list or a range replaces the other form."""
    file = WidthWish(minimum=1, maximum=8, step=2)
    assert legal_widths(WidthWish(maximum=4).over(file)) == (1, 3)
    assert legal_widths(WidthWish(listed=(2, 4)).over(file)) == (2, 4)
    assert legal_widths(WidthWish(powers_of_two=True).over(file)) == (1, 2, 4, 8)
    assert legal_widths(WidthWish(maximum=2).over(WidthWish(listed=(5, 6)))) == (1, 2)
    assert WidthWish().over(file) == file


def test_job_file_gives_all_it_says(tmp_path: Path) -> None:
    """Every key of a job file arrives in the request, and folders are meant from the file."""
    path = tmp_path / "job; $(touch x).toml"
    path.write_text(
        """
        name = "n'a;me"
        tenant = "vision"
        command = ["python", "train.py", "--note", "a b; $(c) \\"d\\""]
        min = 2
        max = 8
        powers_of_two = true
        batch_size = 64
        batch_rule = "total"
        epochs = 90
        deadline = 2026-01-02T00:00:00Z
        wall_time = "12h"
        working_dir = "sub"
        venv = "/opt/env"
        gpu_types = ["h100"]
        weight = 2
        flexibility = 0.25
        attach = true
        [env]
        A = "1"
        """
    )
    assert to_request(read_job_file(path), NOW_S) == {
        "name": "n'a;me",
        "tenant": "vision",
        "command": ["python", "train.py", "--note", 'a b; $(c) "d"'],
        "widths": "2,4,8",
        "batch_size": 64,
        "batch_rule": "total",
        "total_epochs": 90.0,
        "deadline_s": NOW_S + 86_400,
        "wall_time_limit_s": 43_200.0,
        "environment": {"A": "1"},
        "working_dir": str(tmp_path / "sub"),
        "virtual_env": "/opt/env",
        "gpu_types": ["h100"],
        "weight": 2.0,
        "flexibility": 0.25,
        "launcher": "attached",
    }


@pytest.mark.parametrize(
    ("text", "code", "mentions"),
    [
        ("name = x\nmin = 1", "HW-CLI-004", "line 1"),
        ("nmae = 'x'", "HW-CLI-005", "nmae"),
        ("min = '2'", "HW-CLI-006", "whole number"),
        ("min = true", "HW-CLI-006", "whole number"),
        ("command = 'python train.py'", "HW-CLI-006", "no shell"),
        ("command = ['python', 3]", "HW-CLI-006", "list of texts"),
        ("widths = [1, 'two']", "HW-CLI-006", "whole number"),
        ("env = ['A=1']", "HW-CLI-006", "table"),
        ("[env]\nA = 1", "HW-CLI-006", "env.A"),
        ("deadline = 5", "HW-CLI-006", "2h"),
        ("weight = 'much'", "HW-CLI-006", "number"),
        ("attach = 'yes'", "HW-CLI-006", "true or false"),
        ("name = ''", "HW-CLI-006", "text"),
    ],
)
def test_job_file_mistakes_are_named(tmp_path: Path, text: str, code: str, mentions: str) -> None:
    """A mistake in a job file is an error that names the file and the key, never a default."""
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        read_job_file(path)
    assert caught.value.code == code
    assert mentions in str(caught.value)
    assert str(path) in str(caught.value)


def test_job_file_that_cannot_be_read(tmp_path: Path) -> None:
    """An absent file, a folder and a file that is not text are each told apart."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, because in ((tmp_path / "none", "no such file"), (tmp_path, "not a file"), (binary, "UTF-8")):
        with pytest.raises(InvalidInput) as caught:
            read_job_file(path)
        assert caught.value.code == "HW-CLI-003"
        assert because in caught.value.because


def test_flags_win_over_the_file() -> None:
    """What a flag says replaces the file, variables are merged, and work is given in one unit."""
    file = JobWish(name="f", command=("a",), epochs=3.0, env={"A": "1", "B": "2"}, weight=2.0)
    wish = JobWish(command=("python", "x.py"), total_samples=5, env={"B": "3"}).over(file)
    assert wish.name == "f"
    assert wish.command == ("python", "x.py")
    assert (wish.epochs, wish.total_samples) == (None, 5)
    assert wish.env == {"A": "1", "B": "3"}
    assert wish.weight == 2.0


def test_a_request_leaves_out_what_was_not_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Defaults are the service's: only the command, its name, the width and the folder are always sent."""
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.chdir(tmp_path)
    assert to_request(JobWish(command=("python", "my train.py")), NOW_S) == {
        "name": "my train",
        "command": ["python", "my train.py"],
        "widths": "1",
        "working_dir": str(tmp_path),
    }


def test_the_active_virtual_environment_is_taken_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job runs with the submitter's environment, unless --venv names another or none."""
    monkeypatch.setenv("VIRTUAL_ENV", "/home/me/env")
    assert to_request(JobWish(command=("a",)), NOW_S)["virtual_env"] == "/home/me/env"
    assert to_request(JobWish(command=("a",), venv="/x"), NOW_S)["virtual_env"] == "/x"
    assert "virtual_env" not in to_request(JobWish(command=("a",), venv=""), NOW_S)


def test_requests_that_cannot_be_meant() -> None:
    """No command, two totals and an unknown batch rule are refused before anything is sent."""
    for wish, code in (
        (JobWish(), "HW-CLI-008"),
        (JobWish(command=("a",), epochs=1.0, total_samples=1), "HW-CLI-006"),
        (JobWish(command=("a",), batch_rule="each"), "HW-CLI-006"),
    ):
        with pytest.raises(InvalidInput) as caught:
            to_request(wish, NOW_S)
        assert caught.value.code == code


def test_environment_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """NAME=VALUE is taken as it is, NAME alone is passed on, and anything else refused."""
    monkeypatch.setenv("MINE", "x=y z")
    assert parse_environment(("A=1=2", "MINE", "EMPTY=")) == {"A": "1=2", "MINE": "x=y z", "EMPTY": ""}
    monkeypatch.delenv("ABSENT", raising=False)
    for pair in ("ABSENT", "1A=2", "=x", "a b=c"):
        with pytest.raises(InvalidInput) as caught:
            parse_environment((pair,))
        assert caught.value.code == "HW-CLI-012"


@pytest.mark.parametrize(
    ("command", "script", "name"),
    [
        (("python", "a/train.py", "--x"), "a/train.py", "train"),
        (("/usr/bin/python3.11", "-u", "t.py"), "t.py", "t"),
        (("python", "-m", "pkg.train"), None, "python"),
        (("python", "-c", "print()"), None, "python"),
        (("./run.py",), "./run.py", "run"),
        (("bash", "run.sh"), None, "bash"),
    ],
)
def test_script_and_name_of_a_command(command: tuple[str, ...], script: str | None, name: str) -> None:
    """A job is named after the script it runs, as far as one can be seen."""
    assert script_of(command) == script
    assert name_of(command) == name


def test_local_warnings(tmp_path: Path) -> None:
    """A script that is not there is a warning here and says nothing about another machine."""
    request: dict[str, object] = {"working_dir": str(tmp_path), "command": ["python", "gone.py"]}
    assert "gone.py" in local_warnings(request)[0]
    (tmp_path / "gone.py").write_text("")
    assert local_warnings(request) == []
    assert "bin/python" in local_warnings({**request, "virtual_env": str(tmp_path)})[0]
    assert "not on this machine" in local_warnings({**request, "working_dir": "/nowhere/else"})[0]


def test_exit_codes_of_errors() -> None:
    """A script can tell bad input, refusals and failures of the tool apart."""
    assert exits.code_of(InvalidInput("X", "m")) == 126
    assert exits.code_of(NotFound("X", "m")) == 127
    assert exits.code_of(NotAllowed("X", "m")) == 127
    assert exits.code_of(RetryLater("X", "m")) == 125
    assert exits.code_of(HorowattError("X", "m")) == 125


@pytest.mark.parametrize(
    ("phase", "exit_code", "code"),
    [
        ("finished", 0, 0), ("failed", 3, 3), ("failed", -9, 137), ("cancelled", None, 125),
        ("cancelled", 0, 125), ("failed", None, 125), ("failed", 0, 125),
    ],
)  # fmt: skip
def test_exit_codes_of_jobs(phase: str, exit_code: int | None, code: int) -> None:
    """--wait returns the script's exit code, and never success for a job that did not finish."""
    assert exits.code_of_job(phase, exit_code) == code


def test_horovodrun_line_is_quoted_for_both_shells() -> None:
    """The printed command survives the user's shell and the one that Horovod gives the script to."""
    import shlex

    job = JobView({"discovery_script": "/run dir/$(x)/discover.sh", "legal_widths": [2, 4]})
    line = horovodrun_line(job, ["python", "my train.py", "; rm -rf /"])
    assert line is not None
    words = shlex.split(line)
    assert words[:7] == ["horovodrun", "-np", "2", "--min-np", "2", "--max-np", "4"]
    assert shlex.split(words[words.index("--host-discovery-script") + 1]) == ["/run dir/$(x)/discover.sh"]
    assert words[-3:] == ["python", "my train.py", "; rm -rf /"]
    assert horovodrun_line(JobView({}), ["python"]) is None


def test_http_addresses() -> None:
    """--http takes a host with a port, also of IPv6, or 'off'."""
    assert parse_http("127.0.0.1:0") == ("127.0.0.1", 0)
    assert parse_http("[::1]:80") == ("::1", 80)
    assert parse_http("off")[1] is None
    for text in ("", "9477", "localhost", "localhost:", ":80", "h:99999", "h:\u0661"):
        with pytest.raises(InvalidInput) as caught:
            parse_http(text)
        assert caught.value.code == "HW-CLI-013"


def test_job_views_survive_missing_and_wrong_fields() -> None:
    """A command reads an answer of another version as far as it goes."""
    view = JobView.from_json(json.loads('{"job": {"job_id": "j1", "width": "x", "reason": null}}'))
    assert (view.job_id, view.width, view.reason_text, view.phase) == ("j1", 0, "", "unknown")
    assert os.sep not in view.shown_name
