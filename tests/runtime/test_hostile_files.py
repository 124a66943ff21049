# SPDX-License-Identifier: Apache-2.0
"""What a tenant writes into its own job's folder ends neither the agent nor the service."""

import os
from pathlib import Path

import pytest

from horowatt import wire
from horowatt.agent.folders import read_status
from horowatt.agent.notes import Notes
from horowatt.agent.trash import Trash
from horowatt.elastic.folder import JobFolder
from horowatt.errors import InvalidInput
from horowatt.records import LauncherState, LauncherStatus

NESTED = '{"a":' + "[" * 60_000


def status(**more: object) -> LauncherStatus:
    fields: dict[str, object] = {
        "job_id": "j",
        "attempt": 1,
        "state": LauncherState.FAILED,
        "pid": 1,
        "generation_applied": 1,
        "exit_code": 3,
        "code": "HW-JOB-005",
        "message": "why",
        "updated_at_s": 0.0,
    }
    return LauncherStatus(**{**fields, **more})  # type: ignore[arg-type]


def test_json_that_is_nested_without_end_is_refused_like_any_other_nonsense() -> None:
    """Decoding gives the usual error, not one that no caller expects."""
    with pytest.raises(InvalidInput) as caught:
        wire.decode(NESTED, LauncherStatus)
    assert caught.value.code == "HW-WIRE-001"


def test_what_a_launcher_says_is_bounded(tmp_path: Path) -> None:
    """Codes, exit codes and messages that ours could not have written are not shown to people."""
    folder = JobFolder(tmp_path)
    uid = os.getuid()
    folder.launcher_json.write_text(NESTED)
    assert read_status(folder, uid) is None
    folder.launcher_json.write_bytes(wire.encode(status()))
    assert read_status(folder, uid) == status()
    hostile = status(exit_code=2**62, code="HW'; DROP", message="x" * 20_000)
    folder.launcher_json.write_bytes(wire.encode(hostile))
    said = read_status(folder, uid)
    assert said is not None
    assert (said.exit_code, said.code, len(said.message)) == (None, "", 4096)


def test_a_folder_of_any_depth_can_be_deleted(tmp_path: Path) -> None:
    """Nesting deeper than Python recurses does not keep a job's folder."""
    root = tmp_path / "job"
    root.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "link").symlink_to(outside)
    here = os.open(root, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        deeper = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)
    trash = Trash(tmp_path / "trash", Notes())
    trash.discard(root)
    assert not root.exists()
    trash.close(60)
    assert not list((tmp_path / "trash").iterdir())
    assert outside.exists()
