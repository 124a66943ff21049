# SPDX-License-Identifier: Apache-2.0
"""The documentation says what the sources do: codes, links, command lines, files, policy."""

import ast
import re
import shlex
import tomllib
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import click
import pytest

from horowatt.devices import nvml
from horowatt.devices.simulator_config import SimulatorConfig
from horowatt_allocator.adapters.config import load_config
from horowatt_allocator.adapters.inventory import load_inventory
from horowatt_allocator.cli import exits
from horowatt_allocator.cli.job_file import read_job_file
from horowatt_allocator.cli.job_wish import to_request
from horowatt_allocator.cli.main import cli
from horowatt_allocator.records.cluster import Policy
from horowatt_allocator.records.jobs import Job

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT / "runtime", ROOT / "allocator")
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "hostfiles" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
)
ERRORS = ROOT / "docs" / "errors.md"
OPERATING = ROOT / "docs" / "operating.md"

_CODE = re.compile(r"HW-[A-Z]+-[0-9]{3}")
_BUILT_CODE = re.compile(r"HW-([A-Z]+)-\{")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_NOW_S = 1_767_225_600.0


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    text: str


def _blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page, language, body) for _, language, body in _FENCE.findall(text)]


ALL_BLOCKS = [block for page in PAGES for block in _blocks(page)]


def _sources() -> Iterator[tuple[Path, str]]:
    for root in SOURCES:
        for path in sorted(root.rglob("*")):
            if path.suffix in {".py", ".c", ".html", ".sh"} and path.is_file():
                yield path, path.read_text(encoding="utf-8")


