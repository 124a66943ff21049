# SPDX-License-Identifier: Apache-2.0
"""The parts of ``horowatt demo``: the plan, the processes, the screen, the verdict.

The demo uses the same commands and calls that users do; nothing in here is a second way to anything.
"""
