# SPDX-License-Identifier: Apache-2.0
"""The core: events in, decisions stored, then visible.

``Core`` holds the state. Every event goes through :func:`decisions.controller.step` under one lock;
what comes out is committed, and only then seen by readers and agents. Readers take the latest
committed state without the lock: it is frozen.

When a commit fails the event did not happen: the caller hears of it, the state stays, and the next
event is tried as if nothing had been. Agents spool what they could not hand over.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from horowatt.errors import HorowattError, InvalidInput, NeedsOperator, NotAllowed, NotFound, RetryLater
from horowatt.records import WIRE_VERSION, AgentOrders, AgentReport
from horowatt_allocator.adapters.config import ServiceConfig
from horowatt_allocator.adapters.log_streams import is_next
from horowatt_allocator.decisions import admission, controller
from horowatt_allocator.ports.clock import Clock
from horowatt_allocator.ports.store import Intake, JobChunk, Store, Submission
from horowatt_allocator.records.cluster import (
    AgentReported,
    CancelRequested,
    Event,
    Inventory,
    JobSubmitted,
    Node,
    State,
    Tenant,
    Tick,
)
from horowatt_allocator.records.jobs import Job, JobRequest
from horowatt_allocator.service.identity import Caller

_LOG = logging.getLogger(__name__)
_MAX_NAMED_IN_ERRORS = 5
_SAY_EVERY_S = 60.0
"""The same failure to store is logged once in this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How the core is.

    Attributes:
        failing: Why the latest thing to store could not be stored; None when it could.
        committed_s: When something was last stored, or there was nothing to store.
    """

    failing: HorowattError | None
    committed_s: float


class Core:
    """The one place where the state changes. Methods may be called from any thread."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        inventory: Inventory,
        config: ServiceConfig,
        *,
        check_invariants: bool = False,
    ) -> None:
        self.store = store
        self.clock = clock
        self.inventory = inventory
        self.config = config
        self._check = check_invariants
        self._nodes = frozenset(node.name for node in inventory.nodes)
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []
        self._said: tuple[str, float] | None = None
        self._state = self._with_tenants(store.load(inventory, config.tenants, config.policy))
        self._health = Health(failing=None, committed_s=clock.now_s())

    @property
    def state(self) -> State:
        """The latest committed state."""
        return self._state

    @property
    def health(self) -> Health:
        """How the latest commit went."""
        return self._health

    def on_commit(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each commit, on the committing thread; it must not block."""
        self._listeners.append(listener)

    def _with_tenants(self, state: State) -> State:
        # A tenant that left the configuration keeps its jobs, but nobody may submit for it any more.
        known = dict(state.tenants)
        for job in state.jobs.values():
            users = () if self.config.tenants else (job.spec.username,)
            known.setdefault(job.spec.tenant, Tenant(name=job.spec.tenant, users=users))
        return replace(state, tenants=known)

    # Events

    def tick(self) -> None:
        """Let time pass."""
        with self._lock:
            self._apply(self._state, Tick())

    def submit(self, request: JobRequest, caller: Caller, submission_key: tuple[str, str] | None) -> Job:
        """Accept a job and return it.

        Args:
            submission_key: Idempotency-Key and digest of the body. The same key with the same body
                returns the job it made before.

        Raises:
            InvalidInput: what admission refuses; ``HW-SUB-020`` for a key that was used for another
                body.
            NotAllowed: ``HW-SUB-021`` for a caller without a user name; what admission refuses.
        """
        if caller.username is None:
            raise NotAllowed(
                "HW-SUB-021",
                f"user {caller.uid} cannot run jobs",
                because="the user data base of this machine does not know this uid",
                hint="ask an operator to make the user known on the head node and the nodes",
            )
        with self._lock:
            if submission_key is not None and (again := self._submitted_before(caller, *submission_key)):
                return again
            state = self._state
            if not self.config.tenants and caller.username not in state.tenants:
                own = Tenant(name=caller.username, users=(caller.username,))
                state = replace(state, tenants={**state.tenants, own.name: own})
            job_id = f"j{self.store.prefix()}-{self.store.num_jobs_ever() + 1:04d}"
            spec = admission.admit(
                request,
                state,
                job_id=job_id,
                uid=caller.uid,
                gid=caller.gid,
                username=caller.username,
                now=self.clock.now_s(),
            )
            submission = None
            if submission_key is not None:
                key, digest = submission_key
                submission = Submission(uid=caller.uid, key=key, digest=digest, job_id=job_id)
            self._apply(state, JobSubmitted(spec=spec), submission=submission)
            return self._state.jobs[job_id]

    def cancel(self, job_id: str, caller: Caller) -> Job:
        """Have a job end and return it; repeating it changes nothing."""
        with self._lock:
            self._apply(self._state, CancelRequested(job_id=job_id, by=caller.shown_name))
            return self._state.jobs[job_id]

    def report(self, node: str, report: AgentReport) -> AgentOrders:
        """Take over what an agent says and return its orders.

        Raises:
            InvalidInput: ``HW-NODE-001`` node unknown or another than in the report, ``002`` the
                agent is newer, ``004`` its identity belongs to another node.
            RetryLater: ``HW-NODE-003`` another agent of this node is alive; ``HW-DISK-00x`` the
                report could not be stored and must be kept by the agent.
        """
        if report.wire_version > WIRE_VERSION:
            raise InvalidInput(
                "HW-NODE-002",
                f"the agent of {node} speaks a newer protocol than this service",
                because=f"it speaks {report.wire_version}, the service {WIRE_VERSION}",
                hint="upgrade the service before the agents",
            )
        if node not in self._nodes or report.node != node:
            raise InvalidInput(
                "HW-NODE-001",
                f"there is no node {node!r} to report for",
                because="the inventory does not name it"
                if node not in self._nodes
                else f"the report is of node {report.node!r}",
                hint=f"add it to the inventory and restart the service; known: {self._some_nodes()}",
            )
        with self._lock:
            now_s = self.clock.now_s()
            self._refuse_second_agent(self._state.nodes[node], report, now_s)
            try:
                self._apply(self._state, AgentReported(report=report), intake=self._intake(report))
            except NeedsOperator as error:
                raise RetryLater(
                    error.code, error.message, because=error.because, hint=error.hint, fields=error.fields
                ) from error
            return controller.orders(
                self._state,
                node,
                {job.job_id: self.store.offsets(job.job_id, node) for job in report.jobs},
                self.store.acked_seq(report.agent_id),
                now_s,
            )

    def _apply(
        self,
        state: State,
        event: Event,
        *,
        intake: Intake | None = None,
        submission: Submission | None = None,
    ) -> None:
        """Decide, store, and only then let it be seen. The caller holds the lock."""
        now_s = self.clock.now_s()
        after, actions = controller.step(state, event, now_s)
        if self._check:
            controller.check_invariants(after)
        try:
            stored = self.store.commit(
                after, now_s=now_s, actions=actions, intake=intake, submission=submission
            )
        except HorowattError as error:
            self._say_failing(error, now_s)
            raise
        self._state = after
        if stored and self._health.failing is not None:
            self._health = replace(self._health, failing=None)
            _LOG.info("something could be stored again")
        self._health = replace(self._health, committed_s=now_s)
        for listener in self._listeners:
            listener()

    def _say_failing(self, error: HorowattError, now_s: float) -> None:
        # On a nearly full disk small commits may go well between large ones that do not.
        known = self._said is not None and self._said[0] == error.code
        if not known or (self._said is not None and now_s - self._said[1] > _SAY_EVERY_S):
            _LOG.error("nothing can be stored for now: %s", " ".join(str(error).split()))
            self._said = (error.code, now_s)
        self._health = replace(self._health, failing=error)

    def _submitted_before(self, caller: Caller, key: str, digest: str) -> Job | None:
        before = self.store.submission(caller.uid, key)
        if before is None:
            return None
        if before.digest != digest:
            raise InvalidInput(
                "HW-SUB-020",
                "this Idempotency-Key was used for another job",
                because=f"it made job {before.job_id}",
                hint="use a new key for a new job; keys are remembered for 7 days",
                fields={"idempotency-key": key},
            )
        job = self._state.jobs.get(before.job_id)
        if job is None:
            raise NotFound(
                "HW-SUB-022",
                f"the job {before.job_id} of this Idempotency-Key is no longer kept",
                hint="use a new key to submit it again",
            )
        return job

    def _refuse_second_agent(self, node: Node, report: AgentReport, now_s: float) -> None:
        known_node = self.store.agent_node(report.agent_id)
        if known_node not in {None, report.node} and known_node in self._nodes:
            raise InvalidInput(
                "HW-NODE-004",
                f"the agent of {report.node} has the identity of the agent of {known_node}",
                because="its run directory was copied from there",
                hint=f"stop the agent of {report.node}, empty its run directory and start it again",
            )
        if node.agent_id in {None, report.agent_id} or node.last_seen_s is None:
            return
        silent_s = now_s - node.last_seen_s
        if silent_s < self._state.policy.agent_timeout_s:
            raise RetryLater(
                "HW-NODE-003",
                f"another agent already reports for {report.node}",
                because=f"it did so {silent_s:.0f} s ago",
                hint="run one agent per node; after "
                f"{self._state.policy.agent_timeout_s:.0f} s of silence this one takes over",
            )

    def _intake(self, report: AgentReport) -> Intake:
        """Return what is new in a report. The decisions get all of it: they know what they have seen."""
        acked = self.store.acked_seq(report.agent_id)
        intervals = tuple(item for item in report.intervals if item.seq > acked)
        if intervals and acked and intervals[0].seq > acked + 1:
            _LOG.warning(
                "node %s: intervals %d to %d never came", report.node, acked + 1, intervals[0].seq - 1
            )
        chunks = []
        for job in report.jobs:
            held = self.store.offsets(job.job_id, report.node)
            chunks += [
                JobChunk(job_id=job.job_id, chunk=chunk)
                for chunk in job.streams
                if job.job_id in self._state.jobs and is_next(chunk, held.get(chunk.stream, 0))
            ]
        return Intake(agent_id=report.agent_id, node=report.node, intervals=intervals, chunks=tuple(chunks))

    def _some_nodes(self) -> str:
        names = sorted(self._nodes)
        return ", ".join(names[:_MAX_NAMED_IN_ERRORS]) + (" ..." if len(names) > _MAX_NAMED_IN_ERRORS else "")


class Ticker:
    """Lets time pass for a core, about once a second, on a thread of its own."""

    def __init__(self, core: Core, every_s: float = 1.0) -> None:
        self._core = core
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, after the tick under way."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self._core.tick()
            except HorowattError:
                continue  # the core has said it; the next tick tries again
            except Exception:  # noqa: BLE001 - time must go on whatever one event did
                _LOG.exception("a tick failed; the state is as it was before")
