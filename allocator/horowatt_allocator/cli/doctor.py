# SPDX-License-Identifier: Apache-2.0
"""``horowatt doctor``: what works on this machine, what does not, and what to do about it."""

import os
import sys
from pathlib import Path

import click

from horowatt_allocator.cli import exits
from horowatt_allocator.cli.connection import SOCKET_VARIABLE, default_socket, json_option, socket_option
from horowatt_allocator.cli.terminal import emit_json, is_terminal

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@click.option("--state-dir", type=click.Path(path_type=Path), help="Folder for the state to look at.")
@socket_option
@json_option
def doctor(*, state_dir: Path | None, socket_path: Path | None, as_json: bool) -> int:
    """Check Python, torch, Horovod, NVML, permissions, network and more. Takes some seconds.

    Exit code 1: something that jobs need is missing. The service is looked at when its socket is named
    or there.
    """
    from horowatt.doctor import Status, examine_each

    sought = socket_path
    if sought is None and (default_socket().exists() or os.environ.get(SOCKET_VARIABLE)):
        sought = default_socket()
    found = []
    for check in examine_each(state_dir=state_dir, socket_path=sought):
        found.append(check)
        if as_json:
            continue
        print(f"{_label(check.status)}  {check.name}: {check.found}", flush=True)
        if check.status is not Status.OK:
            code = f" [{check.code}]" if check.code else ""
            print(f"        so: {check.consequence}{code}")
            print(f"        try: {check.fix}", flush=True)
    failed = any(check.status is Status.FAIL for check in found)
    if as_json:
        emit_json({"ok": not failed, "checks": [check.to_json() for check in found]})
    return exits.CHECK_FAILED if failed else exits.OK


def _label(status: str) -> str:
    label = f"{status:>4}"
    if is_terminal(sys.stdout) and not os.environ.get("NO_COLOR"):
        return click.style(label, fg=_COLOURS.get(status))
    return label
