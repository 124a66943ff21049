# SPDX-License-Identifier: Apache-2.0
"""Plain records and simulated GPUs for tests of a node: one job, its leases, each field open to change."""

import functools
import os
import pwd
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from horowatt.devices.simulated import SimulatorConfig, build_library
from horowatt.records import BatchRule, JobOrder, LauncherKind, LaunchSpec, Lease, SlotsFile

NODE = "node-a"
IDLE_W, CONTEXT_W, DEMAND_W, LINK_W, FLOOR_W, BETA = 50.0, 30.0, 300.0, 120.0, 60.0, 0.5
SPEED_FLOP_PER_S, LINK_BYTES_PER_S = 1e9, 1e6
MEMORY_BYTES = 8 << 30
SIMULATOR = f"""
[[gpu]]
type = "test-gpu"
count = 2
idle_w = {IDLE_W}
context_w = {CONTEXT_W}
demand_w = {DEMAND_W}
floor_w = {FLOOR_W}
beta = {BETA}
default_limit_w = 400.0
min_limit_w = 100.0
max_limit_w = 400.0
speed_flop_per_s = {SPEED_FLOP_PER_S}
link_bytes_per_s = {LINK_BYTES_PER_S}
link_w = {LINK_W}
memory_bytes = {MEMORY_BYTES}
"""
"""Two GPUs, as ``--simulate`` takes them."""
CONFIG = SimulatorConfig.parse(SIMULATOR)
GPUS = CONFIG.uuids(NODE)


@functools.cache
def _build(folder: Path) -> Path:
    return build_library(folder)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated NVML library, built once for all modules: ``library = node_specimens.library``."""
    return _build(tmp_path_factory.getbasetemp())


def spec(job_id: str = "job-1", **more: object) -> LaunchSpec:
    """Return a job of this process's user under Horowatt's launcher, width 1 to 4."""
    user = pwd.getpwuid(os.geteuid())
    fields: dict[str, object] = {
        "job_id": job_id,
        "name": "a job",
        "tenant": "t",
        "uid": user.pw_uid,
        "gid": user.pw_gid,
        "username": user.pw_name,
        "launcher": LauncherKind.HOROWATT,
        "command": ("python", "train.py"),
        "environment": {},
        "working_dir": "/",
        "virtual_env": None,
        "min_width": 1,
        "max_width": 4,
        "batch_rule": BatchRule.PER_WORKER,
        "batch_size": None,
    }
    return LaunchSpec(**{**fields, **more})  # type: ignore[arg-type]


def lease(
    lease_id: str, gpu_uuid: str, *, job_id: str = "job-1", slot_index: int = 0, node: str = NODE
) -> Lease:
    """Return a lease on a GPU of this node."""
    return Lease(
        lease_id=lease_id,
        job_id=job_id,
        node=node,
        address="localhost",
        gpu_uuid=gpu_uuid,
        gpu_type="test-gpu",
        slot_index=slot_index,
        simulated=True,
    )


def slots(
    of: LaunchSpec, leases: Sequence[str] | Mapping[str, str], generation: int = 1, node: str = NODE
) -> SlotsFile:
    """Return a job's slots file: GPUs by lease id, or lease ids, whose GPUs are then called after them."""
    by_lease = leases if isinstance(leases, Mapping) else {name: f"GPU-{name}" for name in leases}
    return SlotsFile(
        job_id=of.job_id,
        generation=generation,
        uid=of.uid,
        leases=tuple(
            lease(lease_id, gpu_uuid, job_id=of.job_id, slot_index=index, node=node)
            for index, (lease_id, gpu_uuid) in enumerate(by_lease.items())
        ),
        published_at_s=1.0,
    )


def order(
    of: LaunchSpec,
    generation: int = 1,
    leases: Sequence[str] | Mapping[str, str] = ("l-1",),
    *,
    node: str = NODE,
    **more: object,
) -> JobOrder:
    """Return the order to run a job on this node."""
    fields: dict[str, object] = {
        "job_id": of.job_id,
        "run": True,
        "forget": False,
        "launcher_here": True,
        "attempt": 1,
        "spec": of,
        "slots": slots(of, leases, generation, node),
        "streams": {},
    }
    return JobOrder(**{**fields, **more})  # type: ignore[arg-type]
