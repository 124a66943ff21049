# SPDX-License-Identifier: Apache-2.0
"""A small soak: the one of ``make bench-resize``, with few actions."""

from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.horovod
def test_a_job_outlives_random_resizes_and_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample exactly once, replicas identical, nothing left, whatever was resized and killed."""
    monkeypatch.syspath_prepend(str(BENCH))
    from resize_soak import Soak

    report = Soak(
        tmp_path / "soak", seed=20, resizes=8, worker_kills=2, launcher_kills=1, progress=print
    ).run()
    assert not report.problems, "\n".join(report.problems)
    assert (report.resizes, report.worker_kills, report.launcher_kills) == (8, 2, 1)
    assert report.worlds >= 11
    assert report.epochs > 1
