# SPDX-License-Identifier: Apache-2.0
"""``horowatt submit``: hand a job to the allocator, and wait for it if asked to."""

import time
from pathlib import Path

import click

from horowatt.client import ServiceClient
from horowatt.records import BatchRule
from horowatt_allocator.cli import exits
from horowatt_allocator.cli.attach import horovodrun_line
from horowatt_allocator.cli.connection import default_socket, json_option, socket_option
from horowatt_allocator.cli.job_file import read_job_file
from horowatt_allocator.cli.job_wish import JobWish, local_warnings, parse_environment, to_request
from horowatt_allocator.cli.terminal import emit_json, say
from horowatt_allocator.cli.views import JobView, send
from horowatt_allocator.cli.waiting import POLL_S, wait_until_ended
from horowatt_allocator.cli.widths import WidthWish, parse_list

_EXAMPLES = """\b
Examples:
  horowatt submit --max 8 --batch-size 64 --epochs 90 -- python train.py --epochs 90
  horowatt submit --file job.toml --deadline 6h
  horowatt submit --min 2 --max 4 --attach -- python train.py
"""
_SLOTS_TIMEOUT_S = 15.0
"""How long ``--attach`` waits for the discovery script before it says where to find it later."""


@click.command(epilog=_EXAMPLES, context_settings={"allow_interspersed_args": False})
@click.option("--file", "-f", "file", type=click.Path(path_type=Path), help="Job as TOML; flags win over it.")
@click.option("--name", help="Name of the job [default: that of its script].")
@click.option("--tenant", help="Who the job and its energy belong to [default: your user name].")
@click.option("--min", "minimum", type=int, help="Fewest workers.")
@click.option("--max", "maximum", type=int, help="Most workers.")
@click.option("--width-step", type=int, help="Only every n-th width from --min on.")
@click.option("--powers-of-two", is_flag=True, default=None, help="Only widths 1, 2, 4, 8 ...")
@click.option("--widths", help="Exactly these widths, such as 1,2,4.")
@click.option("--batch-size", type=int, help="Batch of one worker, or of all by --batch-rule.")
@click.option(
    "--batch-rule",
    type=click.Choice([rule.value for rule in BatchRule]),
    help="What stays when the width changes.",
)
@click.option("--total-samples", type=int, help="Total work in samples, when known.")
@click.option("--epochs", type=float, help="Total work in epochs, when known.")
@click.option("--deadline", help="Done by then: 2h from now, or 2026-03-01T18:00+01:00.")
@click.option("--wall-time", help="Longest time it may run, such as 12h.")
@click.option("--env", "env", multiple=True, help="NAME=VALUE, or NAME to pass yours on. Repeatable.")
@click.option("--working-dir", help="Folder it runs in [default: this one].")
@click.option("--venv", help="Virtual environment whose python runs it [default: the active one].")
@click.option(
    "--gpu-type", "gpu_types", multiple=True, help="GPU type it accepts. Repeatable [default: all]."
)
@click.option("--weight", type=float, help="Weight of its progress against other jobs.")
@click.option(
    "--flexibility",
    type=float,
    help="Share of its rate it would give up, 0 to 1 (recorded; no decision uses it yet).",
)
@click.option("--attach", is_flag=True, default=None, help="Start it with your own horovodrun.")
@click.option("--wait", is_flag=True, help="Wait for its end and return its exit code.")
@click.option("--quiet", "-q", is_flag=True, help="Print only the job's id.")
@click.option("--idempotency-key", help="Sending the same job with the same key again makes no second one.")
@socket_option
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def submit(
    *,
    file: Path | None,
    minimum: int | None,
    maximum: int | None,
    width_step: int | None,
    powers_of_two: bool | None,
    widths: str | None,
    env: tuple[str, ...],
    working_dir: str | None,
    venv: str | None,
    wait: bool,
    quiet: bool,
    idempotency_key: str | None,
    socket_path: Path | None,
    as_json: bool,
    **flags: object,
) -> int:
    """Hand a training job to the allocator.

    The command comes last, after '--', and is never passed through a shell. With
    --wait the exit code is the job's own; the tool's errors are 125 and up.
    """
    given = JobWish(
        widths=WidthWish(
            minimum=minimum,
            maximum=maximum,
            step=width_step,
            powers_of_two=powers_of_two,
            listed=None if widths is None else parse_list(widths),
        ),
        env=parse_environment(env),
        working_dir=None if working_dir is None else _absolute(working_dir),
        venv=_absolute(venv) if venv else venv,
        **flags,  # type: ignore[arg-type]  # click made each value of the type its option declares
    )
    wish = given if file is None else given.over(read_job_file(file))
    request = to_request(wish, time.time())
    if wish.widths.is_empty and not quiet:
        say("note: no widths were given, so the job stays at 1 worker; --max N lets it grow")
    for warning in local_warnings(request):
        say(f"warning: {warning}")
    client = ServiceClient(socket_path or default_socket())
    headers = {"idempotency-key": idempotency_key} if idempotency_key else None
    job = JobView.from_json(send(client, "POST", "/v1/jobs", body=request, headers=headers))
    _announce(client, job, wish, as_json=as_json and not wait, quiet=quiet, to_stderr=as_json)
    if not wait:
        return exits.OK
    return _wait(client, job, as_json=as_json, quiet=quiet)


def _absolute(folder: str) -> str:
    return str(Path(folder).expanduser().absolute())


def _announce(
    client: ServiceClient, job: JobView, wish: JobWish, *, as_json: bool, quiet: bool, to_stderr: bool
) -> None:
    show = say if to_stderr else print
    if quiet and not as_json:
        show(job.job_id)
        return
    line: str | None = None
    if wish.attach:
        job = _with_script(client, job)
        line = horovodrun_line(job, wish.command)
    if as_json:
        emit_json({"job": job.document} | ({"horovodrun": line} if wish.attach else {}))
        return
    show(f"{job.job_id}  {job.shown_name}: {job.reason_text}")
    if wish.attach and line is None:
        say(f"it has no slots yet; 'horowatt explain {job.job_id}' shows how to start it once it has")
    elif line is not None:
        say(f"start it yourself on node {job.document.get('home_node')}:\n  {line}")


def _with_script(client: ServiceClient, job: JobView) -> JobView:
    """Return the job once its node is known and so its discovery script, or as it is after a while."""
    end_s = time.monotonic() + _SLOTS_TIMEOUT_S
    while job.document.get("discovery_script") is None and not job.ended and time.monotonic() < end_s:
        time.sleep(POLL_S)
        job = JobView.from_json(send(client, "GET", f"/v1/jobs/{job.job_id}"))
    return job


def _wait(client: ServiceClient, job: JobView, *, as_json: bool, quiet: bool) -> int:
    say_progress = (lambda _: None) if quiet else say
    try:
        ended = wait_until_ended(client, job.job_id, say_progress)
    except KeyboardInterrupt:
        say(f"\nno longer waiting; the job goes on: horowatt logs -f {job.job_id}")
        say(f"  to end it: horowatt cancel {job.job_id}")
        return exits.INTERRUPTED
    code = exits.code_of_job(ended.phase, ended.exit_code)
    if as_json:
        emit_json({"job": ended.document, "exit_code": code})
    if code != exits.OK:
        say(f"error[HW-CLI-011]: job {ended.job_id} ({ended.shown_name}) is {ended.phase}")
        say(f"  because: {ended.reason_text}")
        say(f"  try: horowatt logs {ended.job_id}")
    return code
