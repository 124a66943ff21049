# SPDX-License-Identifier: Apache-2.0
"""Nodes, launchers and workers in virtual time: they answer orders with reports, as real agents do.

Pure apart from its own fields: no processes, no clock, no randomness. What a script is like is a
:class:`Script` that the allocator never sees; it sees counters, energies and launcher states only.

    cluster = VirtualCluster({"n1": 4}, policy=Policy(...))
    job_id = cluster.submit(Script(rate_per_s=100, efficiency=0.95), widths=(1, 2, 4))
    cluster.run(120)
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from horowatt.records import (
    WIRE_VERSION,
    AgentOrders,
    AgentReport,
    BatchRule,
    EnergyInterval,
    EnergyMethod,
    GpuReport,
    JobOrder,
    JobReport,
    LauncherKind,
    LauncherState,
    LauncherStatus,
    LeaseReport,
    StreamChunk,
)
from horowatt_allocator.decisions import controller, program
from horowatt_allocator.records.cluster import (
    AgentReported,
    CancelRequested,
    Decided,
    Decision,
    Event,
    JobSubmitted,
    Node,
    NodeSpec,
    Policy,
    State,
    Tenant,
    Tick,
    Told,
)
from horowatt_allocator.records.energy import BookedInterval
from horowatt_allocator.records.jobs import Job, JobPhase, JobSpec

HIGHEST_W = 300.0
LOWEST_W = 100.0
IDLE_W = 40.0
T0_S = 1_700_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a training script really does.

    Attributes:
        rate_per_s: Samples per second on one GPU without a limit that binds.
        efficiency: rate(2w) / (2 rate(w)).
        draw_w: Draw of each GPU while it trains without such a limit.
        beta: How much of the rate a binding limit costs.
        start_s: From start to first step.
        pause_s: Without training at a resize.
        stop_s: From an order to the end of a worker.
        total_samples: Work; None trains for ever.
        countable: False when the worker cannot count its samples.
        wobble: Relative amplitude by which the true rate moves, within about half a minute.
        standby_s: From a grant to a standby that is ready.
        bad_gpus: Where a standby ends with exit code 1 instead.
        tells: False when the launcher does not say that a standby failed; its exit code remains.
        commit_every_s: Between durable commits; None for a script that makes none.
    """

    rate_per_s: float = 100.0
    efficiency: float = 0.9
    draw_w: float = 230.0
    beta: float = 0.4
    start_s: float = 3.0
    pause_s: float = 2.0
    stop_s: float = 1.0
    total_samples: float | None = None
    countable: bool = True
    wobble: float = 0.0
    standby_s: float = 0.0
    bad_gpus: frozenset[str] = frozenset()
    tells: bool = True
    commit_every_s: float | None = None

    def rate(self, width: int, limit_w: float) -> float:
        """Return the true rate of ``width`` GPUs at a limit, samples per second."""
        full = self.rate_per_s * width * self.efficiency ** (width.bit_length() - 1)
        if limit_w >= self.draw_w:
            return full
        return float(full * ((limit_w - 50) / (self.draw_w - 50)) ** self.beta)


@dataclass(slots=True)
class _Worker:
    lease_id: str
    node: str
    gpu_uuid: str
    alive: bool = True
    world_size: int | None = None
    steps: float = 0.0
    samples: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    exit_code: int | None = None
    dies_at_s: float | None = None
    ready_at_s: float = 0.0


@dataclass(slots=True)
class _Launch:
    script: Script
    attempt: int = 0
    home: str = ""
    state: LauncherState = LauncherState.STOPPED
    exit_code: int | None = None
    applied: int = 0
    applied_before: int = 0
    granted: int = 0
    leases: tuple[str, ...] = ()
    world: tuple[str, ...] = ()
    committed_s: float = 0.0
    num_suspended: int = 0
    trains_from_s: float = 0.0
    workers: dict[str, _Worker] = field(default_factory=dict)
    trained: float = 0.0
    events: dict[str, str] = field(default_factory=dict)
    message: str = ""

    @property
    def living(self) -> bool:
        return self.state in {LauncherState.STARTING, LauncherState.RUNNING}


@dataclass(slots=True)
class _Gpu:
    uuid: str
    limit_w: float = HIGHEST_W
    energy_j: float = 0.0
    power_w: float = IDLE_W
    lost: bool = False
    busy: str = ""


