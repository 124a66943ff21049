# SPDX-License-Identifier: Apache-2.0
"""The launcher of one job: ``python -m horowatt.elastic.launcher JOB_DIR --attempt N``.

Holds Horovod's own elastic driver in this process, feeds it the job's hostfile of leases, starts the
workers as processes of the tenant, and says in ``launcher.json`` and ``events.jsonl`` what goes on. It
ends with a verdict, always: when no worker is left and Horovod does not conclude, the launcher does.

Horovod's driver runs in threads: one discovers, one waits for each worker, one answers each request of a
worker. The main thread only watches, five times a second, and is the only one that ends workers.
"""

import argparse
import fcntl
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horowatt.elastic import horovod_fixes, rendezvous
from horowatt.elastic.command import parse_python
from horowatt.elastic.control import Message
from horowatt.elastic.counters import read_counters
from horowatt.elastic.discovery import HostfileDiscovery, Published
from horowatt.elastic.events import append_event
from horowatt.elastic.folder import JobFolder
from horowatt.elastic.network import LOOPBACK, address_towards, interface_of, is_loopback, resolve
from horowatt.elastic.settings import seconds_of
from horowatt.elastic.standby import RENDEZVOUS_VARIABLE
from horowatt.elastic.standbys import Standbys
from horowatt.elastic.verdict import Verdict, judge, last_traceback
from horowatt.elastic.workers import CONNECTION_LOST, Worker, Workers, prepare_launch
from horowatt.errors import HorowattError, InvalidInput, RetryLater
from horowatt.files import write_atomic
from horowatt.records import LauncherState, LauncherStatus, LaunchSpec, Lease
from horowatt.wire import decode, encode

