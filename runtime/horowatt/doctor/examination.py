# SPDX-License-Identifier: Apache-2.0
"""Runs all checks; one that breaks is reported like one that failed."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from horowatt.doctor import gpus, machine, software
from horowatt.doctor.record import Check, failure

Found = Check | tuple[Check, ...]


def examine(*, state_dir: Path | None = None, socket_path: Path | None = None) -> tuple[Check, ...]:
    """Look at this machine and this Python environment. Takes some seconds; never raises.

    Args:
        state_dir: Folder that a service or agent would keep its state in; None is the user's own.
        socket_path: Socket of the service; None leaves that check out.
    """
    return tuple(examine_each(state_dir=state_dir, socket_path=socket_path))


def examine_each(*, state_dir: Path | None = None, socket_path: Path | None = None) -> Iterator[Check]:
    """Yield each check as soon as it is done; see ``examine``."""
    folder = state_dir if state_dir is not None else default_state_dir()
    checks: list[tuple[str, Callable[[], Found]]] = [
        ("python", software.check_python),
        ("platform", software.check_platform),
        ("horovod", software.check_horovod),
        ("build-tools", software.check_build_tools),
        ("nvml", gpus.check_nvml),
        ("simulated-gpus", software.check_simulation_tools),
        ("device-isolation", gpus.check_isolation),
        ("ssh", machine.check_ssh),
        ("ports", machine.check_network),
        ("clock", machine.check_clock),
        ("state-folder", lambda: machine.check_disk(folder)),
        ("open-files", machine.check_open_files),
    ]
    if socket_path is not None:
        checks.append(("service", lambda: machine.check_service(socket_path)))
    for name, check in checks:
        yield from guarded(name, check)


def guarded(name: str, check: Callable[[], Found]) -> tuple[Check, ...]:
    """Run one check; whatever it raises becomes a failed check that names the error."""
    try:
        found = check()
    except Exception as error:  # noqa: BLE001 - a broken check must not hide the others
        return (
            failure(
                name,
                "HW-DOC-099",
                f"this check itself broke: {type(error).__name__}: {error}",
                "what it was to look at is unknown",
                "please report it, with the output of 'horowatt doctor --json'",
            ),
        )
    return (found,) if isinstance(found, Check) else found


def default_state_dir() -> Path:
    """Return the folder that programs of this user keep their state in."""
    base = os.environ.get("XDG_STATE_HOME", "")
    root = Path(base) if base.startswith("/") else Path(os.path.expanduser("~/.local/state"))  # noqa: PTH111
    return root / "horowatt"
