# SPDX-License-Identifier: Apache-2.0
"""The agent's loop: meter, keep jobs, report, follow orders; about once a second.

Invariants:
    * Nothing that happens to the head stops the loop: calls to it run in a thread of their own.
    * A GPU changes hands in the ledger at the look that follows the change, with one reading.
    * Jobs outlive the agent, and so do the power limits' previous values (in a journal).

Known limitations: NVML is called in this process, so a driver that hangs, hangs the agent; GPUs
without an energy counter are sampled at the loop's pace.
"""

import logging
import os
import signal
import threading
import time

from horowatt.agent.boards import Boards
from horowatt.agent.book import JobBook
from horowatt.agent.clock import SteadyClock
from horowatt.agent.config import AgentConfig
from horowatt.agent.gates import Gates
from horowatt.agent.holders import find_holders
from horowatt.agent.jobs import JobKeeper
from horowatt.agent.limits import LimitKeeper
from horowatt.agent.node_job import GRACE_S, Surroundings
from horowatt.agent.notes import Notes, log_to_stderr, say
from horowatt.agent.reporter import Answer, Reporter
from horowatt.agent.rundir import lock_run_dir, passed_environment, prepare_run_dir, simulate_gpus
from horowatt.agent.spool import Spool
from horowatt.agent.state import StateFile
from horowatt.client import ServiceClient
from horowatt.errors import HorowattError, RetryLater
from horowatt.records import WIRE_VERSION, AgentOrders, AgentReport

__all__ = ["Agent", "AgentConfig", "run"]

_RETRY_LIMIT_S = 5.0
"""Longest pause between calls to a head that does not answer, seconds."""
_PAUSE_LIMITS_S = (0.2, 60.0)
"""Shortest and longest pause between reports that the head may ask for, seconds."""
_LAST_CALL_S = 5.0
"""How long the last report at exit may take, seconds."""
_ENDING_TICK_S = 0.2


def run(config: AgentConfig) -> int:
    """Run the agent until SIGTERM, SIGINT or SIGHUP; return 0.

    Raises:
        HorowattError: when it cannot start: ``HW-AGENT-001`` (another agent runs), ``HW-AGENT-002``
            (run directory), ``HW-AGENT-007`` and ``-008`` (state file), ``HW-SIM-*``, ``HW-NVML-10*``.
    """
    log_to_stderr()
    # Workers of all users must get through to their folders and to simulated GPUs, whatever umask the
    # agent was started with; what is private is made so by its own mode.
    os.umask(0o022)
    run_dir = config.run_dir.absolute()
    prepare_run_dir(run_dir)
    lock = lock_run_dir(run_dir)
    try:
        simulate_gpus(config, run_dir)
        wake, ended = threading.Event(), threading.Event()
        agent = Agent(config, wake)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: _end(ended, wake))
        agent.open()
        say(f"agent {agent.agent_id} on {config.node}, process {os.getpid()}, in {run_dir}")
        while not ended.is_set():
            wake.wait(agent.tick())
            wake.clear()
        agent.close()
        say("ended")
    finally:
        os.close(lock)
    return 0


def _end(ended: threading.Event, wake: threading.Event) -> None:
    ended.set()
    wake.set()


