# SPDX-License-Identifier: Apache-2.0
"""Admission: what cannot be meant or can never run is refused, with what would do."""

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specimens import NOW_S, node, request, state

from horowatt.errors import HorowattError, InvalidInput, NotAllowed
from horowatt.records import BatchRule
from horowatt_allocator.decisions.admission import admit, parse_widths
from horowatt_allocator.records.cluster import State, Tenant
from horowatt_allocator.records.jobs import JobRequest, JobSpec

CLUSTER = state(
    node("n1", 4),
    node("n2", 2, "A"),
    tenants={
        "t": Tenant(name="t", users=("ada", "bob")),
        "all": Tenant(name="all", users=("*",), gpu_quota=2),
        "private": Tenant(name="private", users=("eve",)),
    },
)


def taken(wanted: JobRequest, where: State = CLUSTER) -> JobSpec:
    """Return the admitted job of user ada."""
    return admit(wanted, where, job_id="j1", uid=1000, gid=100, username="ada", now=NOW_S)


def test_a_valid_request_becomes_a_job_of_its_submitter() -> None:
    """Everything asked for is kept; who submits comes from the kernel, when from the head."""
    asked = request(environment={"A": "b c;$(x)"}, batch_size=32, total_epochs=2.5, deadline_s=NOW_S + 60)
    spec = taken(asked)
    assert (spec.job_id, spec.uid, spec.gid, spec.username) == ("j1", 1000, 100, "ada")
    assert (spec.legal_widths, spec.submitted_at_s) == ((1, 2, 4), NOW_S)
    for name in ("command", "environment", "working_dir", "batch_size", "total_epochs", "deadline_s"):
        assert getattr(spec, name) == getattr(asked, name)


def test_strange_but_possible_names_are_taken() -> None:
    """Spaces, quotes, semicolons and dollars are ordinary characters: no shell ever sees them."""
    nasty = "a b'\"; $(touch x) &"
    spec = taken(request(name=nasty, command=("python", nasty), working_dir=f"/home/{nasty}"))
    assert (spec.name, spec.command[1]) == (nasty, nasty)


@pytest.mark.parametrize(
    ("text", "widths"),
    [
        ("4", (4,)),
        (" 1, 2,4 ", (1, 2, 4)),
        ("4,1", (1, 4)),
        ("1-3", (1, 2, 3)),
        ("2-9:3", (2, 5, 8)),
        ("3-20:pow2", (4, 8, 16)),
        ("8-8", (8,)),
    ],
)
def test_widths_as_text(text: str, widths: tuple[int, ...]) -> None:
    """A width, a list, a range, a range with a step, powers of two in a range."""
    assert parse_widths(text) == widths


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "neither"),
        ("many", "neither"),
        ("1.5", "neither"),
        ("-2", "neither"),
        ("1,,2", "neither"),
        ("0", "from 1"),
        ("0-4", "from 1"),
        ("8-2", "minimum 8 is above the maximum 2"),
        ("1-4:0", "step"),
        ("5-7:pow2", "no power of two"),
        ("2,2", "twice"),
        ("99999", "from 1"),
        ("1-60000", "at most"),
        ("1" * 400, "neither"),
        ("\N{ARABIC-INDIC DIGIT ONE}", "neither"),
    ],
)
def test_widths_that_mean_nothing_are_refused_with_why(text: str, why: str) -> None:
    """Each has the same code, and its own reason."""
    with pytest.raises(InvalidInput) as refused:
        parse_widths(text)
    assert refused.value.code == "HW-SPEC-005"
    assert why in refused.value.because


