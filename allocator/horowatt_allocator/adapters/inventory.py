# SPDX-License-Identifier: Apache-2.0
"""Inventories: the description of a cluster, as TOML or as a plain hosts file.

A hosts file (``*.hosts``) has one ``name slots=N`` per line and is readable by ``mpirun --hostfile``.
A TOML file has a ``name`` and one ``[[node]]`` table per node with the attributes of
:class:`~horowatt_allocator.records.cluster.NodeSpec`. Both are read strictly: what cannot be
understood is an error, never a default.

Known limitations: IPv6 addresses are refused, because Horovod splits ``host:slots`` at the colon.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from horowatt.errors import InvalidInput
from horowatt_allocator.adapters.strict_toml import HOST_HINT, Codes, Table, is_host, parse, read_text
from horowatt_allocator.records.cluster import Inventory, NodeSpec

_CODES = Codes(
    unreadable="HW-INV-001", malformed="HW-INV-002", unknown_key="HW-INV-005", bad_value="HW-INV-006"
)
_EMPTY = "HW-INV-003"
_DUPLICATE = "HW-INV-004"
_BAD_HOST = "HW-INV-007"

MAX_GPUS = 1024
_MAX_BASE_W = 100_000.0
_SLOTS = re.compile(r"slots=(.*)")


def load_inventory(path: Path) -> Inventory:
    """Return the inventory that a ``*.toml`` or ``*.hosts`` file describes.

    Raises:
        InvalidInput: ``HW-INV-001`` unreadable, ``002`` malformed, ``003`` without nodes, ``004``
            a host twice, ``005`` an unknown attribute, ``006`` a bad value, ``007`` a name that is
            no host name. The message names the file and the line or key.
    """
    if path.suffix not in {".toml", ".hosts"}:
        raise InvalidInput(
            _CODES.unreadable,
            f"{path}: this is not the name of an inventory",
            because="its name ends neither in .toml nor in .hosts",
            hint="name it NAME.toml (with attributes) or NAME.hosts (host slots=N)",
            fields={"file": str(path)},
        )
    text = read_text(path, _CODES, "inventory")
    name, nodes = (_from_toml if path.suffix == ".toml" else _from_hosts)(path, text)
    if not nodes:
        raise InvalidInput(
            _EMPTY,
            f"{path}: the inventory names no node",
            hint="add one [[node]] table per host"
            if path.suffix == ".toml"
            else "add lines such as: n1 slots=4",
            fields={"file": str(path)},
        )
    _refuse_duplicates(path, nodes)
    return Inventory(name=name, nodes=tuple(nodes))


def _from_toml(path: Path, text: str) -> tuple[str, Sequence[NodeSpec]]:
    root = parse(text, path, _CODES, "inventory")
    name = root.text("name", path.stem) or path.stem
    nodes = [_node(table) for table in root.tables("node")]
    root.finish()
    return name, nodes


def _node(table: Table) -> NodeSpec:
    name = table.text("name")
    if name is None:
        table.bad("name", "it is missing", "each node needs a name")
    if not is_host(name):
        table.bad("name", f"{name!r} is not a valid host name", HOST_HINT, code=_BAD_HOST)
    spec = NodeSpec(
        name=name,
        address=table.host("address", name) or name,
        gpu_type=table.text("gpu_type"),
        num_gpus=table.whole("num_gpus", 1, MAX_GPUS),
        base_w=table.number("base_w", 0.0, _MAX_BASE_W),
        simulated=table.flag("simulated", default=False),
    )
    table.finish()
    return spec


def _from_hosts(path: Path, text: str) -> tuple[str, Sequence[NodeSpec]]:
    nodes = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#", 1)[0].strip()
        if line:
            nodes.append(_host_line(path, number, line))
    return path.stem, nodes


def _host_line(path: Path, number: int, line: str) -> NodeSpec:
    name, *attributes = line.split()

    def bad(code: str, because: str, hint: str) -> InvalidInput:
        return InvalidInput(
            code,
            f"{path}, line {number}: this line cannot be used",
            because=because,
            hint=hint,
            fields={"file": str(path), "line": str(number)},
        )

    if not is_host(name):
        raise bad(_BAD_HOST, f"{name!r} is not a valid host name", HOST_HINT)
    slots: int | None = None
    for attribute in attributes:
        match = _SLOTS.fullmatch(attribute)
        if match is None:
            raise bad(
                _CODES.unknown_key,
                f"{attribute!r} is not 'slots=N'",
                "use a .toml inventory for other attributes",
            )
        if slots is not None:
            raise bad(_CODES.malformed, "'slots' stands there twice", "keep one")
        if not (match[1].isascii() and match[1].isdigit() and 1 <= int(match[1][:9]) <= MAX_GPUS):
            raise bad(
                _CODES.bad_value, f"{match[1]!r} is not a number from 1 to {MAX_GPUS}", "write e.g. slots=4"
            )
        slots = int(match[1])
    if slots is None:
        raise bad(_CODES.malformed, "'slots=N' is missing", f"write: {name} slots=4")
    return NodeSpec(name=name, address=name, gpu_type=None, num_gpus=slots, base_w=None)


def _refuse_duplicates(path: Path, nodes: Sequence[NodeSpec]) -> None:
    # Host names do not differ by case. Two nodes behind one address would be one host to Horovod.
    for what, values in (
        ("host", [node.name for node in nodes]),
        ("address", [node.address for node in nodes]),
    ):
        seen: set[str] = set()
        for number, value in enumerate(values, start=1):
            if value.lower() in seen:
                raise InvalidInput(
                    _DUPLICATE,
                    f"{path}: the {what} {value!r} stands there twice",
                    because=f"node {number} repeats it",
                    hint="each host is one node; add its GPUs to one entry",
                    fields={"file": str(path), what: value},
                )
            seen.add(value.lower())
