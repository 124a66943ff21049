# SPDX-License-Identifier: Apache-2.0
"""The command by which a user starts an attached job with horovodrun."""

import shlex
from collections.abc import Sequence

from horowatt_allocator.cli.views import JobView


def horovodrun_line(job: JobView, command: Sequence[str]) -> str | None:
    """Return the exact command line, quoted for a POSIX shell; None while the job has no node."""
    script = job.document.get("discovery_script")
    if not isinstance(script, str):
        return None
    widths = [width for width in job.document.get("legal_widths", []) if isinstance(width, int)] or [1]
    least, most = str(min(widths)), str(max(widths))
    words = ["horovodrun", "-np", least, "--min-np", least, "--max-np", most]
    # Without it Horovod's elastic mode waits for a second host, even where there is only one.
    words += ["--network-interface", "lo"] if job.document.get("loopback") else []
    # Horovod hands the script to a shell, so a path with spaces is quoted once for that shell as well.
    words += ["--host-discovery-script", shlex.quote(script), "horowatt", "worker", "--", *command]
    return shlex.join(words)
