# SPDX-License-Identifier: Apache-2.0
"""The agent's run directory: made, checked, held by one agent only; simulated GPUs if asked for."""

import fcntl
import os
import stat
from pathlib import Path

from horowatt.agent.config import AgentConfig
from horowatt.devices.nvml import LIBRARY_VARIABLE
from horowatt.devices.simulated import (
    STATE_VARIABLE,
    SimulatorConfig,
    build_library,
    create_state,
    simulation_environment,
)
from horowatt.errors import NeedsOperator, RetryLater

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def prepare_run_dir(path: Path) -> None:
    """Make the run directory, which users may enter but only the agent may change.

    Raises:
        NeedsOperator: ``HW-AGENT-002`` when it cannot be made or others could change it.
    """
    hint = "name another directory with --run-dir, or correct its owner and mode"
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise NeedsOperator(
            "HW-AGENT-002",
            f"the run directory {path} cannot be used",
            because=error.strerror or str(error),
            hint=hint,
            fields={"path": str(path)},
        ) from error
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
        raise NeedsOperator(
            "HW-AGENT-002",
            f"the run directory {path} cannot be used",
            because="another user owns it or may write to it, and could so take over jobs",
            hint=hint,
            fields={"path": str(path)},
        )


def lock_run_dir(path: Path) -> int:
    """Take the run directory for the life of this process; no child inherits the lock.

    Raises:
        RetryLater: ``HW-AGENT-001`` when another agent has it.
    """
    descriptor = os.open(path / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise RetryLater(
            "HW-AGENT-001",
            f"another agent uses the run directory {path}",
            because=f"process {holder} holds its lock" if holder else "its lock is held",
            hint="stop that agent, or give this one a directory of its own with --run-dir",
            fields={"path": str(path)},
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def simulate_gpus(config: AgentConfig, run_dir: Path) -> None:
    """Make simulated GPUs this process's own, as its environment says from then on.

    Library and state lie in the run directory, where the workers of all users can reach them.

    Raises:
        HorowattError: as the simulator says.
    """
    if config.simulate is None:
        return
    folder = run_dir / "simulator"
    folder.mkdir(mode=0o755, exist_ok=True)
    folder.chmod(0o755)
    library = build_library(folder)
    state = folder / "state"
    # An agent that is not root owns this simulation all the same, so it may set limits in it.
    create_state(
        SimulatorConfig.load(config.simulate),
        state,
        config.node,
        library=library,
        allow_nonroot=os.geteuid() != 0,
    )
    os.environ.update(simulation_environment(library, state))


def passed_environment() -> dict[str, str]:
    """Return the variables by which launchers and workers find the same GPUs as this agent."""
    return {name: os.environ[name] for name in (LIBRARY_VARIABLE, STATE_VARIABLE) if name in os.environ}
