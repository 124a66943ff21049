# SPDX-License-Identifier: Apache-2.0
"""What a user asks for: flags over a job file, checked, and made into the service's request."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from horowatt.errors import InvalidInput
from horowatt.records import BatchRule, LauncherKind
from horowatt_allocator.cli.moments import parse_deadline_s, parse_duration_s
from horowatt_allocator.cli.widths import WidthWish, legal_widths

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWish:
    """What one source says about a job; None, or empty, is not said. Fields are the flags."""

    name: str | None = None
    tenant: str | None = None
    command: tuple[str, ...] = ()
    widths: WidthWish = field(default_factory=WidthWish)
    batch_size: int | None = None
    batch_rule: str | None = None
    total_samples: int | None = None
    epochs: float | None = None
    deadline: str | None = None
    wall_time: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    working_dir: str | None = None
    venv: str | None = None
    gpu_types: tuple[str, ...] = ()
    weight: float | None = None
    flexibility: float | None = None
    attach: bool | None = None

    def over(self, base: "JobWish") -> "JobWish":
        """Return this wish completed by ``base``: what is said here wins."""
        merged: dict[str, object] = {}
        for entry in fields(self):
            mine, theirs = getattr(self, entry.name), getattr(base, entry.name)
            merged[entry.name] = theirs if mine is None or mine == () else mine
        merged["widths"] = self.widths.over(base.widths)
        merged["env"] = {**base.env, **self.env}
        if self.total_samples is not None and self.epochs is None:
            merged["epochs"] = None
        if self.epochs is not None and self.total_samples is None:
            merged["total_samples"] = None
        return JobWish(**merged)  # type: ignore[arg-type]  # each value comes from the field it goes to


def parse_environment(pairs: tuple[str, ...]) -> dict[str, str]:
    """Return the variables of ``--env NAME=VALUE``; ``--env NAME`` takes the value from here.

    Raises:
        InvalidInput: ``HW-CLI-012``.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not _VARIABLE.fullmatch(name) or (not equals and name not in os.environ):
            raise InvalidInput(
                "HW-CLI-012",
                f"--env {pair!r} cannot be used",
                because="it is not NAME=VALUE" if equals or "=" in pair else f"{name!r} is not set here",
                hint="write for example --env OMP_NUM_THREADS=4",
            )
        found[name] = value if equals else os.environ[name]
    return found


def to_request(wish: JobWish, now_s: float) -> dict[str, object]:
    """Return the body of ``POST /v1/jobs``; what was not said is left to the service.

    Raises:
        InvalidInput: ``HW-CLI-002``, ``007`` or ``008`` for what cannot be meant.
    """
    if not wish.command:
        raise InvalidInput(
            "HW-CLI-008",
            "there is no command to run",
            hint="end with it: horowatt submit --max 4 -- python train.py",
        )
    if wish.batch_rule is not None and wish.batch_rule not in set(BatchRule):
        raise InvalidInput(
            "HW-CLI-006",
            f"the batch rule {wish.batch_rule!r} is unknown",
            hint=f"one of {', '.join(BatchRule)}",
        )
    if wish.total_samples is not None and wish.epochs is not None:
        raise InvalidInput(
            "HW-CLI-006",
            "the total work is given twice",
            because="samples and epochs exclude each other",
            hint="keep one of --total-samples and --epochs",
        )
    request: dict[str, object] = {
        "name": wish.name or name_of(wish.command),
        "tenant": wish.tenant,
        "command": list(wish.command),
        "widths": ",".join(str(width) for width in legal_widths(wish.widths)),
        "batch_size": wish.batch_size,
        "batch_rule": wish.batch_rule,
        "total_samples": wish.total_samples,
        "total_epochs": wish.epochs,
        "deadline_s": None if wish.deadline is None else parse_deadline_s(wish.deadline, now_s),
        "wall_time_limit_s": None
        if wish.wall_time is None
        else parse_duration_s(wish.wall_time, "wall time"),
        "environment": dict(wish.env),
        "working_dir": wish.working_dir or str(Path.cwd()),
        "virtual_env": wish.venv if wish.venv is not None else os.environ.get("VIRTUAL_ENV"),
        "gpu_types": list(wish.gpu_types),
        "weight": wish.weight,
        "flexibility": wish.flexibility,
        "launcher": LauncherKind.ATTACHED.value if wish.attach else None,
    }
    return {key: value for key, value in request.items() if value not in (None, "", [], {})}


def name_of(command: tuple[str, ...]) -> str:
    """Return a name for a command: that of its script, else of its program."""
    script = script_of(command)
    return Path(script).stem if script else Path(command[0]).name or command[0]


def script_of(command: tuple[str, ...]) -> str | None:
    """Return the Python script that a command runs, or None when it runs none that we can see."""
    if not command:
        return None
    if not Path(command[0]).name.startswith("python"):
        return command[0] if command[0].endswith(".py") else None
    for word in command[1:]:
        if word in {"-m", "-c", "-"}:
            return None
        if not word.startswith("-"):
            return word
    return None


def local_warnings(request: Mapping[str, object]) -> list[str]:
    """Return what looks wrong from here. Only warnings: the job may run on another machine."""
    folder = Path(str(request["working_dir"]))
    command = request["command"]
    if not folder.is_dir():
        return [f"the working directory {folder} is not on this machine; the job's node must have it"]
    found = []
    script = script_of(tuple(command) if isinstance(command, list) else ())
    if script is not None and not (folder / script).is_file():
        found.append(f"there is no script {script} in {folder}")
    venv = request.get("virtual_env")
    if isinstance(venv, str) and not (Path(venv) / "bin" / "python").exists():
        found.append(f"{venv} has no bin/python, so it is not a virtual environment")
    return found
