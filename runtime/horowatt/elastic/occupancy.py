# SPDX-License-Identifier: Apache-2.0
"""Making a training step take as long as it would on the simulated GPU that the worker holds.

Work is estimated, not measured: a step costs 6 floating-point operations per parameter and sample
(2 for the forward pass, 4 for the backward pass; Kaplan et al. 2020, section 2.1, for dense layers),
and a ring allreduce sends 2(n-1)/n of the gradients' 4 bytes per parameter.

The real computation on the CPU stays. Like a real GPU, which is launched asynchronously, the simulated one
works on a step while the host prepares the next: the host runs ahead by one step and then waits. So a
worker trains at the speed of the slower of the two, and a busy machine disturbs the rates little as long
as its CPUs keep up.
"""

import math
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from horowatt.devices.simulated import SimulatedGpu

FLOP_PER_PARAMETER_AND_SAMPLE = 6.0
BYTES_PER_GRADIENT = 4.0
_now_s = time.monotonic
_sleep = time.sleep


class SimulatedOccupancy:
    """Occupies one simulated GPU with the steps of this worker."""

    def __init__(self, gpu: SimulatedGpu, world_size: Callable[[], int]) -> None:
        """Attach this process to ``gpu``.

        Args:
            world_size: Returns the present number of workers.
        """
        self._gpu = gpu
        self._world_size = world_size
        self._parameters: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._told = False
        self._busy_until_s = -math.inf
        gpu.attach()

    def after_step(self, optimizer: Any, samples: int | None) -> None:
        """Wait until the GPU is done with the step before, then occupy it with the one that just ended.

        Args:
            samples: Samples of the step; None takes it for one, and says so once.
        """
        parameters = self._count_parameters(optimizer)
        width = self._world_size()
        flop = FLOP_PER_PARAMETER_AND_SAMPLE * parameters * self._known(samples)
        link_bytes = 2.0 * (width - 1) / width * BYTES_PER_GRADIENT * parameters
        self._wait()
        self._busy_until_s = _now_s() + self._gpu.step(flop, link_bytes).total_s

    def close(self) -> None:
        """Wait for the last step and give the GPU up."""
        self._wait()
        self._gpu.detach()

    def _wait(self) -> None:
        left_s = self._busy_until_s - _now_s()
        if left_s > 0:
            _sleep(left_s)

    def _known(self, samples: int | None) -> int:
        if samples is not None:
            return samples
        if not self._told:
            self._told = True
            sys.stderr.write(
                "horowatt: the samples of a step are not known, so the simulated GPU takes each step "
                "for one sample; declare a batch size\n"
            )
        return 1

    def _count_parameters(self, optimizer: Any) -> int:
        groups = optimizer.param_groups
        known = self._parameters.get(optimizer)
        if known is not None and known[0] == len(groups):
            return known[1]
        count: int = sum(parameter.numel() for group in groups for parameter in group["params"])
        self._parameters[optimizer] = (len(groups), count)
        return count
