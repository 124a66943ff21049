# SPDX-License-Identifier: Apache-2.0
"""What the launcher's Horovod driver believes of the hostfile.

The hostfile says which slots are granted. The driver is told of a new slot only when the worker for it
waits at the door, so that nobody has to wait for it; of a slot that was taken back it is told at once. And
it is told something else where believing the file would stop the job: an unreadable or empty file, fewer
slots than the job's minimum, or a set of slots none of which is held by a living worker, so that nobody could
hand over the state. Then the last good answer stands, and so do its workers, until the grace period
for leases that were taken back ends them.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from horowatt.elastic.folder import JobFolder, checked_name
from horowatt.errors import HorowattError
from horowatt.records import Lease, SlotsFile
from horowatt.wire import decode

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Published:
    """A hostfile with the slots file it was derived from.

    Attributes:
        generation: Of the slots file; the greatest one seen whose leases are these.
        leases: By id, in the order of the slots file.
    """

    generation: int
    leases: dict[str, Lease]


NOTHING = Published(0, {})
_REMEMBERED = 16
"""Generations whose leases are remembered, for a driver that is late to assign them."""


class HostfileDiscovery:
    """Horovod's ``HostDiscovery``: never waits, never fails, returns a new dictionary each time."""

    def __init__(
        self,
        job: JobFolder,
        min_width: int,
        living: Callable[[], frozenset[str]],
        admitted: Callable[[], frozenset[str]] = frozenset,
        on_believed: Callable[[Published], None] = lambda _: None,
    ) -> None:
        """Read the hostfile of ``job``.

        Args:
            living: Returns the ids of the leases whose workers are in the job's world or on their way there;
                called without any lock held.
            admitted: Returns the ids of the new leases that the driver may be told of.
            on_believed: Called when the driver is about to be told something new.
        """
        self._job = job
        self._min_width = min_width
        self._living = living
        self._admitted = admitted
        self._on_believed = on_believed
        self._lock = threading.Lock()
        self._signature: tuple[int, ...] = ()
        self._published = NOTHING
        self._believed = NOTHING
        self._excluded: frozenset[str] = frozenset()
        self._refused = ""
        self._generations: OrderedDict[frozenset[str], int] = OrderedDict()

    def exclude(self, lease_ids: Iterable[str]) -> None:
        """Never tell the driver of these leases: what was to become their workers has failed."""
        self._excluded |= frozenset(lease_ids)

    def start_over(self) -> None:
        """Forget what was believed: the job gets a new world with a new driver."""
        with self._lock:
            self._believed = NOTHING

    @property
    def wanted(self) -> dict[str, Lease]:
        """The published leases but for the excluded ones."""
        leases = self._published.leases
        return {name: lease for name, lease in leases.items() if name not in self._excluded}

    @property
    def published(self) -> Published:
        """What the files say, whether the driver was told or not."""
        return self._published

    @property
    def believed(self) -> Published:
        """What the driver was told last."""
        return self._believed

    def generation_of(self, hosts: Iterable[str]) -> int:
        """Return the generation with exactly these leases, or the latest one believed."""
        return self._generations.get(frozenset(hosts), self._believed.generation)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return one slot for each lease that the driver is to use."""
        with self._lock:
            self._refresh()
            if self._published != self._believed:
                self._consider()
            return dict.fromkeys(self._believed.leases, 1)

    def _refresh(self) -> None:
        try:
            status = [path.stat() for path in (self._job.hostfile, self._job.slots_json)]
            signature = tuple(value for s in status for value in (s.st_ino, s.st_mtime_ns, s.st_size))
            if signature == self._signature:
                return
            hosts = parse_hostfile(self._job.hostfile.read_text(encoding="ascii"))
            slots = decode(self._job.slots_json.read_bytes(), SlotsFile)
        except (OSError, ValueError, HorowattError) as error:
            self._note(f"the hostfile cannot be read now: {error}")
            return
        leases = {lease.lease_id: lease for lease in slots.leases}
        if set(hosts) != set(leases):
            # Between the two renames of a publication: the hostfile follows at once.
            return
        self._signature = signature
        self._published = Published(slots.generation, leases)

    def _consider(self) -> None:
        wanted = self.wanted
        generation = self._published.generation
        before = self._believed
        if before.leases:
            new = wanted.keys() - before.leases.keys()
            if new - self._admitted():
                # What was taken back is not kept for what is not there yet.
                wanted = {name: lease for name, lease in wanted.items() if name in before.leases}
                if len(wanted) == len(before.leases):
                    return
                generation = before.generation
        if wanted.keys() == before.leases.keys() and generation == before.generation:
            return
        if len(wanted) < self._min_width:
            if before.leases:
                self._note(f"{len(wanted)} slots are published and the job's minimum is {self._min_width}")
            return
        living = self._living()
        if living and not living & wanted.keys():
            self._note("no worker that lives is among the published slots")
            return
        self._refused = ""
        self._believed = Published(generation, wanted)
        self._generations[frozenset(wanted)] = generation
        while len(self._generations) > _REMEMBERED:
            self._generations.popitem(last=False)
        if wanted.keys() != before.leases.keys():
            self._on_believed(self._believed)

    def _note(self, why: str) -> None:
        if why != self._refused:
            self._refused = why
            _log.warning("the last good hostfile stands: %s", why)


def parse_hostfile(text: str) -> list[str]:
    """Return the leases of a hostfile of the Horowatt launcher, in its order.

    Raises:
        ValueError: for a line that is not ``<lease id>:1``.
        InvalidInput: ``HW-JOB-020`` for an id that is not safe.
    """
    leases = []
    for line in text.splitlines():
        lease_id, separator, count = line.partition(":")
        if not separator or count != "1":
            raise ValueError(f"{line!r} is not a line of a hostfile")
        leases.append(checked_name(lease_id, "lease id"))
    return leases
