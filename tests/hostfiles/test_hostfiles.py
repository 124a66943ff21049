# SPDX-License-Identifier: Apache-2.0
"""The inventories and configurations that ship are valid, and so are the examples in their README."""

import re
from pathlib import Path

import pytest

from horowatt_allocator.adapters.config import load_config
from horowatt_allocator.adapters.inventory import load_inventory

FOLDER = Path(__file__).resolve().parents[2] / "hostfiles"
INVENTORIES = sorted(
    path
    for path in [*FOLDER.glob("*.toml"), *FOLDER.glob("*.hosts")]
    if not path.name.endswith((".config.toml", ".simulator.toml"))
)


@pytest.mark.parametrize("path", INVENTORIES, ids=lambda path: path.name)
def test_shipped_inventories_load(path: Path) -> None:
    """Each shipped inventory loads."""
    assert load_inventory(path).nodes


def test_demo_has_four_simulated_gpus_here() -> None:
    """The demo's cluster is this machine with four simulated GPUs."""
    [node] = load_inventory(FOLDER / "demo.toml").nodes
    assert (node.name, node.address, node.num_gpus, node.simulated) == ("localhost", "localhost", 4, True)


def test_demo_tenants_are_open_to_everybody() -> None:
    """Anybody can run the demo, whoever that is."""
    tenants = load_config(FOLDER / "demo.config.toml").tenants
    assert {name: tenant.users for name, tenant in tenants.items()} == {
        "vision": ("*",),
        "speech": ("*",),
        "search": ("*",),
    }


def test_both_kinds_of_two_nodes_name_the_same() -> None:
    """The two examples of two nodes describe the same machines."""
    toml, hosts = (load_inventory(FOLDER / f"two-nodes.{kind}") for kind in ("toml", "hosts"))
    assert [(node.name, node.num_gpus) for node in toml.nodes] == [
        (node.name, node.num_gpus) for node in hosts.nodes
    ]


def readme_blocks() -> list[str]:
    blocks = re.findall(r"(?:^    .*\n|^\n)+", (FOLDER / "README.md").read_text(), re.MULTILINE)
    return ["\n".join(line[4:] for line in block.splitlines()) for block in blocks if block.strip()]


def test_examples_in_the_readme_are_valid(tmp_path: Path) -> None:
    """What the README tells people to write is accepted."""
    blocks = readme_blocks()
    [hosts] = [block for block in blocks if re.search(r"^gpu-a slots=4$", block, re.MULTILINE)]
    (tmp_path / "x.hosts").write_text(hosts)
    assert len(load_inventory(tmp_path / "x.hosts").nodes) == 2
    [toml] = [block for block in blocks if "[[node]]" in block]
    (tmp_path / "x.toml").write_text(toml)
    assert load_inventory(tmp_path / "x.toml").nodes[0].gpu_type == "h100"
    [config] = [block for block in blocks if "[policy]" in block]
    (tmp_path / "c.toml").write_text(config)
    assert load_config(tmp_path / "c.toml").tenants["vision"].gpu_quota == 8


def test_every_file_stands_in_the_readme() -> None:
    """The README's table names every file of the folder."""
    text = (FOLDER / "README.md").read_text()
    for path in FOLDER.iterdir():
        if path.name != "README.md":
            assert f"`{path.name}`" in text, path.name
