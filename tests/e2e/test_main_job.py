# SPDX-License-Identifier: Apache-2.0
"""The main job with real parts: submit, size, resize live, account for every joule."""

import itertools
import os
import re
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import ROOT, Cluster, wait_for

from horowatt import wire
from horowatt.elastic.counters import is_held, read_counters
from horowatt.elastic.folder import JobFolder
from horowatt.records import SlotsFile

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]

MLP = ROOT / "examples" / "digits_mlp.py"
ENERGY_TOLERANCE = 0.001


class OwnerWatch:
    """Asserts at every look that a slot has one owner at most."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.looks = 0
        self.widths: dict[str, list[int]] = {}

    def look(self) -> None:
        """Look at all slots files and lease locks once."""
        published: dict[str, str] = {}
        alive: dict[str, str] = {}
        for path in sorted((self.cluster.run_dir / "jobs").glob("*")):
            folder = JobFolder(path)
            try:
                slots = wire.decode(folder.slots_json.read_bytes(), SlotsFile)
            except FileNotFoundError:
                continue
            for lease in slots.leases:
                other = published.setdefault(lease.gpu_uuid, slots.job_id)
                assert other == slots.job_id, f"{lease.gpu_uuid} is published for {other} and {slots.job_id}"
                if is_held(folder.lease(lease.lease_id).lock):
                    owner = alive.setdefault(lease.gpu_uuid, lease.lease_id)
                    assert owner == lease.lease_id, (
                        f"{lease.gpu_uuid} is held by {owner} and {lease.lease_id}"
                    )
            seen = self.widths.setdefault(slots.job_id, [])
            if not seen or seen[-1] != len(slots.leases):
                seen.append(len(slots.leases))
        self.looks += 1

    def until(self, condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """Wait for a condition while looking."""

        def looked() -> Any:
            self.look()
            return condition()

        return wait_for(looked, timeout_s=timeout_s, what=what, every_s=0.1)


def ended(cluster: Cluster, job_id: str) -> Callable[[], bool]:
    def check() -> bool:
        job = cluster.job(job_id)
        assert job["phase"] not in {"failed", "cancelled"}, f"{job['reason']}\n{cluster.logs(job_id)}"
        return bool(job["phase"] == "finished")

    return check


def accuracy(text: str) -> float:
    found = re.findall(r"accuracy=([0-9.]+)", text)
    assert found, f"no accuracy in: {text[-2000:]}"
    return float(found[-1])


def assert_energy_adds_up(cluster: Cluster) -> dict[str, Any]:
    report = cluster.energy()
    assert report["simulated"] is True
    assert report["sum_error"] is not None
    assert report["sum_error"] <= ENERGY_TOLERANCE, report
    total = sum(job["energy"]["energy_j"] for job in report["jobs"])
    total += report["idle"]["energy_j"] + report["unattributed"]["energy_j"]
    assert total == pytest.approx(report["total"]["energy_j"], rel=ENERGY_TOLERANCE)
    return report


def trains_wide(cluster: Cluster, job_id: str) -> bool:
    generation = cluster.job(job_id)["generations"][-1]
    return generation["width"] >= 2 and generation["first_step_end_s"] is not None


def test_two_tenants_share_four_gpus_live(cluster: Cluster) -> None:
    """A job shrinks for another and grows back, each slot has one owner, and the joules add up."""
    watch = OwnerWatch(cluster)
    python = sys.executable
    first = cluster.submit(
        "--name", "scales", "--tenant", "vision", "--min", "1", "--max", "4", "--batch-size", "64",
        "--epochs", "70", "--", python, str(MLP), "--epochs", "70",
    )  # fmt: skip
    watch.until(lambda: cluster.job(first)["width"] >= 2, 120, "the first job to grow")
    watch.until(lambda: trains_wide(cluster, first), 90, "the first job to train at its new width")
    # Three of four GPUs: whatever the first job holds by now, it has to give some up.
    second = cluster.submit(
        "--name", "later", "--tenant", "search", "--min", "3", "--max", "3", "--batch-size", "64",
        "--epochs", "8", "--", python, str(MLP), "--epochs", "8",
    )  # fmt: skip
    watch.until(ended(cluster, second), 150, "the second job to finish")
    watch.until(ended(cluster, first), 300, "the first job to finish")

    widths = watch.widths[first]
    assert any(b > a for a, b in itertools.pairwise(widths)), widths
    assert any(b < a for a, b in itertools.pairwise(widths)), widths
    assert watch.looks > 100
    assert accuracy(cluster.logs(first)) > 0.93
    assert accuracy(cluster.logs(second)) > 0.90
    report = assert_energy_adds_up(cluster)
    lines = {job["job_id"]: job for job in report["jobs"]}
    for job_id in (first, second):
        assert lines[job_id]["energy"]["energy_j"] > 0
        assert lines[job_id]["energy"]["coverage"] == pytest.approx(1.0)
        assert lines[job_id]["samples_per_j"] > 0
    assert lines[first]["resizes"] >= 2
    assert lines[first]["pause_s"] > 0
    assert not cluster.job_processes()


def test_service_killed_while_jobs_train(cluster: Cluster) -> None:
    """Kill -9 of the service: the job trains on, is picked up again, finishes; no joule is lost."""
    job_id = cluster.submit(
        "--name", "survivor", "--tenant", "vision", "--min", "1", "--max", "2", "--batch-size", "64",
        "--epochs", "40", "--", sys.executable, str(MLP), "--epochs", "40",
    )  # fmt: skip
    wait_for(lambda: cluster.job(job_id)["samples"], timeout_s=90, what="training to start")
    before = cluster.job(job_id)
    cluster.kill_service()

    def steps() -> int:
        leases = (cluster.run_dir / "jobs" / job_id / "leases").iterdir()
        counters = [read_counters(path / "counters", os.getuid()) for path in leases]
        return sum(found.steps for found in counters if found is not None)

    at_kill = steps()
    time.sleep(8)
    assert steps() > at_kill, "the job did not train while the service was dead"
    cluster.start_service()
    again = cluster.job(job_id)
    assert again["generation"] >= before["generation"]
    assert again["attempt"] == before["attempt"]
    cluster.wait_phase(job_id, "finished", 200)
    report = assert_energy_adds_up(cluster)
    assert report["unattributed"]["energy_j"] == 0
    assert report["total"]["coverage"] == pytest.approx(1.0)
    assert_no_hole(cluster)


def test_agent_killed_while_jobs_train(cluster: Cluster) -> None:
    """Kill -9 of the agent: the job trains on and the counters bridge the gap to the same holder."""
    job_id = cluster.submit(
        "--name", "bridged", "--tenant", "speech", "--min", "2", "--max", "2", "--batch-size", "64",
        "--epochs", "30", "--", sys.executable, str(MLP), "--epochs", "30",
    )  # fmt: skip
    wait_for(lambda: cluster.job(job_id)["samples"], timeout_s=90, what="training to start")
    cluster.kill_agent()
    time.sleep(5)
    cluster.start_agent()
    cluster.wait_phase(job_id, "finished", 200)
    report = assert_energy_adds_up(cluster)
    assert report["unattributed"]["energy_j"] == 0
    [line] = report["jobs"]
    assert line["energy"]["bridged_s"] > 4
    assert_no_hole(cluster)


def assert_no_hole(cluster: Cluster) -> None:
    """Every GPU's intervals follow each other without hole or overlap, each stored once."""
    database = cluster.folder / "state" / "horowatt.sqlite"
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(intervals)")]
        rows = [dict(zip(columns, row, strict=True)) for row in connection.execute("SELECT * FROM intervals")]
    assert rows
    by_gpu: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_gpu.setdefault(row["gpu_uuid"], []).append(row)
    for uuid, intervals in by_gpu.items():
        intervals.sort(key=lambda row: row["start_s"])
        for a, b in itertools.pairwise(intervals):
            assert b["start_s"] == pytest.approx(a["end_s"], abs=1e-6), f"hole or overlap on {uuid}"


