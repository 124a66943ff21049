# SPDX-License-Identifier: Apache-2.0
"""Energy reports: golden files, hostile names, absent values, the sum check.

Golden files are rewritten with ``HOROWATT_REWRITE_GOLDEN=1 pytest tests/allocator/test_reports.py``;
read the difference before committing it.
"""

import csv
import io
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from horowatt.errors import InvalidInput
from horowatt.wire import encode
from horowatt_allocator.records.energy import (
    DeviceEnergy,
    EnergyLine,
    EnergyReport,
    GenerationEnergy,
    JobEnergy,
    TenantEnergy,
)
from horowatt_allocator.records.jobs import Generation
from horowatt_allocator.reports.balance import check_balance
from horowatt_allocator.reports.energy_csv import COLUMNS, guarded, render_csv
from horowatt_allocator.reports.energy_files import write_files
from horowatt_allocator.reports.energy_html import render_html
from horowatt_allocator.reports.energy_json import parse_report, render_json
from horowatt_allocator.reports.figures import energy_text, printable
from horowatt_allocator.reports.shares import method_shares

GOLDEN = Path(__file__).parent / "golden_reports"
START_S = 1_767_225_600.0


def line(
    energy_j: float,
    measured_s: float = 100.0,
    *,
    unmeasured_s: float = 0.0,
    integrated_s: float = 0.0,
    bridged_s: float = 0.0,
    simulated: bool = True,
) -> EnergyLine:
    return EnergyLine(
        energy_j=energy_j,
        measured_s=measured_s,
        unmeasured_s=unmeasured_s,
        integrated_s=integrated_s,
        bridged_s=bridged_s,
        simulated=simulated,
    )


def sample_report(*, name: str = "digits <wide> & deep", simulated: bool = True) -> EnergyReport:
    generations = (
        GenerationEnergy(
            generation=Generation(
                number=1,
                width=1,
                gpu_type="sim-a",
                limit_w=300.0,
                published_s=START_S + 5,
                first_step_end_s=START_S + 8,
                ended_s=START_S + 65,
                samples=6000,
            ),
            energy=line(9000.0, 60.0, simulated=simulated),
        ),
        GenerationEnergy(
            generation=Generation(
                number=2,
                width=3,
                gpu_type="sim-a",
                limit_w=None,
                published_s=START_S + 65,
                pause_s=4.25,
            ),
            energy=line(
                21_000.5,
                120.0,
                unmeasured_s=30.0,
                integrated_s=20.0,
                bridged_s=10.0,
                simulated=simulated,
            ),
        ),
    )
    jobs = (
        JobEnergy(
            job_id="j1-0001",
            name=name,
            tenant="vision",
            phase="running",
            energy=line(
                30_000.5,
                180.0,
                unmeasured_s=30.0,
                integrated_s=20.0,
                bridged_s=10.0,
                simulated=simulated,
            ),
            samples=None,
            samples_per_j=None,
            resizes=1,
            pause_s=4.25,
            generations=generations,
        ),
        JobEnergy(
            job_id="j1-0002",
            name="quiet",
            tenant="speech",
            phase="queued",
            energy=line(0.0, 0.0, simulated=simulated),
            samples=0,
            samples_per_j=None,
            resizes=0,
            pause_s=None,
            generations=(),
        ),
    )
    return EnergyReport(
        cluster="lab",
        start_s=START_S,
        end_s=START_S + 3700,
        made_s=START_S + 3701,
        scope="GPU boards; hosts are not measured",
        simulated=simulated,
        jobs=jobs,
        tenants=(
            TenantEnergy(
                tenant="vision",
                num_jobs=1,
                energy=line(30_000.5, 180.0, unmeasured_s=30.0, simulated=simulated),
            ),
            TenantEnergy(tenant="speech", num_jobs=1, energy=line(0.0, 0.0, simulated=simulated)),
        ),
        idle=line(2_000_000.0, 7000.0, simulated=simulated),
        unattributed=line(12.5, 1.0, simulated=simulated),
        total=line(2_030_013.0, 7181.0, unmeasured_s=30.0, simulated=simulated),
        devices=(
            DeviceEnergy(
                node="node one",
                gpu_uuid="GPU-1",
                gpu_type="sim-a",
                simulated=simulated,
                counter_j=2_030_013.0,
                booked_j=2_030_013.0,
                idle_j=2_000_000.0,
                unattributed_j=12.5,
            ),
            DeviceEnergy(
                node="node one",
                gpu_uuid="GPU-2",
                gpu_type="old",
                simulated=simulated,
                counter_j=None,
                booked_j=0.0,
                idle_j=0.0,
                unattributed_j=0.0,
            ),
        ),
        devices_j=2_030_013.0,
        booked_on_counters_j=2_030_013.0,
    )


