# SPDX-License-Identifier: Apache-2.0
"""Publishing a job's slots, and the names of the files in its folder."""

import os
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from horowatt.elastic.discovery import parse_hostfile
from horowatt.elastic.folder import JobFolder
from horowatt.elastic.hostfile import publish, render
from horowatt.errors import InvalidInput, NotAllowed
from horowatt.records import BatchRule, LauncherKind, LaunchSpec, Lease, SlotsFile
from horowatt.wire import decode


def _lease(lease_id: str, address: str = "127.0.0.1", slot_index: int = 0) -> Lease:
    return Lease(
        lease_id=lease_id,
        job_id="job-1",
        node="n1",
        address=address,
        gpu_uuid=f"GPU-{lease_id}",
        gpu_type="t",
        slot_index=slot_index,
        simulated=False,
    )


def _slots(*leases: Lease, generation: int = 1) -> SlotsFile:
    return SlotsFile(
        job_id="job-1", generation=generation, uid=os.getuid(), leases=leases, published_at_s=1.0
    )


def _spec(launcher: LauncherKind = LauncherKind.HOROWATT) -> LaunchSpec:
    return LaunchSpec(
        job_id="job-1",
        name="a job",
        tenant="t",
        uid=os.getuid(),
        gid=os.getgid(),
        username="u",
        launcher=launcher,
        command=("python", "train.py"),
        environment={},
        working_dir="/",
        virtual_env=None,
        min_width=1,
        max_width=8,
        batch_rule=BatchRule.PER_WORKER,
        batch_size=None,
    )


def _publish(root: Path, slots: SlotsFile, launcher: LauncherKind = LauncherKind.HOROWATT) -> JobFolder:
    folder = JobFolder(root)
    publish(folder, _spec(launcher), slots, os.getuid(), os.getgid())
    return folder


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a\0b", "a b", "-x", "x" * 129, "a..b", "ü"])
def test_an_id_never_leads_out_of_its_folder(name: str) -> None:
    """Ids that are not one plain path component are refused, for jobs and for leases."""
    with pytest.raises(InvalidInput) as caught:
        JobFolder.of(Path("/run/x"), name)
    assert caught.value.code == "HW-JOB-020"
    with pytest.raises(InvalidInput):
        JobFolder(Path("/run/x")).lease(name)


def test_the_horowatt_launcher_gets_one_host_per_lease() -> None:
    """Each lease is a host of its own with one slot, in the order of the slots file."""
    text = render(_slots(_lease("b"), _lease("a")), LauncherKind.HOROWATT)
    assert text == "b:1\na:1\n"
    assert parse_hostfile(text) == ["b", "a"]


def test_horovodrun_gets_addresses_with_counts() -> None:
    """Attached jobs get each address once, with its number of slots, in a stable order."""
    leases = (_lease("a", "node-2"), _lease("b", "10.0.0.1"), _lease("c", "node-2", 1))
    assert render(_slots(*leases), LauncherKind.ATTACHED) == "node-2:2\n10.0.0.1:1\n"


@pytest.mark.parametrize(
    "address", ["::1", "a b", "-oProxyCommand=x", "a:1", "", "host;id", "x" * 254, "a..b"]
)
def test_an_address_that_horovod_or_ssh_would_misread_is_refused(address: str, tmp_path: Path) -> None:
    """Neither rendering nor publishing lets such an address through."""
    with pytest.raises(InvalidInput) as caught:
        _publish(tmp_path, _slots(_lease("a", address)))
    assert caught.value.code == "HW-JOB-021"
    assert not (tmp_path / "hostfile").exists()


def test_publishing_writes_private_files_that_agree(tmp_path: Path) -> None:
    """After a publication all files are there, private to the owner, and tell the same."""
    folder = _publish(tmp_path, _slots(_lease("a"), _lease("b"), generation=7))
    assert decode(folder.job_json.read_bytes(), LaunchSpec) == _spec()
    assert decode(folder.slots_json.read_bytes(), SlotsFile).generation == 7
    assert parse_hostfile(folder.hostfile.read_text()) == ["a", "b"]
    for lease in ("a", "b"):
        assert stat.S_IMODE(folder.lease(lease).root.stat().st_mode) == 0o700
    for path in (folder.job_json, folder.slots_json, folder.hostfile):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_publishing_again_is_harmless(tmp_path: Path) -> None:
    """The same publication twice leaves the same files."""
    first = _publish(tmp_path, _slots(_lease("a"))).hostfile.read_text()
    assert _publish(tmp_path, _slots(_lease("a"))).hostfile.read_text() == first


@pytest.mark.parametrize("level", ["leases", "leases/a"])
def test_a_folder_replaced_by_a_link_is_not_entered(level: str, tmp_path: Path) -> None:
    """A tenant cannot have the agent make or change folders elsewhere by planting a link."""
    root, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (root / level).parent.mkdir(exist_ok=True, mode=0o700)
    (root / level).symlink_to(elsewhere)
    with pytest.raises(NotAllowed) as caught:
        _publish(root, _slots(_lease("a")))
    assert caught.value.code == "HW-JOB-022"
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["plain", "with space", "quote'\"s", "$(touch pwned)", "semi;colon", "-dash", "new\nline"]
)
def test_the_discovery_script_prints_the_hostfile_whatever_its_folder_is_called(
    name: str, tmp_path: Path
) -> None:
    """The script runs under plain sh, prints nothing but the hostfile, and no name is taken for code."""
    root = tmp_path / name
    root.mkdir()
    folder = _publish(root, _slots(_lease("a")), LauncherKind.ATTACHED)
    done = subprocess.run([folder.discover_script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "127.0.0.1:1\n"
    assert not (tmp_path / "pwned").exists()


def test_the_discovery_script_succeeds_before_the_first_publication(tmp_path: Path) -> None:
    """Without a hostfile it prints nothing and exits 0, or Horovod would give the job up."""
    folder = _publish(tmp_path, _slots(_lease("a")))
    folder.hostfile.unlink()
    done = subprocess.run([folder.discover_script], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_reader_never_sees_a_part_of_a_hostfile(tmp_path: Path) -> None:
    """While two publications alternate, every read is exactly one of them."""
    many = _slots(*(_lease(f"lease-{number:04}", slot_index=number) for number in range(200)))
    one = _slots(_lease("lease-0000"))
    folder = _publish(tmp_path, one)
    whole = {render(many, LauncherKind.HOROWATT), render(one, LauncherKind.HOROWATT)}
    _publish(tmp_path, many)
    done = threading.Event()

    def alternate() -> None:
        for number in range(20):
            _publish(tmp_path, one if number % 2 else many)
        done.set()

    writer = threading.Thread(target=alternate)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(folder.hostfile.read_text())
    writer.join()
    assert seen <= whole