def _rows(page: Path, heading: str) -> list[list[str]]:
    """Return the cells of the tables below a heading, up to the next one."""
    text = page.read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page.name} has no heading {heading!r}"
    lines = [line for line in found[1].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


# ------------------------------------------------------------------------------------------- codes


def test_every_code_of_the_sources_is_documented_once_and_no_other() -> None:
    """Who meets an error code finds it in docs/errors.md, in one row; rows of codes that are gone fail."""
    raised = {code for _, text in _sources() for code in _CODE.findall(text)}
    raised |= {f"HW-NVML-{number:03d}" for number in nvml._INIT_ERRORS}
    rows = re.findall(r"^\| `(HW-[A-Z]+-\w+)`", ERRORS.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == len(set(rows)), sorted({code for code in rows if rows.count(code) > 1})
    documented = {code for code in rows if _CODE.fullmatch(code)}
    assert sorted(raised - documented) == []
    assert sorted(documented - raised) == []


def test_codes_with_a_computed_number_have_a_general_row() -> None:
    """A code whose number is another library's is documented as its area with NNN."""
    areas = {area for _, text in _sources() for area in _BUILT_CODE.findall(text)}
    general = set(re.findall(r"^\| `HW-([A-Z]+)-NNN`", ERRORS.read_text(encoding="utf-8"), re.MULTILINE))
    assert areas == general


def test_rows_of_codes_are_complete() -> None:
    """Each code says what happened and what to do."""
    for line in ERRORS.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `HW-"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 4, line
            assert cells[1], line
            assert cells[3], line


def _reason_codes() -> set[str]:
    """Return the codes that decisions give as ``Reason(code=...)``, literal or by a constant."""
    found = {_default_reason()}
    for path in sorted((ROOT / "allocator" / "horowatt_allocator" / "decisions").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for call in ast.walk(tree):
            if not (
                isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Reason"
            ):
                continue
            for keyword in call.keywords:
                if keyword.arg == "code":
                    for part in ast.walk(keyword.value):
                        value = (
                            part.value
                            if isinstance(part, ast.Constant)
                            else constants.get(part.id)
                            if isinstance(part, ast.Name)
                            else None
                        )
                        found |= {value} if isinstance(value, str) else set()
    return found


def _default_reason() -> str:
    default = next(field.default for field in fields(Job) if field.name == "reason")
    code = getattr(default, "code", None)
    assert isinstance(code, str)
    return code


def test_every_reason_of_jobs_is_documented() -> None:
    """What `explain` shows in brackets is in the table of reasons, and nothing else is."""
    documented = [row[0].strip("`") for row in _rows(ERRORS, "Reasons of jobs")]
    assert sorted(documented) == sorted(_reason_codes())


def test_every_exit_code_is_documented() -> None:
    """The table of exit codes has those that the command line uses."""
    used = {value for name, value in vars(exits).items() if name.isupper() and not name.startswith("_")}
    assert {int(row[0]) for row in _rows(ERRORS, "Exit codes")} == used


# ------------------------------------------------------------------------------------------- links


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    anchors: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        kept = "".join(
            character
            for character in plain
            if character in " -_" or unicodedata.category(character)[0] in {"L", "N"}
        )
        anchor = kept.replace(" ", "-")
        number = anchors.get(anchor, 0)
        anchors[anchor] = number + 1
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every link to a file of the repository, or to a heading in one, has a target."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in _LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}"
        assert path.is_relative_to(ROOT), f"{page.name}: {target} leads out of the repository"
        if anchor:
            assert anchor in _anchors(path), f"{page.name}: {target}; there are {sorted(_anchors(path))}"


# ----------------------------------------------------------------------------------- command lines


def _command_lines(block: Block) -> Iterator[str]:
    """Yield the shell command lines of a block: with a prompt where there is one, else every line."""
    joined = block.text.replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines()]
    if block.language == "ini":
        yield from (line.partition("=")[2] for line in lines if line.startswith("ExecStart="))
    elif block.language == "console":
        yield from (line[2:] for line in lines if line.startswith(("$ ", "# ")))
    elif block.language in {"sh", "bash"}:
        yield from (line for line in lines if line and not line.startswith("#"))


def _calls(line: str) -> Iterator[list[str]]:
    """Yield the arguments of each call of horowatt in a line, called directly or by ``horovodrun``."""
    without_redirections = re.sub(r"\s\d?>>?\S+", " ", line)
    lexer = shlex.shlex(without_redirections, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    segment: list[str] = []
    for word in [*lexer, ";"]:
        if not set(word) <= set("();<>|&"):
            segment.append(word)
            continue
        while segment and ("=" in segment[0] or segment[0] == "sudo"):
            segment.pop(0)
        if segment and segment[0] == "horovodrun" and "horowatt" in segment:
            segment = segment[segment.index("horowatt") :]
        if segment and Path(segment[0]).name == "horowatt":
            yield segment[1:]
        segment = []


CALLS = [
    (block.page, call)
    for block in ALL_BLOCKS
    for line in _command_lines(block)
    for call in _calls(line)
    if call
]


def test_there_are_command_lines_to_check() -> None:
    """The next test is not satisfied by finding nothing."""
    assert {"submit", "serve", "agent", "worker", "report"} <= {call[0] for _, call in CALLS}


@pytest.mark.parametrize(("page", "call"), CALLS, ids=[" ".join(call)[:60] for _, call in CALLS])
def test_command_lines_use_options_that_exist(page: Path, call: list[str]) -> None:
    """Every horowatt command line in the documentation is one that the command line parses."""
    context = click.Context(cli, info_name="horowatt")
    if call[0].startswith("-"):
        known = {name for param in cli.get_params(context) for name in param.opts}
        assert set(call) <= known, f"{page.name}: horowatt {' '.join(call)}"
        return
    command = cli.get_command(context, call[0])
    assert command is not None, f"{page.name}: there is no command {call[0]!r}"
    try:
        command.make_context(call[0], list(call[1:]), parent=context, resilient_parsing=False)
    except click.exceptions.Exit:
        return
    except click.UsageError as error:
        pytest.fail(f"{page.name}: horowatt {' '.join(call)}: {error.format_message()}")


def test_an_option_that_does_not_exist_is_found() -> None:
    """The check fails for an invented option, so it can."""
    with pytest.raises(pytest.fail.Exception):
        test_command_lines_use_options_that_exist(ERRORS, ["submit", "--turbo", "--", "python", "t.py"])


# ------------------------------------------------------------------------------- files and policy


def _indented_toml(page: Path) -> Iterator[Block]:
    """Yield the indented blocks of a page that are TOML with tables."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for body in re.findall(r"(?:^    [^\n]*\n|^\n)+", text, re.MULTILINE):
        plain = re.sub(r"^    ", "", body, flags=re.MULTILINE)
        if re.search(r"^\[", plain, re.MULTILINE):
            yield Block(page, "toml", plain)


TOML_BLOCKS = [
    *(block for block in ALL_BLOCKS if block.language == "toml"),
    *(block for page in PAGES for block in _indented_toml(page)),
]


@pytest.mark.parametrize("block", TOML_BLOCKS, ids=lambda block: block.page.name)
def test_toml_in_the_documentation_is_accepted(block: Block, tmp_path: Path) -> None:
    """A job file, configuration or inventory that a page shows is read by the loader it is meant for."""
    path = tmp_path / "shown.toml"
    path.write_text(block.text, encoding="utf-8")
    keys = set(tomllib.loads(block.text))
    if "command" in keys:
        assert to_request(read_job_file(path), _NOW_S)["command"]
    elif "node" in keys:
        assert load_inventory(path).nodes
    elif keys & {"tenant", "policy", "operators", "agent_users"}:
        load_config(path)
    elif "gpu" in keys:
        assert SimulatorConfig.load(path).each_gpu()
    else:
        pytest.fail(f"{block.page.name}: what kind of file is this? {sorted(keys)}")


def test_job_files_and_configurations_are_shown() -> None:
    """The test above has at least a job file, a configuration and an inventory to look at."""
    kinds = {key for block in TOML_BLOCKS for key in tomllib.loads(block.text)}
    assert {"command", "tenant", "policy", "node"} <= kinds


def _as_documented(value: object) -> str:
    if value is None:
        return "none"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def test_every_policy_key_is_documented_with_its_default() -> None:
    """The table of the policy has each key of the configuration once, with the default in force."""
    shown = {row[0].strip("`"): row[1] for row in _rows(OPERATING, "Policy")}
    assert shown == {field.name: _as_documented(field.default) for field in fields(Policy)}
