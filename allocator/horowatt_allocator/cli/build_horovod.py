# SPDX-License-Identifier: Apache-2.0
"""``horowatt build-horovod``: a Horovod for the torch of this Python."""

from pathlib import Path

import click

from horowatt_allocator.cli import exits
from horowatt_allocator.cli.connection import json_option
from horowatt_allocator.cli.terminal import emit_json, say


@click.command("build-horovod")
@click.option("--force", is_flag=True, help="Build again although the cache has it.")
@click.option("--install/--no-install", default=True, show_default=True, help="Install it into this Python.")
@click.option("--cache-dir", type=click.Path(path_type=Path, file_okay=False), help="Where wheels are kept.")
@click.option("--jobs", "-j", type=click.IntRange(min=1), help="Compilers at a time [default: by memory].")
@json_option
def build_horovod(
    *, force: bool, install: bool, cache_dir: Path | None, jobs: int | None, as_json: bool
) -> int:
    """Build Horovod for the installed torch, keep it in a cache, and install it.

    Takes some minutes the first time and seconds afterwards. Run it with the Python of the training
    environment.
    """
    from horowatt import horovod_build

    result = horovod_build.run(force=force, install=install, cache_dir=cache_dir, jobs=jobs, say=say)
    if as_json:
        emit_json(result.to_json())
    else:
        print(result.wheel)
    return exits.OK
