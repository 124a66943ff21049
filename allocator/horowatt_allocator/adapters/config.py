# SPDX-License-Identifier: Apache-2.0
"""The service's configuration file: tenants, policy, operators, agent users."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from horowatt.errors import InvalidInput
from horowatt_allocator.adapters.strict_toml import Codes, Table, parse, read_text
from horowatt_allocator.records.cluster import Objective, Policy, Tenant

_CODES = Codes(
    unreadable="HW-CFG-001", malformed="HW-CFG-002", unknown_key="HW-CFG-003", bad_value="HW-CFG-004"
)
_DUPLICATE = "HW-CFG-005"

_MAX_WEIGHT = 1e6
_MAX_QUOTA = 1_000_000
_DAY_S = 86_400.0

_RANGES: Mapping[str, tuple[float, float]] = {
    "alpha": (0.0, 1.0),
    "horizon_s": (1.0, _DAY_S),
    "cap_w": (1.0, 1e9),
    "dwell_s": (0.0, _DAY_S),
    "settle_s": (0.0, 3600.0),
    "window_s": (0.5, 3600.0),
    "agent_timeout_s": (2.0, _DAY_S),
    "decide_every_s": (1.0, _DAY_S),
    "restart_window_s": (0.0, 365 * _DAY_S),
    "restart_backoff_s": (0.0, 300.0),
    "resize_deadline_s": (1.0, _DAY_S),
    "prior_efficiency": (0.5, 1.0),
    "prior_pause_s": (0.0, 3600.0),
    "max_wait_s": (1.0, 365 * _DAY_S),
    "solve_limit_s": (0.1, 600.0),
}
"""Lowest and highest value an operator may choose, in the unit of the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """What an operator decides.

    Attributes:
        tenants: By name; empty means that each Unix user is a tenant of the same name.
        operators: Unix user names that may see and touch every job, besides root and the user of
            the service.
        agent_users: Unix user names that may report as agents, besides root and the user of the
            service.
    """

    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    policy: Policy = field(default_factory=Policy)
    operators: tuple[str, ...] = ()
    agent_users: tuple[str, ...] = ()


def load_config(path: Path | None) -> ServiceConfig:
    """Return the configuration in a TOML file, or the defaults without one.

    Raises:
        InvalidInput: ``HW-CFG-001`` unreadable, ``002`` not TOML, ``003`` unknown key, ``004`` bad
            value, ``005`` a tenant twice. The message names the file and the key.
    """
    if path is None:
        return ServiceConfig()
    root = parse(read_text(path, _CODES, "configuration"), path, _CODES, "configuration")
    tenants: dict[str, Tenant] = {}
    for table in root.tables("tenant"):
        tenant = _tenant(table)
        if tenant.name in tenants:
            raise InvalidInput(
                _DUPLICATE,
                f"{path}: the tenant {tenant.name!r} stands there twice",
                hint="keep one [[tenant]] table of each name",
                fields={"file": str(path), "tenant": tenant.name},
            )
        tenants[tenant.name] = tenant
    config = ServiceConfig(
        tenants=tenants,
        policy=_policy(root.table("policy")),
        operators=root.texts("operators"),
        agent_users=root.texts("agent_users"),
    )
    root.finish()
    return config


def _tenant(table: Table) -> Tenant:
    name = table.text("name")
    if name is None:
        table.bad("name", "it is missing", "each tenant needs a name")
    users = table.texts("users")
    if not users:
        table.bad("users", "nobody could submit for this tenant", 'list Unix users, or ["*"] for everybody')
    weight = table.number("weight", 1.0 / _MAX_WEIGHT, _MAX_WEIGHT)
    tenant = Tenant(
        name=name,
        users=users,
        weight=1.0 if weight is None else weight,
        gpu_quota=table.whole("gpu_quota", 0, _MAX_QUOTA),
    )
    table.finish()
    return tenant


def _policy(table: Table) -> Policy:
    chosen: dict[str, object] = {}
    objective = table.text("objective")
    if objective is not None:
        if objective not in set(Objective):
            table.bad("objective", f"{objective!r} is unknown", f"one of {', '.join(Objective)}")
        chosen["objective"] = Objective(objective)
    for key, (low, high) in _RANGES.items():
        value = table.number(key, low, high)
        if value is not None:
            chosen[key] = value
    steps = table.numbers("limit_steps", 0.1, 1.0)
    if steps is not None:
        if list(steps) != sorted(set(steps), reverse=True):
            table.bad("limit_steps", "the shares are not in descending order", "write e.g. [1.0, 0.8, 0.6]")
        chosen["limit_steps"] = steps
    restarts = table.whole("max_restarts", 0, 1000)
    if restarts is not None:
        chosen["max_restarts"] = restarts
    table.finish()
    return Policy(**chosen)  # type: ignore[arg-type]  # each value was checked for its key above
