# SPDX-License-Identifier: Apache-2.0
"""What simulated GPUs are like: the ``*.simulator.toml`` file.

    [[gpu]]
    type = "sim-a100"        # product name; NVML shows it with "(simulated)" behind it
    count = 4
    idle_w = 55.0            # power with no process on the GPU
    context_w = 30.0         # added while any process is attached
    demand_w = 330.0         # power of full load where no limit binds
    floor_w = 50.6           # P_f of the throughput curve, below
    beta = 0.37              # exponent of the throughput curve
    default_limit_w = 400.0
    min_limit_w = 100.0
    max_limit_w = 400.0
    speed_flop_per_s = 1e8   # where no limit binds
    link_bytes_per_s = 1e7
    link_w = 120.0           # power while communicating
    memory_bytes = 42949672960

Under a limit below the demand, power is the limit and speed is
``speed_flop_per_s * ((limit - floor_w) / (demand_w - floor_w)) ** beta``.
"""

import math
import re
import tomllib
import uuid as uuids
from dataclasses import dataclass, fields
from pathlib import Path

from horowatt.errors import InvalidInput

MAX_GPUS = 1024
"""GPUs that one state file can hold."""
_MAX_NAME_BYTES = 64
_MAX_BYTES = 2**53
_NAMESPACE = uuids.UUID("5e3b1a56-3c0c-5d0e-9a39-6a4f3f0a7a11")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGpuType:
    """Some GPUs that are alike. The keys of a ``[[gpu]]`` table; see the module for their meaning."""

    type: str
    count: int
    idle_w: float
    context_w: float
    demand_w: float
    floor_w: float
    beta: float
    default_limit_w: float
    min_limit_w: float
    max_limit_w: float
    speed_flop_per_s: float
    link_bytes_per_s: float
    link_w: float
    memory_bytes: int


_KEYS = tuple(field.name for field in fields(SimulatedGpuType))
_INTEGERS = ("count", "memory_bytes")
_MAY_BE_ZERO = ("idle_w", "context_w", "floor_w", "beta")


@dataclass(frozen=True, slots=True)
class SimulatorConfig:
    """The simulated GPUs of one node."""

    gpu: tuple[SimulatedGpuType, ...]

    @classmethod
    def load(cls, path: Path) -> "SimulatorConfig":
        """Read a ``*.simulator.toml`` file.

        Raises:
            InvalidInput: ``HW-SIM-001`` when the file cannot be read or is not TOML, ``HW-SIM-002``
                when a key or a value is wrong; the message names line and key.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(str(path), str(error)) from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, source: str = "simulator configuration") -> "SimulatorConfig":
        """Read the text of a ``*.simulator.toml`` file; ``source`` names it in messages.

        Raises:
            InvalidInput: as ``load`` does.
        """
        try:
            document = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise _unreadable(source, str(error)) from error
        where = _Where(text, source)
        for key in document:
            if key != "gpu":
                raise where.invalid(key, None, "unknown key; the file holds [[gpu]] tables only")
        tables = document.get("gpu", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise where.invalid("gpu", None, "write each kind of GPU as a [[gpu]] table")
        if not tables:
            raise where.invalid("gpu", None, "there is no [[gpu]] table, so there are no GPUs")
        groups = tuple(_gpu_type(table, number, where) for number, table in enumerate(tables))
        if sum(group.count for group in groups) > MAX_GPUS:
            raise where.invalid("count", None, f"a node has at most {MAX_GPUS} simulated GPUs")
        return cls(groups)

    def each_gpu(self) -> tuple[SimulatedGpuType, ...]:
        """Return the kind of every single GPU, in NVML order."""
        return tuple(group for group in self.gpu for _ in range(group.count))

    def uuids(self, node: str) -> tuple[str, ...]:
        """Return the UUID of every single GPU, in NVML order; the same for ever on one node."""
        return tuple(simulated_uuid(node, index) for index in range(len(self.each_gpu())))

    def types_by_uuid(self, node: str) -> dict[str, str]:
        """Return the ``type`` of every single GPU by its UUID."""
        return {uuid: gpu.type for uuid, gpu in zip(self.uuids(node), self.each_gpu(), strict=True)}


def simulated_uuid(node: str, index: int) -> str:
    """Return the UUID of the simulated GPU ``index`` of ``node``: stable, and unlike other nodes'."""
    return f"GPU-{uuids.uuid5(_NAMESPACE, f'{node}/{index}')}"


