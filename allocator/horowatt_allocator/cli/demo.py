# SPDX-License-Identifier: Apache-2.0
"""``horowatt demo``: the main job with real processes, in five minutes, on this machine."""

from pathlib import Path

import click

from horowatt_allocator.cli.connection import json_option
from horowatt_allocator.cli.demonstration.plan import TIME_LIMIT_S, check_requirements


@click.command()
@click.option(
    "--real-gpus/--simulate", "real_gpus", default=None, help="[default: real ones if there are two]"
)
@click.option("--keep", is_flag=True, help="Keep the folder with logs and database.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo-out"),
    show_default=True,
    help="Folder for the energy report.",
)
@click.option("--time-limit", type=float, default=TIME_LIMIT_S, show_default=True, help="Seconds.")
@click.option("--vision-epochs", type=click.IntRange(min=1), help="Length of the job that scales well.")
@click.option("--speech-epochs", type=click.IntRange(min=1), help="Length of the communication-bound job.")
@click.option("--search-epochs", type=click.IntRange(min=1), help="Length of the job with the deadline.")
@json_option
def demo(
    *, real_gpus: bool | None, keep: bool, out: Path, time_limit: float, as_json: bool, **epochs: int | None
) -> int:
    """Show the whole path: submit, size, resize live, account for every joule.

    Starts a service and an agent, lets three tenants submit PyTorch jobs, and shows what the
    allocator does with them and why. Ends within five minutes and leaves no process behind, also on
    Ctrl-C. Exit code 1: a job failed or lost accuracy, none was both grown and shrunk, or the energy
    does not add up.
    """
    check_requirements()
    from horowatt_allocator.cli.demonstration.run import Demo, DemoOptions
    from horowatt_allocator.cli.demonstration.screen import Screen, stream_for

    options = DemoOptions(
        real_gpus=real_gpus, keep=keep, as_json=as_json, out=out.absolute(), time_limit_s=time_limit,
        vision_epochs=epochs["vision_epochs"], speech_epochs=epochs["speech_epochs"],
        search_epochs=epochs["search_epochs"],
    )  # fmt: skip
    with Screen(stream_for(as_json)) as screen:
        return Demo(options, screen).run()