@given(st.text(max_size=30))
def test_no_text_breaks_the_parser(text: str) -> None:
    """Any text gives ascending widths of at least 1, or the documented error."""
    with suppress(InvalidInput):
        widths = parse_widths(text)
        assert widths == tuple(sorted(set(widths)))
        assert widths[0] >= 1


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"command": ()}, "HW-SPEC-001", "no command"),
        ({"command": ("  ",)}, "HW-SPEC-001", "no command"),
        ({"command": ("python", "a\0b")}, "HW-SPEC-001", "NUL"),
        ({"name": ""}, "HW-SPEC-002", "name"),
        ({"name": "a\nb"}, "HW-SPEC-002", "name"),
        ({"name": "x" * 129}, "HW-SPEC-002", "name"),
        ({"working_dir": "src"}, "HW-SPEC-003", "'src' is not an absolute path"),
        ({"virtual_env": "venv"}, "HW-SPEC-003", "virtual env"),
        ({"environment": {"A=B": "c"}}, "HW-SPEC-004", "A=B"),
        ({"environment": {"": "c"}}, "HW-SPEC-004", "environment"),
        ({"environment": {"A": "c\0"}}, "HW-SPEC-004", "'A'"),
        ({"widths": "8-2"}, "HW-SPEC-005", "8-2"),
        ({"widths": "8,16"}, "HW-SPEC-006", "at most 4 fits"),
        ({"widths": "4", "gpu_types": ("A",)}, "HW-SPEC-006", "there are 2 A"),
        ({"widths": "4", "tenant": "all"}, "HW-SPEC-006", "quota of tenant 'all' is 2"),
        ({"batch_size": 0}, "HW-SPEC-007", "0"),
        ({"batch_size": 2, "batch_rule": BatchRule.TOTAL}, "HW-SPEC-007", "--widths 1,2"),
        ({"batch_size": 1, "batch_rule": BatchRule.TOTAL, "widths": "2,4"}, "HW-SPEC-007", "per worker"),
        ({"total_samples": 0}, "HW-SPEC-008", "positive"),
        ({"total_epochs": -1.0}, "HW-SPEC-008", "positive"),
        ({"total_epochs": float("nan")}, "HW-SPEC-008", "positive"),
        ({"total_epochs": 1.0, "total_samples": 5}, "HW-SPEC-008", "twice"),
        ({"deadline_s": NOW_S - 5}, "HW-SPEC-009", "5 s ago"),
        ({"deadline_s": float("inf")}, "HW-SPEC-009", "no time"),
        ({"wall_time_limit_s": 0.0}, "HW-SPEC-009", "wall-time"),
        ({"weight": 0.0}, "HW-SPEC-010", "weight"),
        ({"weight": float("nan")}, "HW-SPEC-010", "weight"),
        ({"weight": 1e9}, "HW-SPEC-010", "1000"),
        ({"flexibility": 1.5}, "HW-SPEC-010", "flexibility"),
        ({"gpu_types": ("H100",)}, "HW-SPEC-011", "the cluster has A, V"),
        ({"tenant": "nobody"}, "HW-SPEC-012", "may submit for: all, t"),
    ],
)
def test_bad_requests_are_refused_with_what_would_do(change: dict[str, object], code: str, says: str) -> None:
    """Each kind of bad input has its code, and its text names what is wrong or what would fit."""
    with pytest.raises(InvalidInput) as refused:
        taken(request(**change))
    assert refused.value.code == code
    assert says in str(refused.value)
    assert refused.value.hint
    assert set(refused.value.fields) & (set(change) | {"environment", "name"})


def test_a_tenant_of_others_is_not_allowed_and_own_ones_are_named() -> None:
    """A user learns which tenants are open to it, and no names of others."""
    with pytest.raises(NotAllowed) as refused:
        taken(request(tenant="private"))
    assert refused.value.code == "HW-SPEC-013"
    assert "all, t" in refused.value.because
    with pytest.raises(HorowattError) as nobody:
        taken(request(), replace(CLUSTER, tenants={"private": CLUSTER.tenants["private"]}))
    assert "ada has no tenant" in nobody.value.because
    assert "private" not in str(nobody.value)


def test_a_cluster_that_has_not_told_its_gpus_refuses_nothing_for_their_sake() -> None:
    """Before every node is known, what fits cannot be judged; the inventory counts where it says so."""
    unknown = node("n1", 0, last_seen_s=None)
    unknown = replace(unknown, spec=replace(unknown.spec, gpu_type=None, num_gpus=None))
    where = replace(CLUSTER, nodes={"n1": unknown})
    assert taken(request(widths="64", gpu_types=("H100",)), where).legal_widths == (64,)
    told = replace(unknown, spec=replace(unknown.spec, gpu_type="V", num_gpus=8))
    with pytest.raises(InvalidInput, match="narrowest width 64 can never fit"):
        taken(request(widths="64"), replace(CLUSTER, nodes={"n1": told}))
