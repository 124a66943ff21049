# SPDX-License-Identifier: Apache-2.0
"""``horowatt serve``, ``agent`` and ``worker``: the long-lived processes."""

import os
from pathlib import Path

import click

from horowatt.errors import InvalidInput, NeedsOperator
from horowatt_allocator.cli.connection import SYSTEM_SOCKET, default_socket, socket_option, user_socket

_MAX_PORT = 65_535


def own_socket() -> Path:
    """Return where a service of this user listens by default."""
    return SYSTEM_SOCKET if os.geteuid() == 0 else user_socket() or SYSTEM_SOCKET


def own_state_dir() -> Path:
    """Return where a service of this user keeps its database by default."""
    if os.geteuid() == 0:
        return Path("/var/lib/horowatt")
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "horowatt"


def own_run_dir() -> Path:
    """Return where an agent of this user keeps the jobs' folders by default."""
    return Path("/var/lib/horowatt-agent") if os.geteuid() == 0 else own_state_dir() / "agent"


def parse_http(text: str) -> tuple[str, int | None]:
    """Return host and port of ``HOST:PORT``; the port of ``off`` is None.

    Raises:
        InvalidInput: ``HW-CLI-013`` for anything else.
    """
    if text == "off":
        return "127.0.0.1", None
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > _MAX_PORT:
        raise InvalidInput(
            "HW-CLI-013",
            f"--http {text!r} cannot be used",
            because="it is neither HOST:PORT nor 'off'",
            hint="write for example --http 127.0.0.1:9477",
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


@click.command()
@click.option(
    "--inventory", type=click.Path(path_type=Path), required=True, help="The cluster: TOML or hosts."
)
@click.option("--config", type=click.Path(path_type=Path), help="Tenants, policy and operators (TOML).")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Folder of the database.")
@click.option(
    "--http",
    metavar="HOST:PORT",
    default="127.0.0.1:9477",
    show_default=True,
    help="Read-only HTTP on loopback; 'off' for none, port 0 for a free one.",
)
@socket_option
def serve(
    *, inventory: Path, config: Path | None, state_dir: Path | None, http: str, socket_path: Path | None
) -> int:
    """Run the service on the head node until it is told to end; jobs go on without it."""
    host, port = parse_http(http)
    try:
        from horowatt_allocator.service.main import ServeConfig, run
    except ImportError as error:
        if (error.name or "").startswith("horowatt"):
            raise
        raise _not_installed("the service", error) from error
    return run(
        ServeConfig(
            state_dir=state_dir or own_state_dir(),
            socket_path=socket_path or own_socket(),
            inventory_path=inventory,
            config_path=config,
            http_host=host,
            http_port=port,
        )
    )


@click.command()
@click.option("--node", required=True, help="Name of this node in the inventory.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Folder of the jobs on this node.")
@click.option("--gpu-type", help="Type of its GPUs [default: NVML's product name].")
@click.option(
    "--simulate",
    type=click.Path(path_type=Path),
    metavar="TOML",
    help="Simulated GPUs, described in this file.",
)
@click.option("--stop-jobs", is_flag=True, help="End the jobs of this node when the agent ends.")
@socket_option
def agent(
    *,
    node: str,
    run_dir: Path | None,
    gpu_type: str | None,
    simulate: Path | None,
    stop_jobs: bool,
    socket_path: Path | None,
) -> int:
    """Run the agent of this node until it is told to end; jobs go on without it, unless --stop-jobs."""
    from horowatt.agent.main import AgentConfig, run

    return run(
        AgentConfig(
            node=node,
            service_socket=socket_path or default_socket(),
            run_dir=run_dir or own_run_dir(),
            gpu_type=gpu_type,
            simulate=simulate,
            stop_jobs_on_exit=stop_jobs,
        )
    )


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--job-dir", type=click.Path(path_type=Path), help="The job's folder [default: the script's].")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def worker(*, job_dir: Path | None, command: tuple[str, ...]) -> int:
    """Start one worker of an attached job; your own horovodrun calls this.

    horovodrun --host-discovery-script SCRIPT horowatt worker -- python train.py
    """
    from horowatt.elastic.attached import main

    options = [] if job_dir is None else ["--job-dir", str(job_dir)]
    return main([*options, "--", *command])


def _not_installed(what: str, error: ImportError) -> NeedsOperator:
    return NeedsOperator(
        "HW-CLI-009",
        f"{what} cannot run here",
        because=f"{error.name or error} is not installed; it belongs to the head node's part of Horowatt",
        hint="pip install 'horowatt[head]'",
    )
