# SPDX-License-Identifier: Apache-2.0
"""What Horovod's driver is told of a hostfile."""

import os
from pathlib import Path

import pytest

from horowatt.elastic.discovery import HostfileDiscovery, parse_hostfile
from horowatt.elastic.folder import JobFolder
from horowatt.elastic.hostfile import publish
from horowatt.records import BatchRule, LauncherKind, LaunchSpec, Lease, SlotsFile


class Job:
    """A job's folder whose living workers a test chooses."""

    def __init__(self, root: Path, min_width: int = 1) -> None:
        self.folder = JobFolder(root)
        self.living: frozenset[str] = frozenset()
        self.generation = 0
        self.admitted: frozenset[str] = frozenset("abc")
        self.discovery = HostfileDiscovery(self.folder, min_width, lambda: self.living, lambda: self.admitted)

    def publish(self, *lease_ids: str) -> None:
        self.generation += 1
        leases = tuple(
            Lease(
                lease_id=lease_id,
                job_id="j",
                node="n",
                address="127.0.0.1",
                gpu_uuid=f"GPU-{lease_id}",
                gpu_type="t",
                slot_index=index,
                simulated=False,
            )
            for index, lease_id in enumerate(lease_ids)
        )
        uid, gid = os.getuid(), os.getgid()
        slots = SlotsFile(job_id="j", generation=self.generation, uid=uid, leases=leases, published_at_s=0.0)
        spec = LaunchSpec(
            job_id="j",
            name="j",
            tenant="t",
            uid=uid,
            gid=gid,
            username="u",
            launcher=LauncherKind.HOROWATT,
            command=("python", "t.py"),
            environment={},
            working_dir="/",
            virtual_env=None,
            min_width=1,
            max_width=4,
            batch_rule=BatchRule.PER_WORKER,
            batch_size=None,
        )
        publish(self.folder, spec, slots, uid, gid)

    def hosts(self) -> dict[str, int]:
        return self.discovery.find_available_hosts_and_slots()


def test_a_publication_is_believed(tmp_path: Path) -> None:
    """What is published is what the driver gets, each time in a new dictionary."""
    job = Job(tmp_path)
    assert job.hosts() == {}
    job.publish("a", "b")
    assert job.hosts() == {"a": 1, "b": 1}
    assert job.hosts() is not job.hosts()
    job.living = frozenset("ab")
    job.publish("b")
    assert job.hosts() == {"b": 1}
    assert job.discovery.believed.generation == 2


@pytest.mark.parametrize("content", ["", "garbage", "a:2\n", "a\n", "../x:1\n", "\xff"])
def test_a_bad_hostfile_leaves_the_last_good_answer(content: str, tmp_path: Path) -> None:
    """An empty, partial or foreign hostfile stops nobody, and the next good one is believed again."""
    job = Job(tmp_path)
    job.publish("a", "b")
    assert job.hosts() == {"a": 1, "b": 1}
    job.folder.hostfile.write_text(content)
    assert job.hosts() == {"a": 1, "b": 1}
    job.publish("a")
    assert job.hosts() == {"a": 1}


def test_a_missing_hostfile_leaves_the_last_good_answer(tmp_path: Path) -> None:
    """Reading may fail at any time."""
    job = Job(tmp_path)
    job.publish("a")
    job.hosts()
    job.folder.hostfile.unlink()
    assert job.hosts() == {"a": 1}


def test_nothing_published_is_not_believed_while_the_job_runs(tmp_path: Path) -> None:
    """No slots, or fewer than the job's minimum, would stall every worker."""
    job = Job(tmp_path, min_width=2)
    job.publish("a")
    assert job.hosts() == {}
    job.publish("a", "b", "c")
    assert len(job.hosts()) == 3
    job.publish()
    assert len(job.hosts()) == 3
    job.publish("a")
    assert len(job.hosts()) == 3
    assert job.discovery.published.generation == job.generation


def test_a_set_without_a_living_worker_is_not_believed(tmp_path: Path) -> None:
    """Nobody could hand over the state, and Horovod would stop the job."""
    job = Job(tmp_path)
    job.publish("a")
    job.hosts()
    job.living = frozenset("a")
    job.publish("b")
    assert job.hosts() == {"a": 1}
    job.publish("a", "b")
    assert job.hosts() == {"a": 1, "b": 1}


def test_a_late_assignment_gets_its_own_generation(tmp_path: Path) -> None:
    """Horovod may assign the hosts it was told before the latest ones."""
    job = Job(tmp_path)
    job.publish("a")
    job.hosts()
    job.publish("a", "b")
    job.hosts()
    assert job.discovery.generation_of(("a",)) == 1
    assert job.discovery.generation_of(("b", "a")) == 2
    assert job.discovery.generation_of(("b",)) == 2


def test_new_slots_wait_until_they_are_admitted_and_old_ones_go_at_once(tmp_path: Path) -> None:
    """Nobody waits for a worker that is not there yet, and what was taken back is not kept for it."""
    job = Job(tmp_path)
    job.publish("a", "b")
    job.hosts()
    job.living, job.admitted = frozenset("ab"), frozenset()
    job.publish("a", "b", "c")
    assert job.hosts() == {"a": 1, "b": 1}
    job.publish("a", "c")
    assert job.hosts() == {"a": 1}
    assert job.discovery.generation_of(("a",)) == 1
    job.admitted = frozenset("c")
    assert job.hosts() == {"a": 1, "c": 1}
    assert job.discovery.generation_of(("a", "c")) == 3
    job.publish("a", "c", "d")
    job.publish("a", "c")
    job.hosts()
    assert job.discovery.generation_of(("a", "c")) == 5
    job.discovery.exclude("d")
    job.admitted = frozenset("d")
    job.publish("a", "c", "d")
    assert job.hosts() == {"a": 1, "c": 1}


def test_the_same_slots_in_a_later_generation_are_that_generation(tmp_path: Path) -> None:
    """A generation that changes no slot is applied as it is seen."""
    job = Job(tmp_path)
    job.publish("a")
    job.hosts()
    job.publish("a")
    job.hosts()
    assert job.discovery.generation_of(("a",)) == 2


def test_lines_of_a_hostfile_are_checked() -> None:
    """Only ``<lease id>:1`` is a line of a launcher's hostfile."""
    assert parse_hostfile("x:1\ny:1\n") == ["x", "y"]
    with pytest.raises(ValueError, match="not a line"):
        parse_hostfile("x slots=1\n")
