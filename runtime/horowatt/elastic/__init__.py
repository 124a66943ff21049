# SPDX-License-Identifier: Apache-2.0
"""Elastic jobs on a node: publishing slots, the launcher, the start of workers, their counters."""