def csv_rows(report: EnergyReport) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(render_csv(report), newline="")))


class _Tags(HTMLParser):
    """Collects what a browser would see."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(html: str) -> _Tags:
    tags = _Tags()
    tags.feed(html)
    return tags


@pytest.mark.parametrize("suffix", ["html", "csv", "json"])
def test_golden_files(suffix: str) -> None:
    """The same report always gives the same bytes, those of the golden file."""
    render = {"html": render_html, "csv": render_csv, "json": render_json}[suffix]
    text = render(sample_report())
    golden = GOLDEN / f"energy.{suffix}"
    if os.environ.get("HOROWATT_REWRITE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        golden.write_bytes(text.encode())
    assert text.encode() == golden.read_bytes()


def test_html_is_self_contained() -> None:
    """The page loads nothing: no script, link, image or address."""
    tags = parsed(render_html(sample_report()))
    assert {tag for tag, _ in tags.tags} & {"script", "link", "img", "iframe", "object"} == set()
    for _, attributes in tags.tags:
        assert {"src", "href"} & attributes.keys() == set()
    assert "url(" not in render_html(sample_report())


def test_simulated_is_marked_at_each_figure() -> None:
    """Every energy figure of a simulated cluster carries the mark, and the page a banner."""
    html = render_html(sample_report())
    marked = len(re.findall(r'class="fig">[^<]*</span> <span class="sim">simulated', html))
    assert marked == html.count('class="fig"') > 20
    assert html.count('class="banner"') == 2
    assert '@top-center { content: "simulated devices"' in html
    assert all(row["simulated"] == "true" for row in csv_rows(sample_report()))


def test_real_devices_carry_no_mark() -> None:
    """A report of real devices does not say simulated anywhere."""
    report = sample_report(simulated=False)
    html = render_html(report)
    assert "simulated" not in html.partition("</head>")[2]
    assert "simulated devices" not in html
    assert {row["simulated"] for row in csv_rows(report)} == {"false"}


@pytest.mark.parametrize(
    "name",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "</style><svg onload=alert(1)>",
        "{{ 7*7 }}{% raw %}",
    ],
)
def test_hostile_names_stay_text_in_html(name: str) -> None:
    """A name that is markup is shown as text and adds no element."""
    plain = parsed(render_html(sample_report(name="plain")))
    hostile = parsed(render_html(sample_report(name=name)))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]
    assert name in "".join(hostile.text)


@pytest.mark.parametrize(
    "name", ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", " =1", "\uff1d1"]
)
def test_formulas_are_disarmed_in_csv(name: str) -> None:
    """A name that a spreadsheet would run is written as text."""
    rows = [row for row in csv_rows(sample_report(name=name)) if row["kind"] == "job"]
    assert rows[0]["job_name"] == f"'{name}"


def test_csv_survives_quotes_commas_and_line_ends() -> None:
    """A name with CSV's own signs comes back unchanged and breaks no line."""
    name = 'a,"b"\nc;d'
    rows = csv_rows(sample_report(name=name))
    assert next(row["job_name"] for row in rows if row["kind"] == "job") == name
    assert all(None not in row for row in rows)
    assert guarded("plain") == "plain"


def test_csv_has_one_line_per_thing() -> None:
    """Each part of the report is one line of its kind, and the columns are stable."""
    rows = csv_rows(sample_report())
    assert [row["kind"] for row in rows] == [
        "total", "idle", "unattributed", "tenant", "tenant",
        "job", "generation", "generation", "job", "device", "device", "check",
    ]  # fmt: skip
    assert tuple(rows[0]) == COLUMNS


def test_absent_is_never_zero() -> None:
    """What was not measured is an empty cell, null or words, not 0."""
    report = sample_report()
    devices = [row for row in csv_rows(report) if row["kind"] == "device"]
    assert devices[1]["counter_j"] == ""
    document = json.loads(render_json(report))
    assert document["devices"][1]["counter_j"] is None
    assert document["jobs"][1]["energy"]["coverage"] is None
    assert "not measured" in render_html(report)


