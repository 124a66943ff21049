# SPDX-License-Identifier: Apache-2.0
"""``horowatt cancel``: end jobs."""

from pathlib import Path

import click

from horowatt.client import ServiceClient
from horowatt.errors import NotAllowed, NotFound
from horowatt_allocator.cli import exits
from horowatt_allocator.cli.connection import default_socket, json_option, socket_option
from horowatt_allocator.cli.terminal import emit_json, say
from horowatt_allocator.cli.views import JobView, send


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@socket_option
@json_option
def cancel(*, jobs: tuple[str, ...], socket_path: Path | None, as_json: bool) -> int:
    """End jobs. Ending a job that has ended already changes nothing.

    All jobs are tried; the exit code is that of the last one that could not be ended.
    """
    client = ServiceClient(socket_path or default_socket())
    code = exits.OK
    views: list[JobView] = []
    failed: dict[str, dict[str, object]] = {}
    for job_id in dict.fromkeys(jobs):
        try:
            view = JobView.from_json(send(client, "POST", f"/v1/jobs/{job_id}/cancel"))
        except (NotFound, NotAllowed) as error:
            say(str(error))
            code = exits.code_of(error)
            failed[job_id] = error.to_problem()
            continue
        views.append(view)
        if not as_json:
            print(f"{view.job_id}  {view.shown_name}: {view.phase}", flush=True)
    if as_json:
        emit_json({"jobs": [view.document for view in views], "errors": failed})
    return code
