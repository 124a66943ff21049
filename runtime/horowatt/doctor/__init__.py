# SPDX-License-Identifier: Apache-2.0
"""Looks at a machine and says what works, what does not because of what, and what to do about it.

A check never changes anything and never takes the others down: what may crash or hang is looked at
in a process of its own, with a time limit.
"""

from horowatt.doctor.examination import examine, examine_each
from horowatt.doctor.record import Check, Status

__all__ = ["Check", "Status", "examine", "examine_each"]
