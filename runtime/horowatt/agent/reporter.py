# SPDX-License-Identifier: Apache-2.0
"""Calls the head from a thread of its own, so that a head that hangs never stops the metering."""

import threading
from collections.abc import Callable

from horowatt import wire
from horowatt.client import ServiceClient
from horowatt.errors import HorowattError
from horowatt.records import AgentOrders, AgentReport

Answer = AgentOrders | HorowattError


class Reporter:
    """At most one report under way at a time.

    Args:
        on_answer: Called from the reporter's thread when :meth:`take` has something.
    """

    def __init__(self, client: ServiceClient, node: str, on_answer: Callable[[], None]) -> None:
        self._client = client
        self._path = f"/v1/agents/{node}/report"
        self._on_answer = on_answer
        self._changed = threading.Condition()
        self._report: AgentReport | None = None
        self._answer: Answer | None = None
        self._busy = False
        # A daemon, because a call to a head that hangs must not keep the agent from ending.
        threading.Thread(target=self._run, name="reporter", daemon=True).start()

    @property
    def busy(self) -> bool:
        """True while a report is under way or its answer has not been taken."""
        with self._changed:
            return self._busy

    def send(self, report: AgentReport) -> None:
        """Hand over a report; only when not busy."""
        with self._changed:
            self._report, self._busy = report, True
            self._changed.notify_all()

    def take(self, wait_s: float = 0.0) -> Answer | None:
        """Return what became of the report, or None while that is not known."""
        with self._changed:
            if self._busy:
                self._changed.wait_for(lambda: self._answer is not None, timeout=wait_s)
            answer, self._answer = self._answer, None
            self._busy = self._busy and answer is None
            return answer

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._report is not None)
                report, self._report = self._report, None
            answer = self._call(report)
            with self._changed:
                self._answer = answer
                self._changed.notify_all()
            self._on_answer()

    def _call(self, report: AgentReport | None) -> Answer:
        try:
            return wire.decode(
                self._client.request("POST", self._path, body=wire.encode(report)), AgentOrders
            )
        except HorowattError as error:
            return error
        except Exception as error:  # noqa: BLE001 - without this thread nothing would be reported any more
            return HorowattError(
                "HW-AGENT-019",
                "the report could not be written or its answer not read",
                because=str(error),
                hint="this is a fault of Horowatt; please report it with this line",
            )
