# SPDX-License-Identifier: Apache-2.0
"""Order of the tests, and which of them this user can run."""

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the fast tests first: what they find need not wait for the real Horovod processes."""
    items.sort(key=lambda item: item.get_closest_marker("horovod") is not None)
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root") is not None:
                item.add_marker(pytest.mark.skip(reason="needs root"))
