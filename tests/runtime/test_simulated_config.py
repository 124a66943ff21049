# SPDX-License-Identifier: Apache-2.0
"""The ``*.simulator.toml`` file, and the library that is compiled for it."""

import os
import re
from importlib.resources import files
from pathlib import Path

import pytest

from horowatt.devices.simulated import SimulatorConfig, build_library
from horowatt.errors import InvalidInput, NeedsOperator

DEMO = Path(__file__).parents[2] / "hostfiles" / "demo.simulator.toml"
GOOD = DEMO.read_text(encoding="utf-8")


def with_value(key: str, value: str) -> str:
    text, count = re.subn(rf"^{key} = .*$", f"{key} = {value}", GOOD, flags=re.MULTILINE)
    assert count == 1
    return text


def test_demo_file_is_valid() -> None:
    """The shipped file gives four GPUs of one type."""
    config = SimulatorConfig.load(DEMO)
    assert len(config.uuids("localhost")) == len(set(config.uuids("localhost"))) == 4
    assert set(config.types_by_uuid("localhost").values()) == {"sim-a100"}


def test_demo_speeds_give_the_times_that_its_comment_states() -> None:
    """One job of the demo scales well and the other does not."""
    (gpu,) = SimulatorConfig.load(DEMO).gpu

    def times_s(parameters: int, samples: int, width: int) -> tuple[float, float]:
        link_bytes = 2 * (width - 1) / width * 4 * parameters
        return 6 * parameters * samples / gpu.speed_flop_per_s, link_bytes / gpu.link_bytes_per_s

    compute_s, link_s = times_s(85_002, 64, 4)
    assert compute_s == pytest.approx(0.13, abs=0.01)
    assert link_s < 0.2 * compute_s
    for width in (2, 4):
        compute_s, link_s = times_s(301_066, 16, width)
        assert 0.45 < link_s / compute_s < 1.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("type", '""'),
        ("type", "7"),
        ("type", '"' + "x" * 65 + '"'),
        ("count", "0"),
        ("count", "1.5"),
        ("count", "true"),
        ("count", "10_000"),
        ("idle_w", "-1"),
        ("idle_w", "nan"),
        ("demand_w", "inf"),
        ("demand_w", '"330"'),
        ("demand_w", "80"),
        ("link_w", "60"),
        ("floor_w", "100.0"),
        ("min_limit_w", "0"),
        ("max_limit_w", "99"),
        ("default_limit_w", "401"),
        ("speed_flop_per_s", "0"),
        ("memory_bytes", "0"),
    ],
)
def test_bad_values_are_named_by_line_and_key(key: str, value: str) -> None:
    """Each value that makes no device is refused, and the message leads to it."""
    with pytest.raises(InvalidInput) as caught:
        SimulatorConfig.parse(with_value(key, value), "my.toml")
    error = caught.value
    assert error.code == "HW-SIM-002"
    line = next(number for number, text in enumerate(GOOD.splitlines(), 1) if text.startswith(f"{key} ="))
    assert f"my.toml, line {line}: " in error.message
    assert error.fields["key"].endswith(key)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", "HW-SIM-002", "no GPUs"),
        ("gpu = []", "HW-SIM-002", "no GPUs"),
        ("gpu = 3", "HW-SIM-002", "[[gpu]] table"),
        ("[gpu]\n", "HW-SIM-002", "[[gpu]] table"),
        ("gpus = 4\n" + GOOD, "HW-SIM-002", "unknown key"),
        (GOOD + "wats = 3\n", "HW-SIM-002", "unknown key"),
        (GOOD.replace("beta = 0.37\n", ""), "HW-SIM-002", "missing"),
        ("[[gpu]\n", "HW-SIM-001", "line 1"),
    ],
)
def test_bad_files_are_refused(text: str, code: str, said: str) -> None:
    """Empty files, unknown and missing keys, and what is not TOML each get their own message."""
    with pytest.raises(InvalidInput) as caught:
        SimulatorConfig.parse(text)
    assert caught.value.code == code
    assert said in caught.value.because


def test_missing_file_is_named(tmp_path: Path) -> None:
    """A file that is not there, or is not text, is an error with its path."""
    with pytest.raises(InvalidInput, match="none"):
        SimulatorConfig.load(tmp_path / "none.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="HW-SIM-001"):
        SimulatorConfig.load(binary)


def test_second_table_is_found_by_line() -> None:
    """A mistake in the second [[gpu]] table is not blamed on the first."""
    table = GOOD[GOOD.index("[[gpu]]\ntype") :]
    text = table + table.replace("count = 4", "count = -4")
    with pytest.raises(InvalidInput) as caught:
        SimulatorConfig.parse(text)
    assert caught.value.fields["key"] == "gpu[1].count"
    assert text.splitlines()[int(caught.value.fields["line"]) - 1] == "count = -4"


def test_library_is_built_once(tmp_path: Path) -> None:
    """A second call takes what the first one compiled; nothing else is left in the cache."""
    first = build_library(tmp_path)
    before = first.stat()
    assert build_library(tmp_path) == first
    assert first.stat().st_ino == before.st_ino
    assert first.name == "libnvidia-ml.so.1"
    assert before.st_mode & 0o777 == 0o755
    assert list(tmp_path.rglob("*")) == [first.parent, first]


def test_cache_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a folder of its own the library goes to the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build_library().is_relative_to(tmp_path / "horowatt")


def test_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the message names gcc and the package that brings it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NeedsOperator) as caught:
        build_library(tmp_path)
    assert caught.value.code == "HW-SIM-003"
    assert "gcc" in caught.value.hint
    assert "build-essential" in caught.value.hint


def test_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler complains about reaches the operator, and no broken library is kept."""
    compiler = tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'no headers here' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(NeedsOperator, match="no headers here") as caught:
        build_library(tmp_path / "cache")
    assert caught.value.code == "HW-SIM-004"
    assert not list((tmp_path / "cache").rglob("libnvidia-ml.so.1"))


def test_unwritable_cache_is_named(tmp_path: Path) -> None:
    """A cache folder that cannot be made is an error, not a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(NeedsOperator, match="HW-SIM-004"):
        build_library(tmp_path / "file" / "cache")


def test_source_is_part_of_the_package() -> None:
    """The C source lies beside the modules, so that a wheel carries it."""
    assert files("horowatt.devices").joinpath("_nvml_sim.c").is_file()
