# SPDX-License-Identifier: Apache-2.0
"""The node agent: meters GPUs, keeps jobs as the head wants them, and outlives the head's absence.

Layers, from the inside out: ``meter`` and ``holders`` decide without I/O; ``state`` and ``spool``
remember; ``processes``, ``streams``, ``jobs``, ``limits`` and ``reporter`` act; ``main`` is the loop.
"""
