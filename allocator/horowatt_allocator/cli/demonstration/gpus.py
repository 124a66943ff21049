# SPDX-License-Identifier: Apache-2.0
"""How many real GPUs the demo's jobs could use on this machine."""

import subprocess
import sys

from horowatt.errors import HorowattError

_TORCH_TIMEOUT_S = 120.0


def count_real_gpus() -> tuple[int, str]:
    """Return the number of GPUs that NVML and the installed torch can both use, and why it is not more."""
    from horowatt.devices.nvml import open_nvml

    try:
        with open_nvml() as nvml:
            seen = sum(not gpu.simulated for gpu in nvml.gpus())
    except HorowattError as error:
        return 0, error.message
    if seen == 0:
        return 0, "NVML sees no GPU"
    usable = _count_torch_gpus()
    return min(seen, usable), "" if usable >= seen else f"torch can use {usable} of {seen} GPUs"


def _count_torch_gpus() -> int:
    # In a process of its own: torch would open contexts on the GPUs that the jobs are to have.
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 0
    text = done.stdout.strip()
    return int(text) if done.returncode == 0 and text.isdigit() else 0