TICK_S = 0.2
STOP_GRACE_S = 10.0
"""From SIGTERM to SIGKILL for the workers of a job that is stopped, seconds."""
RELEASE_GRACE_S = 60.0
"""How long a worker whose lease was taken back may take to leave by itself, seconds."""
RELEASE_GRACE_VARIABLE = "HOROWATT_RELEASE_GRACE_S"
NO_WORKER_PATIENCE_S = 30.0
"""How long Horovod may take to conclude after the last worker ended, seconds."""
JOIN_PATIENCE_S = 10.0
"""How long after a worker ended before it joined the others are given to end likewise, seconds."""
JOIN_DEADLINE_S = 30.0
"""How long workers that were ready may take to join the others, seconds."""
JOIN_DEADLINE_VARIABLE = "HOROWATT_JOIN_DEADLINE_S"
CUT_OFF_PATIENCE_S = 5.0
"""How long the others may take to notice that a worker's node is gone, seconds."""
RESTART_GRACE_S = 2.0
MAX_RESTARTS = 3
RESTART_WINDOW_S = 600.0
"""In so many seconds the launcher starts its world again at most ``MAX_RESTARTS`` times."""
SUSPEND_PATIENCE_S = 90.0
"""How long a job that is suspended may train on until its commit is on disk, seconds."""
SUSPEND = "suspend"
KILL_PATIENCE_S = 30.0
"""How long a worker may take to die of SIGKILL: one stuck in a driver may never do, seconds."""
LOCK_PATIENCE_S = 2.0
"""An agent that asks whether the lock is held has it for an instant itself."""
DISCONNECT_S = 20.0
EXIT_REFUSED = 125

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Why a world cannot go on; whether another one can, and without which leases."""

    why: str
    leases: frozenset[str] = frozenset()
    restart: bool = False


class Launcher:
    """One start of one job."""

    def __init__(self, job: JobFolder, spec: LaunchSpec, attempt: int, node: str | None) -> None:
        self._job = job
        self._spec = spec
        self._attempt = attempt
        self._node = node
        self._stop = threading.Event()
        self._status_lock = threading.Lock()
        self._state = LauncherState.STARTING
        self._generation_applied = 0
        self._assigned: tuple[str, ...] = ()
        self._assigned_s = 0.0
        self._release_grace_s = seconds_of(RELEASE_GRACE_VARIABLE, RELEASE_GRACE_S)
        self._withdrawn_since_s: dict[str, float] = {}
        self._alone_since_s: float | None = None
        self._workers: Workers | None = None
        self._discovery = HostfileDiscovery(
            job, spec.min_width, self._living, self._admitted, self._on_believed
        )
        self._standbys: Standbys | None = None
        self._wake = threading.Event()
        self._persisted = threading.Event()
        self._suspending = False
        self._generation_granted = 0
        self._newcomers: frozenset[str] = frozenset()
        self._first_assignment = True
        self._trained_before = any(job.commits.glob("*")) if job.commits.is_dir() else False
        self._restarts_s: list[float] = []
        self._why_cold = why_cold(spec)
        self._joined_s = 0.0
        self._join_deadline_s = seconds_of(JOIN_DEADLINE_VARIABLE, JOIN_DEADLINE_S)
        self._driver: Any = None
        self._horovod_env: dict[str, str] = {}

    def stop(self) -> None:
        """Ask for an orderly stop; returns at once."""
        self._stop.set()
        self._wake.set()

    def suspend(self) -> None:
        """Ask for a stop after a durable commit, from which the job can go on later; returns at once."""
        self._suspending = True
        self.stop()

    def run(self) -> Verdict:
        """Run the job to its end, whatever that is, and return the verdict; leaves no worker behind."""
        self._report()
        gave_up = ""
        try:
            gave_up = self._run_horovod()
        except HorowattError as error:
            again = isinstance(error, RetryLater) or error.code.startswith("HW-DISK")
            state = LauncherState.LOST if again else LauncherState.FAILED
            verdict = Verdict(state=state, exit_code=None, code=error.code, message=_one_line(error))
        except Exception as error:  # noqa: BLE001 - whatever happens, there is a verdict and no worker left
            _log.exception("the launcher failed")
            verdict = Verdict(
                state=LauncherState.LOST,
                exit_code=None,
                code="HW-JOB-006",
                message=f"the launcher failed: {type(error).__name__}: {error}",
            )
        else:
            if self._suspending:
                self._persist_all()
            self._end_all(STOP_GRACE_S)
            verdict = self._judge(gave_up)
        self._end_all(STOP_GRACE_S)
        self._disconnect()
        if self._stop.is_set() and verdict.state is not LauncherState.FINISHED:
            verdict = Verdict(state=LauncherState.STOPPED, exit_code=None, message="stopped as ordered")
        if verdict.blamed is not None:
            lines = last_traceback(verdict.blamed.tail)
            append_event(self._job.events, "failed", verdict.blamed.lease_id, traceback="\n".join(lines))
        self._report(verdict)
        return verdict

    # --------------------------------------------------------------------------------- Horovod

    def _run_horovod(self) -> str:
        """Run until Horovod is done or must be given up; return why it was given up, if it was."""
        horovod_fixes.prepare_driver_module()
        launch = prepare_launch(self._spec)
        while True:
            self._workers = Workers(
                self._job, launch, self._spec, self._own_node(), self._on_exit, self._on_message
            )
            trouble = self._run_world()
            if trouble is None:
                return ""
            if not trouble.restart or not self._may_restart(trouble):
                return trouble.why
            self._restart(trouble)

    def _run_world(self) -> "_Trouble | None":
        """Run one world from its first start to its end, through any number of resizes."""
        assert self._workers is not None  # noqa: S101 - set by the only caller
        width = self._wait_for_slots()
        if not width:
            return None
        address = self._own_address()
        token = rendezvous.new_token()
        ports = self._ports()
        server = rendezvous.make_server(address, token, ports)
        self._driver = horovod_fixes.make_driver(
            server,
            self._discovery,
            min_width=self._spec.min_width,
            max_width=self._spec.max_width,
            on_assignment=self._on_assignment,
        )
        from horovod.runner.elastic.rendezvous import create_rendezvous_handler

        port = server.start(create_rendezvous_handler(self._driver))
        always = {
            rendezvous.TOKEN_VARIABLE: token,
            **({rendezvous.PORTS_VARIABLE: f"{ports[0]}-{ports[-1]}"} if ports else {}),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": self._spec.environment.get(
                "HOROVOD_GLOO_TIMEOUT_SECONDS", str(horovod_fixes.GLOO_TIMEOUT_S)
            ),
        }
        self._horovod_env = {
            **always,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        }
        self._standbys = Standbys(
            self._job,
            self._workers,
            self._discovery,
            lambda: {**always, RENDEZVOUS_VARIABLE: f"{address}:{port}"},
            self._why_cold,
            self._own_node(),
        )
        _log.info("rendezvous on %s port %d, starting %d workers", address, port, width)
        # Its first poll brings all published slots, which may be fewer by now than a moment ago.
        self._driver.start(max(self._spec.min_width, 1), self._run_worker)
        self._state = LauncherState.RUNNING
        self._report()
        return self._watch()

    def _ports(self) -> range | None:
        text = self._spec.environment.get(rendezvous.PORTS_VARIABLE, "")
        return rendezvous.parse_ports(text or os.environ.get(rendezvous.PORTS_VARIABLE, ""))

    def _may_restart(self, trouble: "_Trouble") -> bool:
        if len(self._discovery.wanted.keys() - trouble.leases) < max(self._spec.min_width, 1):
            # The head knows of other slots; waiting here for them would hold those that are left.
            return False
        now_s = time.monotonic()
        self._restarts_s = [at_s for at_s in self._restarts_s if now_s - at_s < RESTART_WINDOW_S]
        return len(self._restarts_s) < MAX_RESTARTS

    def _restart(self, trouble: "_Trouble") -> None:
        """End the world, and have the next one go on from the last durable commit."""
        assert self._workers is not None  # noqa: S101
        self._restarts_s.append(time.monotonic())
        _log.warning("starting the world again: %s", trouble.why)
        append_event(
            self._job.events,
            "world-restarted",
            generation=self._discovery.believed.generation,
            why=trouble.why,
            restarts=len(self._restarts_s),
        )
        self._end_all(RESTART_GRACE_S)
        horovod_fixes.release_waiting(self._driver)
        self._disconnect()
        self._trained_before = self._trained_before or any(
            self._workers.progress(worker)[0] for worker in self._workers.all()
        )
        self._discovery.exclude(trouble.leases)
        self._discovery.start_over()
        self._standbys = None
        self._driver = None
        self._assigned = ()
        self._first_assignment = True
        self._alone_since_s = None

    def _own_node(self) -> str:
        """Return this node's name; without ``--node`` all leases must be on one."""
        if self._node is not None:
            return self._node
        self._discovery.find_available_hosts_and_slots()
        nodes = {lease.node for lease in self._discovery.published.leases.values()}
        if len(nodes) != 1:
            raise InvalidInput(
                "HW-JOB-012",
                "the launcher does not know which node it is on",
                because=f"the job's slots are on {len(nodes)} nodes",
                hint="start it with --node NAME, the node's name in the inventory",
            )
        return nodes.pop()

    def _wait_for_slots(self) -> int:
        """Return the published width once it reaches the job's minimum, or 0 when the job is stopped."""
        while not self._stop.is_set():
            hosts = self._discovery.find_available_hosts_and_slots()
            if len(hosts) >= max(self._spec.min_width, 1):
                return len(hosts)
            self._stop.wait(TICK_S)
        return 0

    def _own_address(self) -> str:
        """Return the address of this node that the job's other hosts reach.

        Never another address than the one the workers use: what is not offered cannot be attacked.
        """
        leases = list(self._discovery.published.leases.values())
        node = self._own_node()
        own = next((lease.address for lease in leases if lease.node == node), None)
        if own is not None and is_loopback(own):
            # Also for a real host name that /etc/hosts maps to loopback: nobody else could reach that.
            others = [lease.address for lease in leases if lease.node != node]
            return (address_towards(others[0]) if others else None) or LOOPBACK
        if own is not None and interface_of(own) is not None:
            return resolve(own) or LOOPBACK
        address = address_towards(leases[0].address)
        if address is None:
            raise InvalidInput(
                "HW-JOB-013",
                f"this node has no address from which {leases[0].address!r} can be reached",
                hint="check the node addresses in the inventory, and name resolution on this node",
            )
        return address

    def _on_assignment(self, hosts: tuple[str, ...]) -> None:
        """Note what Horovod's driver assigned, before it starts the new workers."""
        generation = self._discovery.generation_of(hosts)
        self._newcomers = frozenset(hosts) - frozenset(self._assigned)
        self._first_assignment = not self._assigned
        self._assigned, self._assigned_s = hosts, time.time()
        _log.info("generation %d: %s", generation, " ".join(hosts))
        append_event(self._job.events, "assigned", generation=generation, width=len(hosts))

    def _on_believed(self, published: Published) -> None:
        append_event(
            self._job.events,
            "published",
            generation=published.generation,
            width=len(published.leases),
        )

    def _on_message(self, _worker: Worker, message: Message) -> None:
        written = message.get("written")
        if isinstance(written, dict):
            write_s = written.get("write_s")
            if self._standbys is not None:
                self._standbys.persisted(
                    trigger=str(written.get("trigger")),
                    write_s=write_s if isinstance(write_s, float) else 0.0,
                )
            if written.get("trigger") == SUSPEND:
                self._persisted.set()
        self._wake.set()

    def _run_worker(self, slot_info: Any, events: Sequence[Any]) -> tuple[int, float]:
        """Run one worker for Horovod's driver; must not raise, or the driver never hears of its end."""
        try:
            return self._run_lease(slot_info, events), time.time()
        except BaseException as error:  # noqa: BLE001 - see above
            _log.error("worker %s cannot be run: %s", slot_info.hostname, error)
            append_event(self._job.events, "worker-exit", slot_info.hostname, exit_code=EXIT_REFUSED)
            return EXIT_REFUSED, time.time()

    def _run_lease(self, slot_info: Any, events: Sequence[Any]) -> int:
        lease = self._lease(slot_info.hostname)
        if lease is None or self._workers is None:
            _log.warning("lease %s was taken back before its worker started", slot_info.hostname)
            return EXIT_REFUSED
        place = {
            "HOROVOD_HOSTNAME": slot_info.hostname,
            "HOROVOD_RANK": str(slot_info.rank),
            "HOROVOD_SIZE": str(slot_info.size),
            "HOROVOD_LOCAL_RANK": str(slot_info.local_rank),
            "HOROVOD_LOCAL_SIZE": str(slot_info.local_size),
            "HOROVOD_CROSS_RANK": str(slot_info.cross_rank),
            "HOROVOD_CROSS_SIZE": str(slot_info.cross_size),
        }
        return self._workers.run(lease, {**self._horovod_env, **place}, events)

    def _lease(self, lease_id: str) -> Lease | None:
        published = self._discovery.published.leases
        return published.get(lease_id)

    def _on_exit(self, worker: Worker) -> None:
        self._wake.set()
        _log.info("worker %s ended with exit code %s", worker.lease.lease_id, worker.exit_code)
        append_event(self._job.events, "worker-exit", worker.lease.lease_id, exit_code=worker.exit_code)

    # -------------------------------------------------------------------------------- watching

    def _watch(self) -> "_Trouble | None":
        assert self._workers is not None  # noqa: S101 - set by the only caller
        assert self._standbys is not None  # noqa: S101
        while not self._stop.is_set():
            self._wake.clear()
            now_s = time.time()
            self._workers.watch(now_s)
            self._enforce_release(now_s)
            self._note_granted()
            self._standbys.tend(now_s)
            self._require_alike()
            self._note_applied()
            if self._driver.finished():
                return None
            trouble = self._trouble(now_s)
            if trouble is not None:
                _log.error("giving this world up: %s", trouble.why)
                return trouble
            self._wake.wait(TICK_S)
        return None

    def _require_alike(self) -> None:
        """Refuse workers of different versions as long as none of them has trained."""
        assert self._workers is not None  # noqa: S101
        if self._generation_applied:
            return
        for worker in self._workers.training():
            self._workers.require_alike(worker)

    def _note_granted(self) -> None:
        published = self._discovery.published
        if published.generation > self._generation_granted:
            self._generation_granted = published.generation
            append_event(
                self._job.events,
                "granted",
                generation=published.generation,
                width=len(published.leases),
            )

    def _enforce_release(self, now_s: float) -> None:
        """End workers that still hold a lease long after it was taken back."""
        assert self._workers is not None  # noqa: S101
        published = self._discovery.published.leases
        if not published:
            return
        for worker in self._workers.training():
            lease_id = worker.lease.lease_id
            if lease_id in published:
                self._withdrawn_since_s.pop(lease_id, None)
            elif now_s - self._withdrawn_since_s.setdefault(lease_id, now_s) >= self._release_grace_s:
                if worker.kill_at_s is None:
                    _log.warning("worker %s does not leave; ending it", lease_id)
                self._workers.end(worker, now_s, STOP_GRACE_S)

    def _note_applied(self) -> None:
        """Report the generation that workers train at, once those that can be seen have entered it."""
        generation = self._discovery.generation_of(self._assigned) if self._assigned else 0
        if generation == self._generation_applied or self._workers is None:
            return
        assigned = [worker for worker in self._workers.all() if worker.lease.lease_id in self._assigned]
        if not all(worker.remote or self._has_entered(worker) for worker in assigned):
            return
        self._generation_applied = generation
        self._report()

    def _trouble(self, now_s: float) -> "_Trouble | None":
        """Return why Horovod will not get out of this by itself, if so."""
        assert self._workers is not None  # noqa: S101
        if not self._workers.training():
            if self._alone_since_s is None:
                self._alone_since_s = now_s
            if now_s - self._alone_since_s >= NO_WORKER_PATIENCE_S:
                return _Trouble("no worker lives and Horovod did not conclude")
            return None
        self._alone_since_s = None
        return self._ended_early(now_s) or self._late(now_s) or self._cut_off(now_s)

    def _ended_early(self, now_s: float) -> "_Trouble | None":
        """Return a worker that ended while the others wait for it to join."""
        assert self._workers is not None  # noqa: S101
        for worker in self._workers.all():
            lease_id = worker.lease.lease_id
            if worker.alive or worker.ended_by_launcher or lease_id not in self._assigned:
                continue
            steps, measurable, joined = self._workers.progress(worker)
            if not measurable or joined or steps:
                continue
            # At the first start all may fail alike, and the script's own error is the verdict then.
            patience_s = JOIN_PATIENCE_S if self._first_assignment else TICK_S
            if now_s - worker.ended_s >= patience_s:
                return _Trouble(
                    f"worker {lease_id} ended with exit code {worker.exit_code} "
                    "before it joined the others, which wait for it",
                    self._newcomers & {lease_id},
                    restart=not self._first_assignment,
                )
        return None

    def _late(self, now_s: float) -> "_Trouble | None":
        """Return newcomers that were ready and yet did not join in time."""
        assert self._workers is not None  # noqa: S101
        assigned_s = self._assigned_s
        if self._first_assignment or not self._newcomers or self._why_cold or self._joined_s == assigned_s:
            return None
        if now_s - assigned_s < self._join_deadline_s:
            return None
        assigned = [worker for worker in self._workers.training() if worker.lease.lease_id in self._assigned]
        if all(worker.remote or self._has_entered(worker) for worker in assigned):
            # Seen once is enough: their counters need not be read five times a second from now on.
            self._joined_s = assigned_s
            return None
        return _Trouble(
            f"the new workers did not join in {self._join_deadline_s:.0f} s", self._newcomers, restart=True
        )

    def _cut_off(self, now_s: float) -> "_Trouble | None":
        """Return workers whose node is gone while the others wait for an answer from it."""
        assert self._workers is not None  # noqa: S101
        lost = [
            worker
            for worker in self._workers.all()
            if worker.lease.lease_id in self._assigned
            and worker.exit_code == CONNECTION_LOST
            and not worker.ended_by_launcher
            and now_s - worker.ended_s >= CUT_OFF_PATIENCE_S
        ]
        if not lost:
            return None
        latest_s = max(worker.ended_s for worker in lost)
        here = [worker for worker in self._workers.training() if not worker.remote]
        counters = [read_counters(worker.folder.counters, os.getuid()) for worker in here]
        seen = [found for found in counters if found is not None and found.measurable]
        if not seen or any((found.last_step_end_s or 0.0) > latest_s for found in seen):
            return None
        names = frozenset(worker.lease.lease_id for worker in lost)
        return _Trouble(f"the node of worker {min(names)} does not answer", names, restart=True)

    def _has_entered(self, worker: Worker) -> bool:
        counters = read_counters(worker.folder.counters, os.getuid())
        if counters is None:
            return False
        return not counters.measurable or (counters.world_entered_s or 0.0) >= self._assigned_s

    def _living(self) -> frozenset[str]:
        workers = self._workers
        return frozenset(worker.lease.lease_id for worker in workers.training()) if workers else frozenset()

    def _admitted(self) -> frozenset[str]:
        standbys = self._standbys
        return standbys.admitted() if standbys is not None else frozenset()

    # ------------------------------------------------------------------------------ the end

    def _persist_all(self) -> None:
        """Have a durable commit made, and wait for it while the workers train on towards it."""
        if self._workers is None:
            return
        self._persisted.clear()
        asked = [worker.say({"do": "persist", "trigger": SUSPEND}) for worker in self._workers.training()]
        if any(asked) and not self._persisted.wait(SUSPEND_PATIENCE_S):
            _log.warning("no commit in %.0f s: stopping without", SUSPEND_PATIENCE_S)

    def _end_all(self, grace_s: float) -> None:
        """End every worker and wait until they have ended, or until not even SIGKILL helped."""
        if self._workers is None:
            return
        self._workers.close()
        for worker in self._workers.alive():
            self._workers.end(worker, time.time(), grace_s)
        deadline_s = time.monotonic() + grace_s + KILL_PATIENCE_S
        while self._workers.alive() and time.monotonic() < deadline_s:
            self._workers.watch(time.time())
            time.sleep(TICK_S / 4)
        for worker in self._workers.alive():
            _log.error("worker %s cannot be ended; its lease stays held", worker.lease.lease_id)

    def _judge(self, gave_up: str) -> Verdict:
        assert self._workers is not None  # noqa: S101
        assigned = self._assigned
        return judge(
            [
                self._workers.describe_end(worker, in_last_world=worker.lease.lease_id in assigned)
                for worker in self._workers.all()
            ],
            gave_up,
            trained_before=self._trained_before,
        )

    def _disconnect(self) -> None:
        """Stop Horovod's threads, for a while; they are daemons, so the process ends in any case."""
        if self._driver is None or self._driver.finished():
            return
        stopper = threading.Thread(target=self._driver.stop, daemon=True)
        stopper.start()
        stopper.join(DISCONNECT_S)

    def _report(self, verdict: Verdict | None = None) -> None:
        with self._status_lock:
            status = LauncherStatus(
                job_id=self._spec.job_id,
                attempt=self._attempt,
                state=verdict.state if verdict else self._state,
                pid=os.getpid(),
                generation_applied=self._generation_applied,
                exit_code=verdict.exit_code if verdict else None,
                code=verdict.code if verdict else "",
                message=verdict.message if verdict else "",
                updated_at_s=time.time(),
            )
            try:
                write_atomic(self._job.launcher_json, encode(status))
            except (HorowattError, OSError):
                # The agent finds the state out by itself when this process has ended.
                _log.exception("the launcher's state cannot be written")


