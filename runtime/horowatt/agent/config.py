# SPDX-License-Identifier: Apache-2.0
"""How an agent is told to run."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Settings of one agent.

    Attributes:
        node: Name of this node in the inventory.
        service_socket: The service's Unix socket.
        run_dir: Where the agent keeps its state and the folders of jobs; on a local file system.
        gpu_type: Type of this node's GPUs as the inventory knows it; None takes their product name.
        simulate: Configuration of simulated GPUs to use in place of real ones, or None.
        report_every_s: Seconds between looks at GPUs and jobs, and between reports.
        close_every_s: Longest length of an energy interval, seconds.
        stop_jobs_on_exit: End all jobs of this node when the agent ends; else they go on.
    """

    node: str
    service_socket: Path
    run_dir: Path
    gpu_type: str | None
    simulate: Path | None
    report_every_s: float = 1.0
    close_every_s: float = 10.0
    stop_jobs_on_exit: bool = False
