# SPDX-License-Identifier: Apache-2.0
"""Two Unix users on one cluster: each job runs as its submitter, and nobody reaches another's."""

import json
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import ROOT, Cluster, wait_for

pytestmark = [pytest.mark.horovod, pytest.mark.root, pytest.mark.timeout(300)]

OWNER, STRANGER = "nobody", "daemon"
MLP = ROOT / "examples" / "digits_mlp.py"


def as_user(user: str, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as another user, with nothing of root's environment."""
    entry = pwd.getpwnam(user)
    return subprocess.run(
        command,
        user=entry.pw_uid,
        group=entry.pw_gid,
        extra_groups=[],
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def environment_for_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with this one's packages that every user can run, or a skip that says why."""
    system = "/usr/bin/python3"
    if not Path(system).exists():
        pytest.skip(f"there is no {system} that other users can run")
    folder = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    folder.chmod(0o755)
    made = subprocess.run([system, "-m", "venv", "--without-pip", str(folder / "venv")], check=False)
    [packages] = [path for path in sys.path if path.endswith("site-packages")][:1]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    target = folder / "venv" / "lib" / version / "site-packages"
    if made.returncode != 0 or not target.is_dir():
        shutil.rmtree(folder)
        pytest.skip(f"{system} cannot make a virtual environment of {version}")
    (target / "all.pth").write_text(f"{packages}\n{ROOT / 'runtime'}\n{ROOT / 'allocator'}\n")
    shutil.copy(MLP, folder / "train.py")
    (folder / "train.py").chmod(0o644)
    python = str(folder / "venv" / "bin" / "python")
    probe = as_user(OWNER, [python, "-c", "import horowatt, horowatt_allocator, horovod.torch, sklearn"])
    if probe.returncode != 0:
        shutil.rmtree(folder)
        pytest.skip(f"{OWNER} cannot read this environment: {probe.stderr.strip().splitlines()[-1:]}")
    return folder


def test_a_job_is_its_submitters_and_nobody_elses(cluster: Cluster, environment_for_all: Path) -> None:
    """The job runs as its submitter; another user can neither see, read nor touch it."""
    folder = environment_for_all
    cluster.folder.chmod(0o755)
    python = str(folder / "venv" / "bin" / "python")
    tool = [python, "-m", "horowatt_allocator.cli.main"]
    where = {"HOROWATT_SOCKET": str(cluster.socket)}
    try:
        done = as_user(
            OWNER,
            [
                *tool, "submit", "--quiet", "--tenant", "vision", "--min", "1", "--max", "2",
                "--batch-size", "64", "--venv", str(folder / "venv"), "--env", "SECRET=x y;$(id)",
                "--", "python", str(folder / "train.py"), "--epochs", "40",
            ],
            **where,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        job_id = done.stdout.strip()
        wait_for(lambda: cluster.job(job_id)["samples"], timeout_s=90, what="training to start")

        owner = pwd.getpwnam(OWNER).pw_uid
        pids = cluster.job_processes()
        assert len(pids) >= 2
        assert {Path(f"/proc/{pid}").stat().st_uid for pid in pids} == {owner}
        assert all(b"SECRET" not in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)

        job_dir = cluster.run_dir / "jobs" / job_id
        for name in ("job.json", "slots.json", "hostfile", "launcher.log", "leases"):
            assert as_user(OWNER, ["ls", str(job_dir / name)]).returncode == 0
            refused = as_user(STRANGER, ["cat", str(job_dir / name)])
            assert "Permission denied" in refused.stderr
        assert "Permission denied" in as_user(STRANGER, ["ls", str(cluster.folder / "state")]).stderr

        seen = as_user(STRANGER, [*tool, "ps", "--all", "--json"], **where)
        assert json.loads(seen.stdout)["jobs"] == []
        for command in ("logs", "explain", "cancel"):
            refused = as_user(STRANGER, [*tool, command, job_id], **where)
            assert refused.returncode == 127, refused.stderr
            assert "HW-API-010" in refused.stderr
        assert cluster.job(job_id)["phase"] == "running"

        assert as_user(OWNER, [*tool, "cancel", job_id], **where).returncode == 0
        cluster.wait_phase(job_id, "cancelled", 60)
        assert not cluster.job_processes()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
