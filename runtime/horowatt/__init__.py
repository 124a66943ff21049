# SPDX-License-Identifier: Apache-2.0
"""Horowatt on the nodes and inside the jobs: devices, agent, launcher, worker start."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("horowatt")
except PackageNotFoundError:  # a source tree on PYTHONPATH
    __version__ = "0+unknown"

__all__ = ["__version__"]
