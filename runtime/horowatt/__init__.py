# SPDX-License-Identifier: Apache-2.0
"""Horowatt on the nodes and inside the jobs: devices, agent, launcher, worker start.

For training scripts: ``horowatt.on_leave``, and ``horowatt.training`` for those that need more than Horovod's
own sampler.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horowatt.elastic.leaving import on_leave

__all__ = ["__version__", "on_leave"]


def __getattr__(name: str) -> Any:
    """Look names up when asked: what scripts need would slow every command's start."""
    if name == "on_leave":
        from horowatt.elastic.leaving import on_leave

        return on_leave
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("horowatt")
    except PackageNotFoundError:  # a source tree on PYTHONPATH
        return "0+unknown"