class Agent:
    """One node's agent. All methods are for the thread that made it.

    Args:
        wake: Set when the head has answered and :meth:`tick` should be called before its time.
    """

    def __init__(self, config: AgentConfig, wake: threading.Event) -> None:
        self._config = config
        run_dir = config.run_dir.absolute()
        self._notes = Notes()
        self._clock = SteadyClock()
        self._state = StateFile(run_dir / "agent.sqlite")
        if self._state.set_aside is not None:
            self._notes.set(
                "HW-AGENT-009",
                f"the state file was unreadable and is now {self._state.set_aside}; "
                "energy since the last report is unknown",
            )
        self._spool = Spool(self._state)
        self._clock.not_before(max((one.start_s for one in self._spool.opened().values()), default=0.0))
        self._boards = Boards(
            self._spool,
            self._notes,
            self._clock,
            gpu_type=config.gpu_type,
            close_every_s=config.close_every_s,
            same_boot=self._state.same_boot,
        )
        self._gates = Gates(self._notes)
        self._limits = LimitKeeper(run_dir / "limits.json", self._state.boot_id, self._notes)
        around = Surroundings(
            node=config.node,
            run_dir=run_dir,
            book=JobBook(self._state, config.node),
            notes=self._notes,
            environment=passed_environment(),
        )
        self._jobs = JobKeeper(around)
        self._reporter = Reporter(ServiceClient(config.service_socket), config.node, wake.set)
        self._report_at_s = self._look_at_s = 0.0
        self._lost_at_s: float | None = None
        self._failures = 0

    @property
    def agent_id(self) -> str:
        """Random identity of the run directory's state."""
        return self._state.agent_id

    def open(self) -> None:
        """Open NVML, and give limits back that an earlier run left.

        Raises:
            NeedsOperator: as :meth:`Boards.open`.
        """
        self._boards.open()
        self._limits.restore_all(self._boards.devices)

    def tick(self) -> float:
        """Do what is due, and return after how many seconds to call again."""
        now_s = time.monotonic()
        answer = self._reporter.take()
        changed = answer is not None and self._answered(answer, now_s)
        if changed or now_s >= self._look_at_s:
            self._jobs.tend(self._clock.now_s())
            self._meter()
            self._look_at_s = now_s + self._config.report_every_s
        if now_s >= self._report_at_s and not self._reporter.busy:
            self._reporter.send(self._report())
            self._report_at_s = now_s + self._config.report_every_s
        busy = self._reporter.busy
        next_s = self._look_at_s if busy else min(self._look_at_s, self._report_at_s)
        return max(0.0, next_s - time.monotonic())

    def close(self) -> None:
        """End in order: last intervals, previous limits, one last report."""
        if self._config.stop_jobs_on_exit:
            self._end_jobs()
        self._limits.restore_all(self._boards.devices)
        self._jobs.look()
        self._meter(close=True)
        answer = self._reporter.take(_LAST_CALL_S)
        if isinstance(answer, AgentOrders):
            self._spool.acknowledge(answer.acked_seq)
        if not self._reporter.busy and self._lost_at_s is None:
            self._reporter.send(self._report())
            answer = self._reporter.take(_LAST_CALL_S)
            if isinstance(answer, AgentOrders):
                self._spool.acknowledge(answer.acked_seq)
        self._boards.close()
        self._jobs.close()
        self._state.close()

    def _meter(self, *, close: bool = False) -> None:
        found = find_holders(self._jobs.lease_states())
        for gpu_uuid, lease_ids in found.contested.items():
            self._notes.set("HW-AGENT-006", f"GPU {gpu_uuid} is claimed by the leases {', '.join(lease_ids)}")
        self._boards.meter(found.by_gpu, close=close)
        # After the locks, so that a worker whose lock was free can only have left more behind, not less.
        self._boards.mark(self._gates.judge(self._boards.devices, self._jobs.claims(), time.monotonic()))
        if self._spool.degraded is not None:
            self._notes.error(self._spool.degraded)

    def _report(self) -> AgentReport:
        return AgentReport(
            wire_version=WIRE_VERSION,
            node=self._config.node,
            agent_id=self._state.agent_id,
            sent_at_s=self._clock.now_s(),
            isolated=False,
            gpus=self._boards.reports(),
            jobs=self._jobs.reports(self._clock.now_s()),
            intervals=self._spool.unacked(),
            notes={**self._notes.all(), "run_dir": str(self._config.run_dir.absolute())},
        )

    def _answered(self, answer: Answer, now_s: float) -> bool:
        """Follow the head's answer; return True when it changed who holds a GPU."""
        if isinstance(answer, HorowattError):
            self._head_is_away(answer, now_s)
            return False
        self._head_is_there(now_s)
        if not self._spool.acknowledge(answer.acked_seq):
            self._notes.set(
                "HW-AGENT-010",
                f"the head knows intervals up to {answer.acked_seq} that this state file never held; "
                "was the run directory restored from a copy?",
            )
        shortest_s, longest_s = _PAUSE_LIMITS_S
        if answer.report_after_s > 0:
            self._report_at_s = now_s + min(max(answer.report_after_s, shortest_s), longest_s)
        before = self._jobs.lease_states()
        self._limits.apply(answer.limits_w, self._boards.devices)
        self._jobs.apply(answer.jobs, self._clock.now_s())
        return self._jobs.lease_states() != before

    def _head_is_away(self, error: HorowattError, now_s: float) -> None:
        if self._lost_at_s is None:
            self._lost_at_s = now_s
            why = f"{error.message}: {error.because}" if error.because else error.message
            text = f"{why}; metering goes on and jobs go on"
            say(
                text,
                code=error.code,
                level=logging.WARNING if isinstance(error, RetryLater) else logging.ERROR,
            )
        self._failures += 1
        pause_s = min(self._config.report_every_s * 2 ** min(self._failures, 10), _RETRY_LIMIT_S)
        self._report_at_s = now_s + pause_s

    def _head_is_there(self, now_s: float) -> None:
        if self._lost_at_s is not None:
            say(f"the service answers again after {now_s - self._lost_at_s:.0f} s")
        self._lost_at_s, self._failures = None, 0

    def _end_jobs(self) -> None:
        deadline_s = time.monotonic() + GRACE_S + _LAST_CALL_S
        while time.monotonic() < deadline_s:
            over = self._jobs.end_all(self._clock.now_s())
            self._meter()
            if over:
                return
            time.sleep(_ENDING_TICK_S)
