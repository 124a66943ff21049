# SPDX-License-Identifier: Apache-2.0
"""Making a training step take as long as it would on the simulated GPU that the worker holds.

Work is estimated, not measured: a step costs 6 floating-point operations per parameter and sample
(2 for the forward pass, 4 for the backward pass; Kaplan et al. 2020, section 2.1, for dense layers),
and a ring allreduce sends 2(n-1)/n of the gradients' 4 bytes per parameter. The real computation on
the CPU stays; the device's time comes on top of it.
"""

import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from horowatt.devices.simulated import SimulatedGpu

FLOP_PER_PARAMETER_AND_SAMPLE = 6.0
BYTES_PER_GRADIENT = 4.0


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
        gpu.attach()

    def after_step(self, optimizer: Any, samples: int | None) -> None:
        """Occupy the GPU with the step that just ended, and wait until it would be over.

        Args:
            samples: Samples of the step; None takes it for one, and says so once.
        """
        parameters = self._count_parameters(optimizer)
        width = self._world_size()
        flop = FLOP_PER_PARAMETER_AND_SAMPLE * parameters * self._known(samples)
        link_bytes = 2.0 * (width - 1) / width * BYTES_PER_GRADIENT * parameters
        time.sleep(self._gpu.step(flop, link_bytes).total_s)

    def close(self) -> None:
        """Give the GPU up."""
        self._gpu.detach()

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