class _Where:
    """Says where in the file something is wrong."""

    def __init__(self, text: str, source: str) -> None:
        self._lines = text.splitlines()
        self._source = source

    def invalid(self, key: str, table: int | None, why: str) -> InvalidInput:
        """Return the error about ``key`` of the ``[[gpu]]`` table number ``table`` (from 0)."""
        name = key if table is None else f"gpu[{table}].{key}"
        line = self._line_of(key, table)
        place = f"{self._source}, line {line}" if line else self._source
        return InvalidInput(
            "HW-SIM-002",
            f"{place}: {name} is not valid",
            because=why,
            hint="compare with hostfiles/demo.simulator.toml, which shows every key",
            fields={"key": name, **({"line": str(line)} if line else {})},
        )

    def _line_of(self, key: str, table: int | None) -> int | None:
        # tomllib keeps no positions; this finds keys that are written one to a line.
        seen = -1
        start_of_table = None
        for number, line in enumerate(self._lines, start=1):
            if re.match(r"\s*\[\[\s*gpu\s*\]\]", line):
                seen += 1
                if seen == table:
                    start_of_table = number
            elif (table is None or seen == table) and re.match(rf"\s*\[*[\"']?{re.escape(key)}\b", line):
                return number
        return start_of_table


def _gpu_type(table: dict[str, object], number: int, where: _Where) -> SimulatedGpuType:
    for key in table:
        if key not in _KEYS:
            raise where.invalid(key, number, f"unknown key; known are {', '.join(_KEYS)}")
    values: dict[str, object] = {}
    for key in _KEYS:
        if key not in table:
            raise where.invalid(key, number, "the key is missing")
        if key == "type":
            values[key] = _name(table[key], number, where)
        elif key in _INTEGERS:
            values[key] = _integer(table[key], key, number, where)
        else:
            values[key] = _number(table[key], key, number, where)
    gpu = SimulatedGpuType(**values)  # type: ignore[arg-type] # each value was checked just above
    _check_together(gpu, number, where)
    return gpu


def _name(value: object, number: int, where: _Where) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise where.invalid("type", number, "a name in quotes is needed")
    if len(value.encode()) > _MAX_NAME_BYTES:
        raise where.invalid("type", number, f"the name is longer than {_MAX_NAME_BYTES} bytes")
    return value


def _integer(value: object, key: str, number: int, where: _Where) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_BYTES:
        raise where.invalid(key, number, f"a whole number of at least 1 is needed, not {value!r}")
    return value


def _number(value: object, key: str, number: int, where: _Where) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise where.invalid(key, number, f"a finite number is needed, not {value!r}")
    if value < 0 or (value == 0 and key not in _MAY_BE_ZERO):
        least = "at least 0" if key in _MAY_BE_ZERO else "above 0"
        raise where.invalid(key, number, f"it must be {least}, not {value!r}")
    return float(value)


def _check_together(gpu: SimulatedGpuType, number: int, where: _Where) -> None:
    base_w = gpu.idle_w + gpu.context_w
    rules = (
        ("demand_w", gpu.demand_w >= base_w, "it must be at least idle_w + context_w"),
        ("link_w", gpu.link_w >= base_w, "it must be at least idle_w + context_w"),
        ("floor_w", gpu.floor_w < gpu.demand_w, "it must be below demand_w"),
        ("floor_w", gpu.floor_w < gpu.min_limit_w, "it must be below min_limit_w, or work would never end"),
        ("max_limit_w", gpu.min_limit_w <= gpu.max_limit_w, "it must be at least min_limit_w"),
        (
            "default_limit_w",
            gpu.min_limit_w <= gpu.default_limit_w <= gpu.max_limit_w,
            "it must lie between min_limit_w and max_limit_w",
        ),
    )
    for key, holds, why in rules:
        if not holds:
            raise where.invalid(key, number, why)


def _unreadable(source: str, why: str) -> InvalidInput:
    return InvalidInput(
        "HW-SIM-001",
        f"the simulator configuration {source} cannot be read",
        because=why,
        hint="name a TOML file such as hostfiles/demo.simulator.toml",
        fields={"path": source},
    )