def test_json_carries_schema_version_and_comes_back() -> None:
    """The file names its schema, and the service's wire form gives the same report again."""
    report = sample_report()
    assert json.loads(render_json(report))["schema_version"] == 1
    assert parse_report(encode(report)) == report
    extra = {**json.loads(encode(report)), "schema_version": 1, "sum_error": 0.0}
    assert parse_report(json.dumps(extra)) == report


def test_json_file_is_a_valid_report() -> None:
    """What the JSON file says can be read back as the report it was made from."""
    report = sample_report()
    assert parse_report(render_json(report)) == report


def test_not_a_report_is_a_clear_error() -> None:
    """A wrong answer of the service is named, with the field."""
    with pytest.raises(InvalidInput, match="EnergyReport") as caught:
        parse_report(b'{"cluster": 3}')
    assert caught.value.code == "HW-WIRE-001"


def test_method_shares_sum_to_one() -> None:
    """Shares of the methods are shares of all GPU-seconds, measured or not."""
    shares = method_shares(line(1.0, 80.0, unmeasured_s=20.0, integrated_s=30.0, bridged_s=10.0))
    assert shares is not None
    assert shares.counter_ratio == pytest.approx(0.4)
    assert shares.missing_ratio == pytest.approx(0.2)
    assert shares.integrated_ratio + shares.bridged_ratio == pytest.approx(0.4)
    assert method_shares(line(0.0, 0.0)) is None


def test_balance_accepts_what_adds_up() -> None:
    """Equal counters and bookings add up."""
    balance = check_balance(sample_report())
    assert balance.adds_up is True
    assert "adds up" in balance.sentence


def test_balance_refuses_a_hole() -> None:
    """More than 0.1 % between counters and bookings does not add up, and the page says so."""
    report = replace(sample_report(), booked_on_counters_j=2_030_013.0 * 0.998)
    assert check_balance(report).adds_up is False
    assert "does not add up" in render_html(report)


def test_balance_refuses_parts_that_differ_from_the_total() -> None:
    """Tenants, idle and unattributed must be the total, whatever the counters say."""
    report = replace(sample_report(), idle=line(1_000_000.0))
    assert check_balance(report).adds_up is False


def test_balance_without_counters_is_unknown() -> None:
    """Without a readable counter the check says that it could not be made."""
    balance = check_balance(replace(sample_report(), devices_j=None))
    assert balance.adds_up is None
    assert "cannot be checked" in balance.sentence


def test_empty_report_renders() -> None:
    """A cluster without jobs and energy has a page that says so."""
    nothing = line(0.0, 0.0, simulated=False)
    report = replace(
        sample_report(simulated=False),
        jobs=(), tenants=(), devices=(), idle=nothing, unattributed=nothing, total=nothing,
        devices_j=None, booked_on_counters_j=0.0,
    )  # fmt: skip
    html = render_html(report)
    assert "No energy was booked" in html
    assert "No job used energy" in html


def test_write_files_writes_all_three(tmp_path: Path) -> None:
    """The three files lie in a folder that is made when needed, spaces in its name or not."""
    files = write_files(sample_report(), tmp_path / "new folder; $(x)" / "deep")
    assert files.html.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(files.json.read_text())["cluster"] == "lab"
    assert files.csv.read_bytes().startswith(b"kind,cluster,")


def test_write_files_into_a_file_is_a_clear_error(tmp_path: Path) -> None:
    """A folder that cannot be made is named, with what to do."""
    (tmp_path / "taken").write_text("x")
    with pytest.raises(InvalidInput) as caught:
        write_files(sample_report(), tmp_path / "taken")
    assert caught.value.code == "HW-REP-002"


def test_printable_spells_out_what_acts_on_a_screen() -> None:
    """Escape sequences and text direction overrides cannot reach the reader's terminal."""
    assert printable("red \x1b[31m") == "red \\x1b[31m"
    assert printable("\u202egnp.exe") == "\\u202egnp.exe"
    assert printable("\u00fcml\u00e4ut \u6f22") == "\u00fcml\u00e4ut \u6f22"


@pytest.mark.parametrize(
    ("energy_j", "text"),
    [(None, "not measured"), (0.0, "0.0 J"), (870.0, "870.0 J"), (12_340.0, "12.34 kJ"),
     (4_320_000.0, "1.200 kWh")],
)  # fmt: skip
def test_energy_text(energy_j: float | None, text: str) -> None:
    """Joules are shown in the unit that reads best; absent stays absent."""
    assert energy_text(energy_j) == text
