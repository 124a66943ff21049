# SPDX-License-Identifier: Apache-2.0
"""Following something for a while although the service may be restarted meanwhile."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from horowatt.client import ServiceClient
from horowatt.errors import RetryLater
from horowatt_allocator.cli.views import JobView, send

POLL_S = 1.0
"""Between two looks at a job."""

Say = Callable[[str], None]


class Patience:
    """Says once that the service is away, and once that it is back."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.away = False

    @contextmanager
    def through_absence(self) -> Iterator[None]:
        """Let the block fail with ``RetryLater`` without ending the command."""
        try:
            yield
        except RetryLater as error:
            if not self.away:
                self._say(f"{error.message}; jobs train on, trying again until it does (Ctrl-C to leave)")
            self.away = True
        else:
            if self.away:
                self._say("the service answers again")
            self.away = False


def wait_until_ended(client: ServiceClient, job_id: str, say: Say) -> JobView:
    """Return the job once it ended; says each change of phase, width and reason.

    Raises:
        HorowattError: any error of the service except its absence.
    """
    patience = Patience(say)
    shown = ""
    while True:
        job: JobView | None = None
        with patience.through_absence():
            job = JobView.from_json(send(client, "GET", f"/v1/jobs/{job_id}"))
        if job is not None:
            line = f"{job.phase}, width {job.width}: {job.reason_text}"
            if line != shown:
                say(line)
                shown = line
            if job.ended:
                return job
        time.sleep(POLL_S)
