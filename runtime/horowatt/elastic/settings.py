# SPDX-License-Identifier: Apache-2.0
"""Numbers that an operator or a job may set in the environment of the launcher."""

import logging
import os

_log = logging.getLogger(__name__)


def seconds_of(variable: str, default_s: float) -> float:
    """Return the seconds that an environment variable names, at least 0.

    Args:
        default_s: For a variable that is not set, or that is no number, which is logged.
    """
    text = os.environ.get(variable, "")
    try:
        return max(float(text), 0.0) if text else default_s
    except ValueError:
        _log.warning("%s is not a number of seconds: %r", variable, text)
        return default_s
