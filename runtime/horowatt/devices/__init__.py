# SPDX-License-Identifier: Apache-2.0
"""The device boundary: NVML, its readings, and simulated GPUs behind a real NVML library.

``reading`` says what a value or its absence is, ``nvml`` asks the driver through pynvml, and
``simulated`` builds and drives a ``libnvidia-ml.so.1`` of our own for machines without GPUs.
"""
