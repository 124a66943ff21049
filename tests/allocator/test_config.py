# SPDX-License-Identifier: Apache-2.0
"""The configuration file is read strictly and reaches every field of the policy."""

from dataclasses import fields
from pathlib import Path

import pytest

from horowatt.errors import InvalidInput
from horowatt_allocator.adapters.config import _RANGES, ServiceConfig, load_config
from horowatt_allocator.records.cluster import Objective, Policy, Tenant


def load(folder: Path, text: str) -> ServiceConfig:
    path = folder / "config.toml"
    path.write_text(text)
    return load_config(path)


def test_no_file_means_the_defaults() -> None:
    """Without a file there are no tenants, no operators, and the default policy."""
    assert load_config(None) == ServiceConfig(tenants={}, policy=Policy(), operators=(), agent_users=())


def test_everything_arrives(tmp_path: Path) -> None:
    """Tenants, policy, operators and agent users reach their records."""
    config = load(
        tmp_path,
        """
        operators = ["alice"]
        agent_users = ["horowatt"]
        [policy]
        objective = "throughput"
        alpha = 1
        cap_w = 1500
        limit_steps = [1.0, 0.5]
        max_restarts = 0
        window_s = 5
        [[tenant]]
        name = "research; $(team) 'x'"
        users = ["bob", "*"]
        weight = 2
        gpu_quota = 4
        """,
    )
    assert config.operators == ("alice",)
    assert config.agent_users == ("horowatt",)
    assert config.policy == Policy(
        objective=Objective.THROUGHPUT,
        alpha=1.0,
        cap_w=1500.0,
        limit_steps=(1.0, 0.5),
        max_restarts=0,
        window_s=5.0,
    )
    name = "research; $(team) 'x'"
    assert config.tenants == {name: Tenant(name=name, users=("bob", "*"), weight=2.0, gpu_quota=4)}


def test_every_policy_field_can_be_set() -> None:
    """A field of the policy that no key of the file can set would be out of the operator's reach."""
    assert {item.name for item in fields(Policy)} == {"objective", "limit_steps", "max_restarts", *_RANGES}


def test_defaults_are_within_their_ranges() -> None:
    """The defaults of the policy are values that the file would accept."""
    for key, (low, high) in _RANGES.items():
        value = getattr(Policy(), key)
        assert value is None or low <= value <= high, key


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        ("[policy\n", "HW-CFG-002", "line 1"),
        ("tenants = 1\n", "HW-CFG-003", "tenants"),
        ("[policy]\nalhpa = 0.5\n", "HW-CFG-003", "policy.alhpa"),
        ('[[tenant]]\nname = "a"\nusers = ["*"]\nquota = 3\n', "HW-CFG-003", "tenant 1, line 1: quota"),
        ("[policy]\nalpha = 1.5\n", "HW-CFG-004", "policy.alpha"),
        ("[policy]\nalpha = true\n", "HW-CFG-004", "policy.alpha"),
        ('[policy]\nobjective = "speed"\n', "HW-CFG-004", "throughput"),
        ("[policy]\ncap_w = inf\n", "HW-CFG-004", "policy.cap_w"),
        ("[policy]\nlimit_steps = []\n", "HW-CFG-004", "limit_steps"),
        ("[policy]\nlimit_steps = [0.5, 1.0]\n", "HW-CFG-004", "limit_steps"),
        ("[policy]\nmax_restarts = 1.5\n", "HW-CFG-004", "max_restarts"),
        ('operators = "alice"\n', "HW-CFG-004", "operators"),
        ('operators = ["a", "a"]\n', "HW-CFG-004", "operators"),
        ("policy = 3\n", "HW-CFG-004", "policy"),
        ("tenant = 3\n", "HW-CFG-004", "tenant"),
        ('[[tenant]]\nname = "a"\n', "HW-CFG-004", "users"),
        ('[[tenant]]\nusers = ["*"]\n', "HW-CFG-004", "name"),
        ('[[tenant]]\nname = ""\nusers = ["*"]\n', "HW-CFG-004", "name"),
        ('[[tenant]]\nname = "a\\nb"\nusers = ["*"]\n', "HW-CFG-004", "name"),
        ('[[tenant]]\nname="a"\nusers=["*"]\n[[tenant]]\nname="a"\nusers=["*"]\n', "HW-CFG-005", "'a'"),
    ],
)
def test_bad_configuration_is_refused(tmp_path: Path, text: str, code: str, place: str) -> None:
    """What cannot be understood is refused with its code, the file and the key."""
    with pytest.raises(InvalidInput) as caught:
        load(tmp_path, text)
    assert caught.value.code == code
    assert "config.toml" in caught.value.message
    assert place in str(caught.value)


def test_unreadable_configuration_is_refused(tmp_path: Path) -> None:
    """A named file that is not there is an error, not the defaults."""
    with pytest.raises(InvalidInput) as caught:
        load_config(tmp_path / "absent.toml")
    assert caught.value.code == "HW-CFG-001"
