# SPDX-License-Identifier: Apache-2.0
"""Two hosts with their own names, addresses, interfaces, sshd and agents share one cluster."""

import itertools
import re
import sys
import tempfile
from pathlib import Path

import pytest
from cluster import HOROWATT, ROOT, Cluster, wait_for
from hosts import missing_tools, two_hosts

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.root,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing_tools()), reason=f"two hosts need {missing_tools()} on this machine"),
]

MLP = ROOT / "examples" / "digits_mlp.py"


def test_a_job_grows_over_two_hosts_and_shrinks_back() -> None:
    """A job spans two hosts over ssh of its tenant, gives one up for another job, and the joules add up."""
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        folder = Path(name)
        with two_hosts(folder) as hosts:
            inventory = folder / "two.toml"
            inventory.write_text(
                'name = "two"\n'
                + "".join(
                    f'[[node]]\nname = "{host.name}"\naddress = "{host.address}"\n'
                    "num_gpus = 2\nsimulated = true\n"
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
                    host.start(
                        [
                            *HOROWATT, "agent", "--node", host.name, "--socket", str(cluster.socket),
                            "--run-dir", str(host.run_dir), "--simulate", str(simulator),
                        ],
                        folder / f"agent-{host.name}.log",
                    )  # fmt: skip
                wait_for(
                    lambda: all(len(node["gpus"]) == 2 for node in cluster.nodes()),
                    timeout_s=60,
                    what="both agents' GPUs to be seen",
                )
                wide = cluster.submit(
                    "--name", "wide", "--tenant", "vision", "--widths", "1,4", "--batch-size", "64",
                    "--epochs", "80", "--", sys.executable, str(MLP), "--epochs", "80",
                )  # fmt: skip
                wait_for(
                    lambda: cluster.job(wide)["width"] == 4, timeout_s=150, what="the job to span both hosts"
                )
                wait_for(
                    lambda: cluster.job(wide)["generations"][-1]["first_step_end_s"],
                    timeout_s=90,
                    what="training at this width",
                )
                late = cluster.submit(
                    "--name", "late", "--tenant", "search", "--min", "2", "--max", "2", "--batch-size", "64",
                    "--epochs", "5", "--", sys.executable, str(MLP), "--epochs", "5",
                )  # fmt: skip
                cluster.wait_phase(late, "finished", 180)
                done = cluster.wait_phase(wide, "finished", 300)
                widths = [generation["width"] for generation in done["generations"]]
                assert max(widths) == 4, widths
                assert any(b < a for a, b in itertools.pairwise(widths)), widths
                assert done["attempt"] == 1
                report = cluster.energy()
                assert report["sum_error"] <= 0.001
                assert {device["node"] for device in report["devices"]} == {host.name for host in hosts}
            except BaseException:
                for path in [*folder.glob("*.log"), *folder.glob("run-*/jobs/*/launcher.log")]:
                    print(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}")
                raise
            finally:
                cluster.close()
