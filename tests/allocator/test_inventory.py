# SPDX-License-Identifier: Apache-2.0
"""Inventories are read strictly: understood, or refused with the place and a hint."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horowatt.errors import InvalidInput
from horowatt_allocator.adapters.inventory import MAX_GPUS, load_inventory
from horowatt_allocator.adapters.strict_toml import is_host
from horowatt_allocator.records.cluster import NodeSpec


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        load_inventory(path)
    assert str(path) in caught.value.message
    assert caught.value.hint or caught.value.because
    return caught.value


def test_toml_attributes_arrive(tmp_path: Path) -> None:
    """Every attribute of a node reaches its record; absent ones are None, not zero."""
    path = write(
        tmp_path,
        "lab.toml",
        """
        name = "lab"
        [[node]]
        name = "a"
        address = "10.0.0.1"
        gpu_type = "NVIDIA A100-SXM4-80GB"
        num_gpus = 8
        base_w = 210
        simulated = true
        [[node]]
        name = "b.example.org"
        """,
    )
    inventory = load_inventory(path)
    assert inventory.name == "lab"
    assert inventory.nodes == (
        NodeSpec(
            name="a",
            address="10.0.0.1",
            gpu_type="NVIDIA A100-SXM4-80GB",
            num_gpus=8,
            base_w=210.0,
            simulated=True,
        ),
        NodeSpec(name="b.example.org", address="b.example.org", gpu_type=None, num_gpus=None, base_w=None),
    )


def test_hosts_file_arrives(tmp_path: Path) -> None:
    """A hosts file gives names and numbers of GPUs; comments and blank lines are skipped."""
    path = write(tmp_path, "lab.hosts", "# machines\n\na slots=4  # the old one\n  b\tslots=8\r\n")
    inventory = load_inventory(path)
    assert inventory.name == "lab"
    assert [(node.name, node.address, node.num_gpus) for node in inventory.nodes] == [
        ("a", "a", 4),
        ("b", "b", 8),
    ]


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        ("[[node]\n", "HW-INV-002", "line 1"),
        ("", "HW-INV-003", ""),
        ('name = "x"\n', "HW-INV-003", ""),
        ('[[node]]\nname = "a"\n[[node]]\nname = "A"\n', "HW-INV-004", "A"),
        ('[[node]]\nname="a"\naddress="h"\n[[node]]\nname="b"\naddress="h"\n', "HW-INV-004", "h"),
        ('[[node]]\nname = "a"\ngpus = 4\n', "HW-INV-005", "node 1, line 1: gpus"),
        ('nodes = 3\n[[node]]\nname = "a"\n', "HW-INV-005", "nodes"),
        (
            '[[node]]\nname = "a"\n\n[[node]]\nname = "b"\nnum_gpus = "4"\n',
            "HW-INV-006",
            "node 2, line 4: num_gpus",
        ),
        ('[[node]]\nname = "a"\nnum_gpus = 0\n', "HW-INV-006", "num_gpus"),
        ('[[node]]\nname = "a"\nnum_gpus = true\n', "HW-INV-006", "num_gpus"),
        ('[[node]]\nname = "a"\nnum_gpus = 2.0\n', "HW-INV-006", "num_gpus"),
        ('[[node]]\nname = "a"\nbase_w = nan\n', "HW-INV-006", "base_w"),
        ('[[node]]\nname = "a"\nbase_w = -1\n', "HW-INV-006", "base_w"),
        ('[[node]]\nname = "a"\nsimulated = 1\n', "HW-INV-006", "simulated"),
        ('[[node]]\nname = "a"\naddress = "fe80::1"\n', "HW-INV-006", "address"),
        ("[[node]]\nnum_gpus = 4\n", "HW-INV-006", "name"),
        ('[[node]]\nname = "a b"\n', "HW-INV-007", "name"),
        ('[[node]]\nname = "$(reboot)"\n', "HW-INV-007", "name"),
        ('[[node]]\nname = "10.0.0.256"\n', "HW-INV-007", "name"),
        ("node = 3\n", "HW-INV-006", "node"),
    ],
)
def test_bad_toml_is_refused(tmp_path: Path, text: str, code: str, place: str) -> None:
    """What cannot be understood in a TOML inventory is refused with its code and place."""
    error = refused(write(tmp_path, "bad.toml", text))
    assert error.code == code
    assert place in str(error)


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("a\n", "HW-INV-002", "1"),
        ("a slots=4\na slots=4\n", "HW-INV-004", ""),
        ("# only\n\n", "HW-INV-003", ""),
        ("a slots=4 gpu=h100\n", "HW-INV-005", "1"),
        ("a slots=4 slots=4\n", "HW-INV-002", "1"),
        ("a slots=4\nb slots=four\n", "HW-INV-006", "2"),
        ("a slots=-1\n", "HW-INV-006", "1"),
        ("a slots=\n", "HW-INV-006", "1"),
        ("a slots=0\n", "HW-INV-006", "1"),
        (f"a slots={'9' * 5000}\n", "HW-INV-006", "1"),
        ("a slots=²\n", "HW-INV-006", "1"),
        ("a:4\n", "HW-INV-007", "1"),
        ("-n slots=4\n", "HW-INV-007", "1"),
    ],
)
def test_bad_hosts_file_is_refused(tmp_path: Path, text: str, code: str, line: str) -> None:
    """What cannot be understood in a hosts file is refused with its code and line."""
    error = refused(write(tmp_path, "bad.hosts", text))
    assert error.code == code
    if line:
        assert error.fields["line"] == line


def test_unreadable_inventories_are_refused(tmp_path: Path) -> None:
    """A file that is absent, a folder, not text or of another kind is refused, without a traceback."""
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    for path in (tmp_path / "absent.toml", binary, folder, tmp_path / "cluster.yaml"):
        assert refused(path).code == "HW-INV-001"


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True), st.integers(1, MAX_GPUS)
        ),
        min_size=1,
        max_size=20,
        unique_by=lambda entry: entry[0],
    )
)
def test_both_kinds_agree(tmp_path_factory: pytest.TempPathFactory, hosts: list[tuple[str, int]]) -> None:
    """The same machines written as a hosts file and as TOML give the same nodes."""
    folder = tmp_path_factory.mktemp("both")
    plain = write(folder, "x.hosts", "".join(f"{name} slots={count}\n" for name, count in hosts))
    toml = write(
        folder, "x.toml", "".join(f'[[node]]\nname = "{name}"\nnum_gpus = {count}\n' for name, count in hosts)
    )
    assert load_inventory(plain) == load_inventory(toml)


@given(st.text(max_size=300))
def test_any_hosts_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """No text whatever makes the reader fail otherwise than by an error with a code."""
    path = tmp_path_factory.mktemp("any") / "any.hosts"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(InvalidInput):
        assert all(is_host(node.name) for node in load_inventory(path).nodes)