def test_attached_job_under_users_own_horovodrun(cluster: Cluster, tmp_path: Path) -> None:
    """A user's own horovodrun reads the job's discovery script; its workers see their GPUs only."""
    import subprocess

    probe = tmp_path / "show gpus.py"
    probe.write_text(
        "import os, sys, runpy\n"
        "print('SEES', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
        f"sys.argv = [{str(MLP)!r}, '--epochs', '3']\n"
        f"runpy.run_path({str(MLP)!r}, run_name='__main__')\n"
    )
    other = cluster.submit(
        "--name", "neighbour", "--tenant", "speech", "--min", "1", "--max", "1", "--batch-size", "64",
        "--", sys.executable, str(MLP), "--epochs", "100",
    )  # fmt: skip
    job_id = cluster.submit(
        "--name", "mine", "--tenant", "vision", "--attach", "--min", "2", "--max", "2", "--batch-size", "64",
        "--", sys.executable, str(probe),
    )  # fmt: skip
    script = cluster.run_dir / "jobs" / job_id / "discover.sh"
    wait_for(
        lambda: script.exists() and (script.parent / "hostfile").exists(), timeout_s=30, what="the slots"
    )
    bin_dir = Path(sys.executable).parent
    done = subprocess.run(
        [
            str(bin_dir / "horovodrun"), "-np", "2", "--min-np", "2", "--network-interface", "lo",
            "--host-discovery-script", str(script),
            str(bin_dir / "horowatt"), "worker", "--", sys.executable, str(probe),
        ],
        env={**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    mine = {
        lease.gpu_uuid for lease in wire.decode((script.parent / "slots.json").read_bytes(), SlotsFile).leases
    }
    seen = [set(line.split("SEES ")[1].split(",")) for line in done.stdout.splitlines() if "SEES " in line]
    assert len(seen) == 2, done.stdout
    assert all(gpus <= mine for gpus in seen)
    assert set.union(*seen) == mine
    cluster.wait_phase(job_id, "finished", 60)
    assert cluster.job(job_id)["samples"] > 0
    cluster.call("cancel", other)
    assert_energy_adds_up(cluster)
