# SPDX-License-Identifier: Apache-2.0
"""The launcher's side of standbys: from the grant of new slots to the moment they may be published.

Per grant: start one standby in each new slot, wait until all are ready, have the workers commit durably,
admit. What goes wrong before that costs the training nothing: the standby is ended, its lease
is never used, and the head, which sees how it ended, grants others. Everything happens in the launcher's main
thread but for ``admitted``, which Horovod's discovery asks.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Mapping

from horowatt.elastic.discovery import HostfileDiscovery
from horowatt.elastic.events import append_event
from horowatt.elastic.folder import JobFolder
from horowatt.elastic.memory import available_bytes, resident_bytes
from horowatt.elastic.settings import seconds_of
from horowatt.elastic.standby import PROMISED_RANK_VARIABLE, PROMISED_SIZE_VARIABLE
from horowatt.elastic.verdict import EXIT_NOT_JOINED, last_line
from horowatt.elastic.workers import Worker, Workers
from horowatt.errors import HorowattError, NeedsOperator, RetryLater
from horowatt.files import write_atomic
from horowatt.records import Lease

READY_PATIENCE_S = 300.0
"""How long a standby may take to reach ``hvd.elastic.run``, seconds."""
READY_PATIENCE_VARIABLE = "HOROWATT_STANDBY_PATIENCE_S"
PUBLICATION = "publication"
PERSIST_PATIENCE_S = 2.0
"""How long a publication waits for a durable commit, seconds, besides twice the time that the last one took.
A script that commits less often is interrupted at its next commit anyway, and that one is made durable."""
MAX_PERSIST_PATIENCE_S = 60.0
END_GRACE_S = 2.0
MEMORY_MARGIN = 1.2
"""A standby is expected to need this many times the memory of a worker that trains."""

_log = logging.getLogger(__name__)


class Standbys:
    """The standbys of one world of one job."""

    def __init__(
        self,
        job: JobFolder,
        workers: Workers,
        discovery: HostfileDiscovery,
        environment: Callable[[], Mapping[str, str]],
        why_cold: str,
        node: str,
    ) -> None:
        """Make the keeper of standbys.

        Args:
            environment: Returns what a standby needs besides the environment of every worker.
            why_cold: Why this job cannot have standbys, or an empty string.
        """
        self._job = job
        self._workers = workers
        self._discovery = discovery
        self._environment = environment
        self._why_cold = why_cold
        self._node = node
        self._patience_s = max(seconds_of(READY_PATIENCE_VARIABLE, READY_PATIENCE_S), 1.0)
        self._generation = 0
        self._started: dict[str, Worker] = {}
        self._ready: set[str] = set()
        self._asked_s: float | None = None
        self._persisted = False
        self._write_s = 0.0
        self._admitted: frozenset[str] = frozenset()
        if why_cold:
            append_event(job.events, "cold", why=why_cold)

    def admitted(self) -> frozenset[str]:
        """Return the new leases that may be published."""
        return self._admitted

    def persisted(self, trigger: str, write_s: float) -> None:
        """Note that a commit is on disk.

        Args:
            trigger: Why it was made.
            write_s: How long it took to write, seconds.
        """
        self._write_s = write_s
        if trigger == PUBLICATION:
            self._persisted = True

    def pending(self) -> bool:
        """Return True while new slots are granted and not yet published."""
        return bool(self._new())

    def tend(self, now_s: float) -> None:
        """Do what is due."""
        self._withdraw(now_s)
        new = self._new()
        if not new:
            self._admitted = frozenset()
            return
        generation = self._discovery.published.generation
        if generation != self._generation:
            self._generation = generation
            self._asked_s = None
        for position, lease in enumerate(new.values()):
            if lease.lease_id not in self._started and lease.lease_id not in self._ready:
                self._start(lease, position, len(new), generation)
        self._watch(now_s, generation)
        new = self._new()
        # When one has failed, which width is legal now is the head's to say.
        whole = self._discovery.wanted.keys() == self._discovery.published.leases.keys()
        if not new or not whole or not all(lease_id in self._ready for lease_id in new):
            self._admitted = frozenset()
            return
        if self._asked_s is None:
            self._asked_s = now_s
            self._persisted = self._why_cold != ""
            if not self._persisted:
                for worker in self._workers.training():
                    worker.say({"do": "persist", "trigger": PUBLICATION})
        patience_s = min(PERSIST_PATIENCE_S + 2.0 * self._write_s, MAX_PERSIST_PATIENCE_S)
        if self._persisted or now_s - self._asked_s >= patience_s:
            self._admitted = frozenset(new)

    def _new(self) -> dict[str, Lease]:
        believed = self._discovery.believed.leases
        return {name: lease for name, lease in self._discovery.wanted.items() if name not in believed}

    def _withdraw(self, now_s: float) -> None:
        wanted = self._discovery.wanted
        for worker in self._workers.standbys():
            if worker.lease.lease_id not in wanted:
                self._workers.end(worker, now_s, END_GRACE_S)
        self._ready &= wanted.keys()
        for lease_id in self._started.keys() - wanted.keys():
            del self._started[lease_id]

    def _start(self, lease: Lease, position: int, num_new: int, generation: int) -> None:
        append_event(
            self._job.events,
            "standby-started",
            lease.lease_id,
            cold=self._why_cold != "",
            generation=generation,
        )
        if self._why_cold:
            self._ready.add(lease.lease_id)
            return
        width = len(self._discovery.believed.leases)
        promise = {
            PROMISED_RANK_VARIABLE: str(width + position),
            PROMISED_SIZE_VARIABLE: str(width + num_new),
            "HOROVOD_HOSTNAME": lease.lease_id,
            "HOROVOD_RANK": str(width + position),
            "HOROVOD_SIZE": str(width + num_new),
            "HOROVOD_LOCAL_RANK": "0",
            "HOROVOD_LOCAL_SIZE": "1",
            "HOROVOD_CROSS_RANK": str(width + position),
            "HOROVOD_CROSS_SIZE": str(width + num_new),
        }
        try:
            self._require_memory(lease)
            self._started[lease.lease_id] = self._workers.start_standby(
                lease, {**self._environment(), **promise}
            )
        except InterruptedError:
            return
        except (HorowattError, OSError) as error:
            code = error.code if isinstance(error, HorowattError) else "HW-JOB-003"
            why = error.message if isinstance(error, HorowattError) else str(error)
            self._fail(lease.lease_id, generation, EXIT_NOT_JOINED, code, why)

    def _require_memory(self, lease: Lease) -> None:
        """Refuse a standby that would drive this node out of memory, and the workers that train with it.

        Raises:
            NeedsOperator: ``HW-JOB-017``.
        """
        if lease.node != self._node:
            return
        used = [
            resident_bytes(worker.process.pid) for worker in self._workers.training() if not worker.remote
        ]
        need = MEMORY_MARGIN * max(used, default=0)
        free = available_bytes()
        if free is not None and need > free:
            raise NeedsOperator(
                "HW-JOB-017",
                "there is not enough memory on this node for another worker of this job",
                because=f"a worker uses {need / MEMORY_MARGIN / 2**20:,.0f} MiB, "
                f"and {free / 2**20:,.0f} MiB are free",
                hint="the job goes on with the workers it has",
            )

    def _watch(self, now_s: float, generation: int) -> None:
        for lease_id, worker in list(self._started.items()):
            if not worker.waiting:
                continue
            if not worker.alive:
                self._judge(worker, generation)
            elif worker.ready and lease_id not in self._ready:
                try:
                    self._workers.require_alike(worker)
                except NeedsOperator as error:
                    self._fail(lease_id, generation, EXIT_NOT_JOINED, error.code, error.message)
                    self._workers.end(worker, now_s, END_GRACE_S)
                    continue
                self._ready.add(lease_id)
                append_event(self._job.events, "standby-ready", lease_id, generation=generation)
            elif (
                not worker.ready and now_s - worker.started_s >= self._patience_s and worker.kill_at_s is None
            ):
                late = RetryLater(
                    "HW-JOB-016",
                    f"the new worker {lease_id} did not reach hvd.elastic.run in {self._patience_s:.0f} s",
                    hint="see its log; a longer set-up needs a greater " + READY_PATIENCE_VARIABLE,
                )
                self._fail(lease_id, generation, EXIT_NOT_JOINED, late.code, late.message)
                self._workers.end(worker, now_s, END_GRACE_S)

    def _judge(self, worker: Worker, generation: int) -> None:
        if worker.ended_by_launcher:
            return
        end = self._workers.describe_end(worker, in_last_world=False)
        code, why = "HW-JOB-005", f"the script failed before hvd.elastic.run: {last_line(end.tail)}"
        own = end.own_error()
        if own is not None:
            code, why = own
        elif end.exit_code == EXIT_NOT_JOINED:
            code, why = "HW-JOB-015", "the script ended without entering hvd.elastic.run"
        elif end.exit_code < 0:
            code, why = "HW-JOB-006", f"it was killed by signal {-end.exit_code}"
        self._fail(worker.lease.lease_id, generation, end.exit_code, code, why)

    def _fail(self, lease_id: str, generation: int, exit_code: int, code: str, why: str) -> None:
        """Use the lease no more; the others of its grant may come when the head has granted it anew."""
        _log.warning("standby %s failed: %s %s", lease_id, code, why)
        append_event(
            self._job.events,
            "standby-failed",
            lease_id,
            generation=generation,
            exit_code=exit_code,
            code=code,
            why=why,
        )
        self._discovery.exclude([lease_id])
        if lease_id not in self._started:
            with contextlib.suppress(OSError):
                write_atomic(
                    self._job.lease(lease_id).exit_json, json.dumps({"exit_code": exit_code}).encode()
                )
