# SPDX-License-Identifier: Apache-2.0
"""Plain records for tests of the decisions: one GPU, one node, one job, each field open to change."""

from dataclasses import replace

from horowatt.records import BatchRule, LauncherKind
from horowatt_allocator.records.cluster import Gpu, Node, NodeSpec, Policy, State, Tenant
from horowatt_allocator.records.jobs import Job, JobPhase, JobRequest, JobSpec, LeaseState

NOW_S = 1_700_000_000.0


def gpu(uuid: str = "GPU-0", **fields: object) -> Gpu:
    """Return a free GPU of type V, 100 to 300 W, 40 W idle."""
    plain = Gpu(
        uuid=uuid,
        nvml_index=0,
        gpu_type="V",
        simulated=True,
        energy_j=0.0,
        power_w=40.0,
        idle_w=40.0,
        limit_w=300.0,
        default_limit_w=300.0,
        min_limit_w=100.0,
        max_limit_w=300.0,
        can_set_limit=True,
        lost=False,
        sampled_at_s=NOW_S,
    )
    return replace(plain, **fields)  # type: ignore[arg-type]  # fields of the record by name


def node(name: str, num_gpus: int, gpu_type: str = "V", **fields: object) -> Node:
    """Return a node that has just reported."""
    spec = NodeSpec(
        name=name, address=f"{name}.test", gpu_type=gpu_type, num_gpus=num_gpus, base_w=None, simulated=True
    )
    plain = Node(
        spec=spec,
        gpus=tuple(gpu(f"GPU-{name}-{n}", nvml_index=n, gpu_type=gpu_type) for n in range(num_gpus)),
        last_seen_s=NOW_S,
        agent_id=f"agent-{name}",
    )
    return replace(plain, **fields)  # type: ignore[arg-type]  # fields of the record by name


def spec(job_id: str = "j0", widths: tuple[int, ...] = (1, 2, 4), **fields: object) -> JobSpec:
    """Return a job's specification."""
    plain = JobSpec(
        job_id=job_id,
        name=job_id,
        tenant="t",
        uid=1000,
        gid=1000,
        username="ada",
        launcher=LauncherKind.HOROWATT,
        command=("python", "train.py"),
        environment={},
        working_dir="/home/ada",
        virtual_env=None,
        legal_widths=widths,
        batch_rule=BatchRule.PER_WORKER,
        batch_size=None,
        total_samples=None,
        total_epochs=None,
        deadline_s=None,
        wall_time_limit_s=None,
        gpu_types=(),
        weight=1.0,
        flexibility=0.0,
        submitted_at_s=NOW_S,
    )
    return replace(plain, **fields)  # type: ignore[arg-type]  # fields of the record by name


def job(job_id: str = "j0", widths: tuple[int, ...] = (1, 2, 4), **fields: object) -> Job:
    """Return a queued job that was never started."""
    return Job(spec=spec(job_id, widths, **fields), phase=JobPhase.QUEUED)


def state(*nodes: Node, jobs: tuple[Job, ...] = (), policy: Policy | None = None, **fields: object) -> State:
    """Return a state."""
    plain = State(
        nodes={one.spec.name: one for one in nodes},
        tenants={"t": Tenant(name="t", users=("*",))},
        policy=policy or Policy(),
        jobs={one.spec.job_id: one for one in jobs},
    )
    return replace(plain, **fields)  # type: ignore[arg-type]  # fields of the record by name


def lease(lease_id: str, job_id: str, where: str, index: int, **fields: object) -> LeaseState:
    """Return the lease of a job on GPU ``index`` of a node."""
    plain = LeaseState(
        lease_id=lease_id,
        job_id=job_id,
        node=where,
        gpu_uuid=f"GPU-{where}-{index}",
        gpu_type="V",
        slot_index=index,
        simulated=True,
        generation=1,
        granted_s=NOW_S,
        held=True,
        started=True,
    )
    return replace(plain, **fields)  # type: ignore[arg-type]  # fields of the record by name


def request(**fields: object) -> JobRequest:
    """Return a valid request."""
    plain = JobRequest(
        name="digits", tenant="t", command=("python", "train.py"), working_dir="/home/ada", widths="1,2,4"
    )
    return replace(plain, **fields)  # type: ignore[arg-type]  # fields of the record by name
