# SPDX-License-Identifier: Apache-2.0
"""Two hosts with their own names, addresses, interfaces, sshd and agents share one cluster."""

import contextlib
import itertools
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import HOROWATT, ROOT, Cluster, wait_for
from hosts import Host, missing_tools, two_hosts

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.root,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing_tools()), reason=f"two hosts need {missing_tools()} on this machine"),
]

MLP = ROOT / "examples" / "digits_mlp.py"


@contextmanager
def cluster_of_two(folder: Path, hosts: tuple[Host, Host]) -> Iterator[Cluster]:
    """Yield a cluster whose two nodes are hosts with two simulated GPUs each."""
    inventory = folder / "two.toml"
    inventory.write_text(
        'name = "two"\n'
        + "".join(
            f'[[node]]\nname = "{host.name}"\naddress = "{host.address}"\nnum_gpus = 2\nsimulated = true\n'
            for host in hosts
        )
    )
    simulator = folder / "two.simulator.toml"
    demo = (ROOT / "hostfiles" / "demo.simulator.toml").read_text()
    simulator.write_text(re.sub(r"(?m)^count *= *\d+", "count = 2", demo))
    cluster = Cluster(folder, inventory, ROOT / "hostfiles" / "demo.config.toml", simulator)
    try:
        cluster.start_service()
        for host in hosts:
            start_agent(cluster, host)
        wait_for(
            lambda: all(len(node["gpus"]) == 2 for node in cluster.nodes()),
            timeout_s=60,
            what="both agents' GPUs to be seen",
        )
        yield cluster
    except BaseException:
        for path in [*folder.glob("*.log"), *folder.glob("run-*/jobs/*/launcher.log")]:
            print(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}")
        for path in folder.glob("run-*/jobs/*/events.jsonl"):
            print(f"--- {path}\n{path.read_text(errors='replace')[-6000:]}")
        raise
    finally:
        cluster.close()


def start_agent(cluster: Cluster, host: Host) -> None:
    host.start(
        [
            *HOROWATT, "agent", "--node", host.name, "--socket", str(cluster.socket),
            "--run-dir", str(host.run_dir), "--simulate", str(cluster.simulator),
        ],
        cluster.folder / f"agent-{host.name}.log",
    )  # fmt: skip


def trains_at(cluster: Cluster, job_id: str, width: int, timeout_s: float) -> None:
    """Wait until a job trains at a width."""

    def training() -> bool:
        job = cluster.job(job_id)
        assert job["phase"] not in {"failed", "cancelled", "finished"}, job["reason"]
        generation = job["generations"][-1] if job["generations"] else None
        return bool(generation and generation["width"] == width and generation["first_step_end_s"])

    wait_for(training, timeout_s=timeout_s, what=f"training at width {width}")


def test_a_job_spans_two_hosts_whatever_becomes_of_one() -> None:
    """It grows over ssh, gives way, grows back; a host is cut off, comes back, loses its workers.

    The job goes on each time, from its last commit, in the same attempt, and the joules add up.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hw-") as name,
        two_hosts(Path(name)) as hosts,
        cluster_of_two(Path(name), hosts) as cluster,
    ):
        home, away = hosts
        job_id = cluster.submit(
            "--name", "wide", "--tenant", "vision", "--widths", "1,2,4", "--batch-size", "64",
            "--", sys.executable, str(MLP), "--epochs", "5000",
        )  # fmt: skip
        trains_at(cluster, job_id, 4, 200)
        if cluster.job(job_id)["home_node"] != home.name:
            home, away = away, home
        late = cluster.submit(
            "--name", "late", "--tenant", "search", "--min", "2", "--max", "2", "--batch-size", "64",
            "--epochs", "5", "--", sys.executable, str(MLP), "--epochs", "5",
        )  # fmt: skip
        cluster.wait_phase(late, "finished", 180)
        widths = [generation["width"] for generation in cluster.job(job_id)["generations"]]
        assert any(b < a for a, b in itertools.pairwise(widths)), widths
        trains_at(cluster, job_id, 4, 200)

        def samples() -> int:
            return int(cluster.job(job_id)["samples"] or 0)

        def trains_on() -> None:
            before = samples()
            wait_for(lambda: samples() > before + 5_000, timeout_s=120, what="training to go on")

        away.link("down")
        wait_for(lambda: len(away.workers()) == 0, timeout_s=120, what="the end of the workers cut off")
        trains_on()
        away.link("up")
        trains_at(cluster, job_id, 4, 200)
        for pid in away.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        trains_on()
        job = cluster.job(job_id)
        assert job["attempt"] == 1, job["reason"]
        assert cluster.call("cancel", job_id).returncode == 0
        wait_for(lambda: cluster.job(job_id)["phase"] == "cancelled", timeout_s=60, what="the end of the job")
        report = cluster.energy()
        assert report["sum_error"] <= 0.001
        assert {device["node"] for device in report["devices"]} == {host.name for host in hosts}
