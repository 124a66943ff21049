# SPDX-License-Identifier: Apache-2.0
"""Horowatt on the nodes and inside the jobs: devices, agent, launcher, worker start."""

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    """Look the version up when asked: reading package metadata would slow every command's start."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("horowatt")
    except PackageNotFoundError:  # a source tree on PYTHONPATH
        return "0+unknown"
