# SPDX-License-Identifier: Apache-2.0
"""What a deadline asks of a job's rate."""

from horowatt_allocator.records.jobs import Job

MARGIN = 1.05
"""Rates are known to about 5 %; a deadline is to be met in spite of that."""


def needed_rate_per_s(job: Job, now: float) -> float | None:
    """Return the rate that meets the job's deadline, samples per second.

    None without a deadline, after it, or while the work left is not known: then no width is better
    than another for it.
    """
    deadline_s, remaining = job.spec.deadline_s, job.remaining_samples
    if deadline_s is None or remaining is None or deadline_s <= now:
        return None
    return MARGIN * remaining / (deadline_s - now)
