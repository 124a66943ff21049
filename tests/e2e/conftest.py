# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the end-to-end tests."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster import Cluster, running_cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A running one-machine cluster; its path is short because Unix socket paths must be."""
    with tempfile.TemporaryDirectory(prefix="hw-") as folder, running_cluster(Path(folder)) as running:
        yield running
