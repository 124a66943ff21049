# SPDX-License-Identifier: Apache-2.0
"""Entry point: find the command, run it, turn every outcome into an exit code.

Commands live in modules of their own that are imported when they run, so that ``horowatt --help``
and shell completion stay fast.
"""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

from horowatt.errors import HorowattError
from horowatt_allocator.cli import exits

DEBUG_VARIABLE = "HOROWATT_DEBUG"


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """Where a command lives and the line that the group's help shows for it."""

    module: str
    function: str
    help: str


_HERE = "horowatt_allocator.cli"

COMMANDS: Mapping[str, CommandEntry] = {
    "submit": CommandEntry(f"{_HERE}.submit", "submit", "Hand a training job to the allocator."),
    "ps": CommandEntry(f"{_HERE}.ps", "ps", "List jobs with width, rate, power, energy and reason."),
    "logs": CommandEntry(f"{_HERE}.logs", "logs", "Show what a job printed."),
    "explain": CommandEntry(f"{_HERE}.explain", "explain", "Say what a job has, and why."),
    "cancel": CommandEntry(f"{_HERE}.cancel", "cancel", "End jobs."),
    "report": CommandEntry(f"{_HERE}.report", "report", "Write the energy report (HTML, CSV, JSON)."),
    "nodes": CommandEntry(f"{_HERE}.nodes", "nodes", "List nodes and their GPUs."),
    "serve": CommandEntry(f"{_HERE}.daemons", "serve", "Run the service (head node)."),
    "agent": CommandEntry(f"{_HERE}.daemons", "agent", "Run the agent of this node."),
    "worker": CommandEntry(
        f"{_HERE}.daemons", "worker", "Start one worker under your own horovodrun (attached jobs)."
    ),
    "doctor": CommandEntry(f"{_HERE}.doctor", "doctor", "Check this machine and say what to mend."),
    "build-horovod": CommandEntry(
        f"{_HERE}.build_horovod", "build_horovod", "Build Horovod for the installed torch."
    ),
    "demo": CommandEntry(f"{_HERE}.demo", "demo", "Show the whole path on this machine in 5 minutes."),
}


class LazyGroup(click.Group):
    """A group that imports a command when it is called, not when it is listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click fixes the signature
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import one command; None when there is none of that name."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command: click.Command = getattr(importlib.import_module(entry.module), entry.function)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from importlib.metadata import version

    click.echo(f"horowatt {version('horowatt')}")
    ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version.",
)
def cli() -> None:
    """Train with Horovod on a shared GPU cluster, sized by a linear program that counts joules.

    Exit codes: 0 done; 125 the tool or the service failed; 126 bad input or usage; 127 not found or
    not allowed; 130 interrupted. 'submit --wait' returns the job's own exit code.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never raises, never shows a traceback.

    With ``HOROWATT_DEBUG=1`` errors show their traceback as well.
    """
    _spell_what_cannot_be_encoded()
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
        code = exits.BROKEN_PIPE
    return code


def _run(argv: Sequence[str] | None) -> int:
    streams = sys.stdout, sys.stderr
    try:
        result = cli.main(args=argv, prog_name="horowatt", standalone_mode=False)
        return result if isinstance(result, int) else exits.OK
    except HorowattError as error:
        _show(error, str(error))
        return exits.code_of(error)
    except click.ClickException as error:
        _show(error, _usage_text(error))
        return exits.INVALID_INPUT
    except (click.Abort, KeyboardInterrupt):
        # Ctrl-C leaves the terminal in the middle of a line.
        click.echo("", err=True)
        return exits.INTERRUPTED
    except BrokenPipeError:
        raise
    except SystemExit as error:
        # When nobody reads the output any more, click replaces the streams and exits by itself.
        if (sys.stdout, sys.stderr) == streams:
            raise
        sys.stdout, sys.stderr = streams
        raise BrokenPipeError from error
    except Exception as error:  # noqa: BLE001 - the last line of defence against tracebacks
        _show(error, _unexpected_text(error))
        return exits.TOOL_ERROR


def _show(error: BaseException, text: str) -> None:
    if os.environ.get(DEBUG_VARIABLE, "") not in {"", "0"}:
        import traceback

        traceback.print_exception(error)
    click.echo(text, err=True)


def _usage_text(error: click.ClickException) -> str:
    lines = [f"error[HW-CLI-001]: {error.format_message()}"]
    if isinstance(error, click.UsageError) and error.ctx is not None:
        lines.append(f"  usage: {error.ctx.get_usage().removeprefix('Usage: ')}")
        lines.append(f"  try: {error.ctx.command_path} --help")
    return "\n".join(lines)


def _unexpected_text(error: Exception) -> str:
    what = " ".join(str(error).split()) or "no message"
    return str(
        HorowattError(
            "HW-CLI-000",
            "an unexpected error ended the command",
            because=f"{type(error).__name__}: {what}",
            hint=f"run it again with {DEBUG_VARIABLE}=1 and report what it shows",
        )
    )


def _spell_what_cannot_be_encoded() -> None:
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    # Python flushes stdout once more at exit and would complain about the pipe again.
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return


if __name__ == "__main__":
    sys.exit(main())