def _one_line(error: HorowattError) -> str:
    return f"{error.message}: {error.because}" if error.because else error.message


def why_cold(spec: LaunchSpec) -> str:
    """Return why new workers of this job must start cold, or an empty string when they need not."""
    if parse_python(spec.command) is None:
        return f"the command {spec.command[0]!r} is neither 'python SCRIPT' nor 'python -m MODULE'"
    return ""


def lock_job(job: JobFolder) -> int:
    """Take the launcher's lock for the life of this process; no worker inherits it.

    Raises:
        RetryLater: ``HW-JOB-008`` when another launcher of the job runs.
    """
    descriptor = os.open(job.launcher_lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    deadline_s = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < deadline_s:
                time.sleep(TICK_S / 4)
                continue
            os.close(descriptor)
            raise RetryLater(
                "HW-JOB-008",
                "another launcher of this job runs",
                because=f"{job.launcher_lock} is locked",
                hint="wait for it to end, or stop the job",
            ) from error
        return descriptor


def _log_to(path: Path) -> None:
    """Send this process's output to the job's launcher log, Horovod's messages included."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    # Horovod logs each request of each worker at INFO to the root logger; ours are few and worth reading.
    for name in ("horowatt", __name__):
        logging.getLogger(name).setLevel(logging.INFO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; return 0 when the job finished, 1 when it did not, 125 when it was not tried."""
    parser = argparse.ArgumentParser(prog="python -m horowatt.elastic.launcher")
    parser.add_argument("job_dir", type=Path, help="the job's folder on this node")
    parser.add_argument("--attempt", type=int, default=1, help="which start of the job this is")
    parser.add_argument("--node", help="this node's name in the inventory")
    options = parser.parse_args(argv)
    job = JobFolder(options.job_dir.absolute())
    try:
        spec = decode(job.job_json.read_bytes(), LaunchSpec)
        lock = lock_job(job)
    except HorowattError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_REFUSED
    except OSError as error:
        sys.stderr.write(
            f"{InvalidInput('HW-JOB-010', f'{job.root} is not a job folder', because=str(error))}\n"
        )
        return EXIT_REFUSED
    _log_to(job.launcher_log)
    launcher = Launcher(job, spec, options.attempt, options.node)
    # In a thread, because a handler runs in the main thread, which may hold the lock of what is to be set.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=launcher.stop).start())
    signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=launcher.suspend).start())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    verdict = launcher.run()
    _log.info("verdict: %s %s %s", verdict.state, verdict.code, verdict.message)
    logging.shutdown()
    os.close(lock)
    # Handlers of requests that will never be answered are left to the kernel.
    os._exit(0 if verdict.state is LauncherState.FINISHED else 1)


if __name__ == "__main__":
    sys.exit(main())