class VirtualCluster:
    """A head with its nodes. Every step's state is checked for the invariants."""

    def __init__(
        self,
        nodes: Mapping[str, int],
        *,
        policy: Policy | None = None,
        tenants: Mapping[str, Tenant] | None = None,
        gpu_types: Mapping[str, str] | None = None,
        can_set_limit: bool = True,
        solve: program.Solve = program.solve,
        check: Callable[[State, State], None] | None = None,
    ) -> None:
        self.now = T0_S
        self.solve = solve
        self.check = check
        self.can_set_limit = can_set_limit
        self.types = {name: (gpu_types or {}).get(name, "V") for name in nodes}
        self.gpus = {name: [_Gpu(f"GPU-{name}-{n}") for n in range(count)] for name, count in nodes.items()}
        self.orders: dict[str, AgentOrders] = {}
        self.silent: set[str] = set()
        self.launches: dict[str, _Launch] = {}
        self.scripts: dict[str, Script] = {}
        self.decisions: list[Decision] = []
        self.told: list[Told] = []
        self.widths: dict[str, list[int]] = {}
        self.intervals: list[BookedInterval] = []
        self.held: dict[str, dict[str, int]] = {name: {} for name in nodes}
        self._open: dict[str, tuple[float, float, str | None, int]] = {}
        self._seq = dict.fromkeys(nodes, 0)
        self.state = State(
            nodes={
                name: Node(
                    spec=NodeSpec(
                        name=name,
                        address=f"{name}.test",
                        gpu_type=self.types[name],
                        num_gpus=count,
                        base_w=None,
                        simulated=True,
                    )
                )
                for name, count in nodes.items()
            },
            tenants=tenants or {"t": Tenant(name="t", users=("*",))},
            policy=policy or Policy(dwell_s=10.0, settle_s=2.0, window_s=5.0, decide_every_s=15.0),
        )

    # Driving it

    def submit(self, script: Script, *, widths: tuple[int, ...] = (1, 2, 4), **spec: object) -> str:
        """Submit a job and return its id."""
        job_id = f"j{len(self.scripts):03d}"
        self.scripts[job_id] = script
        total = script.total_samples
        wanted = JobSpec(
            job_id=job_id,
            name=str(spec.pop("name", job_id)),
            tenant=str(spec.pop("tenant", "t")),
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
            total_samples=None if total is None else round(total),
            total_epochs=None,
            deadline_s=None,
            wall_time_limit_s=None,
            gpu_types=(),
            weight=1.0,
            flexibility=0.0,
            submitted_at_s=self.now,
        )
        wanted = replace(wanted, **spec)  # type: ignore[arg-type]  # fields of the spec by name
        self.step(JobSubmitted(spec=wanted))
        return job_id

    def cancel(self, job_id: str) -> None:
        """Cancel a job."""
        self.step(CancelRequested(job_id=job_id, by="ada"))

    def run(self, seconds_s: float, *, dt_s: float = 1.0, until: Callable[[], bool] | None = None) -> None:
        """Let time pass; every node that is not silent reports once per ``dt_s``."""
        end_s = self.now + seconds_s
        while self.now < end_s and not (until is not None and until()):
            self.advance(dt_s)
            self.step(Tick())
            for node in self.gpus:
                self.report(node)

    def job(self, job_id: str) -> Job:
        """Return a job as the head knows it."""
        return self.state.jobs[job_id]

    def step(self, event: Event) -> None:
        """Give the head an event."""
        before = self.state
        self.state, actions = controller.step(before, event, self.now, self.solve)
        controller.check_invariants(self.state)
        if self.check is not None:
            self.check(before, self.state)
        self.decisions += [action.decision for action in actions if isinstance(action, Decided)]
        self.told += [action for action in actions if isinstance(action, Told)]
        for job_id, job in self.state.jobs.items():
            history = self.widths.setdefault(job_id, [0])
            if history[-1] != job.width:
                history.append(job.width)

    def report(self, node: str) -> None:
        """Let a node report and take its orders, unless it is silent."""
        if node in self.silent:
            return
        report = self.make_report(node)
        self.step(AgentReported(report=report))
        offsets = {job.job_id: {c.stream: c.next_offset for c in job.streams} for job in report.jobs}
        acked = max((interval.seq for interval in report.intervals), default=0)
        self.orders[node] = controller.orders(self.state, node, offsets, acked, self.now)
        self._obey(node)

    # Faults

    def kill_worker(self, lease_id: str) -> None:
        """Let a worker die as by a signal; its launcher goes on without it."""
        for launch in self.launches.values():
            if lease_id in launch.workers:
                self._end_worker(launch.workers[lease_id], -9)
                launch.world = tuple(other for other in launch.world if other != lease_id)

    def end_launcher(self, job_id: str, state: LauncherState, exit_code: int | None) -> None:
        """Let a launcher end on its own account."""
        launch = self.launches[job_id]
        launch.state, launch.exit_code = state, exit_code
        for worker in launch.workers.values():
            self._end_worker(worker, exit_code if exit_code is not None else -9)

    # What the nodes do

    def advance(self, dt_s: float) -> None:
        """Train for a while."""
        for gpus in self.gpus.values():
            for gpu in gpus:
                gpu.power_w = IDLE_W
        for launch in self.launches.values():
            self._join(launch)
            self._train(launch, dt_s)
        self.now += dt_s
        for node, gpus in self.gpus.items():
            for gpu in gpus:
                gpu.energy_j += gpu.power_w * dt_s
                self._book(node, gpu)
        for launch in self.launches.values():
            for worker in launch.workers.values():
                if worker.dies_at_s is not None and self.now >= worker.dies_at_s:
                    self._end_worker(worker, 0)

    def _train(self, launch: _Launch, dt_s: float) -> None:
        world = [launch.workers[lease_id] for lease_id in launch.world]
        end_s = self.now + dt_s
        trains_s = min(dt_s, end_s - launch.trains_from_s)
        if not launch.living or not world or trains_s <= 0 or not all(worker.alive for worker in world):
            return
        gpus = [self._gpu(worker) for worker in world]
        rate = launch.script.rate(len(world), min(gpu.limit_w for gpu in gpus))
        rate *= 1 + launch.script.wobble * math.sin(self.now / 5)
        for worker, gpu in zip(world, gpus, strict=True):
            gpu.power_w = max(IDLE_W, min(launch.script.draw_w, gpu.limit_w)) * trains_s / dt_s + (
                IDLE_W * (1 - trains_s / dt_s)
            )
            if worker.world_size != len(world):
                self._say_resumed(launch, worker, len(world), end_s - trains_s)
                worker.world_size, worker.first_s = len(world), end_s - trains_s
            worker.steps += 10 * trains_s
            worker.samples += rate * trains_s / len(world)
            worker.last_s = end_s
        launch.trained += rate * trains_s
        every_s = launch.script.commit_every_s
        if every_s is not None and end_s - launch.committed_s >= every_s:
            self._commit(launch, "interval", end_s)
        total = launch.script.total_samples
        if total is not None and launch.trained >= total:
            launch.state, launch.exit_code = LauncherState.FINISHED, 0
            for worker in launch.workers.values():
                self._end_worker(worker, 0)

    def _commit(self, launch: _Launch, trigger: str, at_s: float) -> None:
        launch.committed_s = at_s
        writer = launch.workers[launch.world[0]] if launch.world else next(iter(launch.workers.values()))
        event = {"kind": "committed", "at_s": at_s, "lease_id": writer.lease_id, "trigger": trigger}
        launch.events[writer.node] = launch.events.get(writer.node, "") + json.dumps(event) + "\n"

    def _say_failed(self, launch: _Launch, worker: _Worker) -> None:
        event = {
            "kind": "standby-failed",
            "at_s": self.now,
            "lease_id": worker.lease_id,
            "generation": launch.granted,
            "exit_code": 1,
            "code": "HW-JOB-099",
            "why": "the script ended with exit code 1",
        }
        launch.events[launch.home] = launch.events.get(launch.home, "") + json.dumps(event) + "\n"

    def _say_resumed(self, launch: _Launch, worker: _Worker, world_size: int, first_s: float) -> None:
        event = {
            "kind": "resumed",
            "at_s": first_s,
            "lease_id": worker.lease_id,
            "world_size": world_size,
            "last_step_end_s": worker.last_s,
            "first_step_end_s": first_s,
        }
        launch.events[worker.node] = launch.events.get(worker.node, "") + json.dumps(event) + "\n"

    def _obey(self, node: str) -> None:
        given = self.orders[node]
        for gpu in self.gpus[node]:
            gpu.limit_w = given.limits_w.get(gpu.uuid, HIGHEST_W) if self.can_set_limit else HIGHEST_W
        for order in given.jobs:
            self.held[node][order.job_id] = order.slots.generation
            if order.forget:
                del self.held[node][order.job_id]
            elif order.launcher_here:
                self._obey_launcher(node, order)
            elif not order.run and order.job_id in self.launches:
                self._stop_workers(self.launches[order.job_id], lambda worker: worker.node == node)

    def _obey_launcher(self, node: str, order: JobOrder) -> None:
        launch = self.launches.setdefault(order.job_id, _Launch(script=self.scripts[order.job_id]))
        if not order.run:
            if launch.living and order.suspend:
                assert launch.script.commit_every_s is not None, "suspended without commits"
                launch.num_suspended += 1
                self._commit(launch, "suspend", self.now)
            self._stop_workers(launch, lambda _: True)
            if launch.living:
                launch.state = LauncherState.STOPPED
            return
        starting = order.attempt > launch.attempt
        if starting:
            launch.attempt, launch.home, launch.state = order.attempt, node, LauncherState.RUNNING
            launch.applied = launch.applied_before = 0
            launch.world, launch.exit_code = (), None
        if not launch.living or order.slots.generation <= launch.granted:
            return
        launch.granted = order.slots.generation
        launch.leases = tuple(lease.lease_id for lease in order.slots.leases)
        for lease in order.slots.leases:
            worker = _Worker(lease.lease_id, lease.node, lease.gpu_uuid)
            worker.ready_at_s = self.now + (0.0 if starting else launch.script.standby_s)
            self._claim(launch, worker)
        self._stop_workers(launch, lambda w: w.lease_id not in launch.leases)
        self._join(launch)

    def _join(self, launch: _Launch) -> None:
        """Publish to Horovod what is granted: withdrawals at once, new workers once all are ready."""
        if not launch.living or launch.granted <= launch.applied:
            return
        starting = not launch.applied
        standbys = [launch.workers[lease_id] for lease_id in launch.leases if lease_id not in launch.world]
        for worker in tuple(standbys) if not starting else ():
            if worker.alive and worker.gpu_uuid in launch.script.bad_gpus and self.now >= worker.ready_at_s:
                self._end_worker(worker, 1)
                if launch.script.tells:
                    # As the real launcher: it goes on without that standby, and says so.
                    self._say_failed(launch, worker)
                    launch.leases = tuple(other for other in launch.leases if other != worker.lease_id)
                    standbys = [other for other in standbys if other is not worker]
        ready = all(worker.alive and self.now >= worker.ready_at_s for worker in standbys)
        stay = tuple(lease_id for lease_id in launch.world if lease_id in launch.leases)
        world = launch.leases if ready or starting else stay
        if ready or starting:
            launch.applied_before, launch.applied = launch.applied, launch.granted
        if world != launch.world:
            launch.world = world
            launch.trains_from_s = self.now + (launch.script.start_s if starting else launch.script.pause_s)

    def _claim(self, launch: _Launch, worker: _Worker) -> None:
        if worker.lease_id in launch.workers:
            return
        others = [
            other
            for some in self.launches.values()
            for other in some.workers.values()
            if other.alive and (other.node, other.gpu_uuid) == (worker.node, worker.gpu_uuid)
        ]
        assert not others, f"two workers on {worker.gpu_uuid}: {others} and {worker}"
        launch.workers[worker.lease_id] = worker

    def _stop_workers(self, launch: _Launch, which: Callable[[_Worker], bool]) -> None:
        for worker in launch.workers.values():
            if worker.alive and which(worker) and worker.dies_at_s is None:
                worker.dies_at_s = self.now + launch.script.stop_s

    @staticmethod
    def _end_worker(worker: _Worker, exit_code: int) -> None:
        if worker.alive:
            worker.alive, worker.exit_code = False, exit_code

    def _gpu(self, worker: _Worker) -> _Gpu:
        return next(gpu for gpu in self.gpus[worker.node] if gpu.uuid == worker.gpu_uuid)

    def _holder(self, node: str, gpu: _Gpu) -> tuple[str | None, int]:
        for job_id, launch in self.launches.items():
            for worker in launch.workers.values():
                if worker.alive and (worker.node, worker.gpu_uuid) == (node, gpu.uuid):
                    return job_id, launch.applied
        return None, 0

    def _book(self, node: str, gpu: _Gpu) -> None:
        """Close the interval of a GPU once a second, which is often enough to be exact here."""
        start_s, start_j, job_id, generation = self._open.get(gpu.uuid, (T0_S, 0.0, None, 0))
        self._seq[node] += 1
        interval = EnergyInterval(
            seq=self._seq[node],
            gpu_uuid=gpu.uuid,
            gpu_type=self.types[node],
            simulated=True,
            start_s=start_s,
            end_s=self.now,
            counter_start_j=start_j,
            counter_end_j=gpu.energy_j,
            energy_j=gpu.energy_j - start_j,
            unmeasured="",
            method=EnergyMethod.COUNTER,
            job_id=job_id,
            lease_id=None,
            generation=generation,
            attributable=True,
        )
        self.intervals.append(BookedInterval(node=node, interval=interval))
        self._open[gpu.uuid] = (self.now, gpu.energy_j, *self._holder(node, gpu))

    def make_report(self, node: str) -> AgentReport:
        """Return what a node would report now."""
        return AgentReport(
            wire_version=WIRE_VERSION,
            node=node,
            agent_id=f"agent-{node}",
            sent_at_s=self.now,
            isolated=True,
            gpus=tuple(self._gpu_report(node, index, gpu) for index, gpu in enumerate(self.gpus[node])),
            jobs=tuple(self._job_report(node, job_id) for job_id in self.held[node]),
            intervals=(),
        )

    def _gpu_report(self, node: str, index: int, gpu: _Gpu) -> GpuReport:
        return GpuReport(
            uuid=gpu.uuid,
            nvml_index=index,
            gpu_type=self.types[node],
            simulated=True,
            energy_j=gpu.energy_j,
            power_w=gpu.power_w,
            limit_w=gpu.limit_w,
            default_limit_w=HIGHEST_W,
            min_limit_w=LOWEST_W,
            max_limit_w=HIGHEST_W,
            can_set_limit=self.can_set_limit,
            lost=gpu.lost,
            sampled_at_s=self.now,
            busy=gpu.busy,
        )

    def _job_report(self, node: str, job_id: str) -> JobReport:
        launch = self.launches.get(job_id)
        known = self.state.jobs[job_id].events.get(node) if job_id in self.state.jobs else None
        offset = known.next_offset if known is not None else 0
        text = launch.events.get(node, "")[offset:] if launch is not None else ""
        chunk = StreamChunk(stream="events", offset=offset, next_offset=offset + len(text), text=text)
        own = [w for w in launch.workers.values() if w.node == node] if launch is not None else []
        return JobReport(
            job_id=job_id,
            generation_published=self.held[node][job_id],
            launcher=self._status(job_id, launch) if launch is not None and launch.home == node else None,
            leases=tuple(self._lease_report(worker, launch) for worker in own),
            streams=(chunk,) if text else (),
        )

    def _status(self, job_id: str, launch: _Launch) -> LauncherStatus:
        return LauncherStatus(
            job_id=job_id,
            attempt=launch.attempt,
            state=launch.state,
            pid=4242,
            generation_applied=launch.applied if self.now >= launch.trains_from_s else launch.applied_before,
            exit_code=launch.exit_code,
            code="",
            message=launch.message,
            updated_at_s=self.now,
        )

    def _lease_report(self, worker: _Worker, launch: _Launch | None) -> LeaseReport:
        countable = launch is not None and launch.script.countable
        return LeaseReport(
            lease_id=worker.lease_id,
            held=worker.alive,
            started=True,
            rank=None if worker.world_size is None else 0,
            world_size=worker.world_size,
            steps=int(worker.steps),
            samples=int(worker.samples) if countable else None,
            epoch_samples=50_000,
            first_step_end_s=worker.first_s,
            last_step_end_s=worker.last_s,
            exit_code=worker.exit_code,
            sampled_at_s=self.now,
        )

    def live_owners(self) -> dict[tuple[str, str], int]:
        """Return how many living workers each slot has."""
        owners: dict[tuple[str, str], int] = {}
        for launch in self.launches.values():
            for worker in launch.workers.values():
                if worker.alive:
                    place = (worker.node, worker.gpu_uuid)
                    owners[place] = owners.get(place, 0) + 1
        return owners


def ended(cluster: VirtualCluster) -> bool:
    """Return whether every job has ended."""
    over = {JobPhase.FINISHED, JobPhase.FAILED, JobPhase.CANCELLED}
    return all(job.phase in over for job in cluster.state.jobs.values())
