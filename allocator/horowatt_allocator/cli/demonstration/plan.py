# SPDX-License-Identifier: Apache-2.0
"""What the demo runs: the one place with its jobs, lengths and times."""

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

from horowatt.errors import NeedsOperator

TIME_LIMIT_S = 280
"""The whole demo, from the first process to the last, ends within five minutes."""

LATER_S = 45.0
"""When the job with the deadline arrives: the first two have been measured and resized by then."""

ACCURACY_TOLERANCE = 0.03
"""How far below its solo run a job's accuracy may be.

Widths change the order of samples and, with a batch fixed per worker, the size of a step, so two runs
of one script never end with the same weights. On 359 test images an accuracy of 0.95 has a standard error
of 0.012; this is two and a half of them. A run that lost part of its data falls further.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoJob:
    """One tenant's job.

    Attributes:
        script: Name of the file in ``examples/``.
        epochs: Passes over the data; the same number is used for the solo run.
        starts_after_s: When it is submitted, from the start of training.
        deadline_s: Seconds from submission to its deadline; None for none.
    """

    tenant: str
    purpose: str
    script: str
    epochs: int
    starts_after_s: float = 0.0
    min_width: int = 1
    max_width: int = 4
    batch_size: int = 64
    deadline_s: float | None = None

    def arguments(self, checkout: Path) -> list[str]:
        """Return the script and its arguments, the same for both runs."""
        return [str(checkout / "examples" / self.script), "--epochs", str(self.epochs)]


SIMULATED_JOBS = (
    DemoJob(
        tenant="vision",
        purpose="scales well",
        script="digits_mlp.py",
        epochs=60,
    ),
    DemoJob(
        tenant="speech",
        purpose="is bound by communication",
        script="digits_wide.py",
        epochs=12,
        batch_size=16,
    ),
    DemoJob(
        tenant="search",
        purpose="arrives later with a deadline",
        script="digits_mlp.py",
        epochs=20,
        starts_after_s=LATER_S,
        max_width=2,
        deadline_s=90.0,
    ),
)

REAL_GPU_EPOCH_FACTOR = 20
"""A real GPU does in milliseconds what a simulated one takes its time for."""


def jobs_for(
    *, real_gpus: int | None, vision_epochs: int | None, speech_epochs: int | None, search_epochs: int | None
) -> tuple[DemoJob, ...]:
    """Return the jobs of this run.

    Args:
        real_gpus: Number of real GPUs that are used; None for the simulated ones.
    """
    asked = {"vision": vision_epochs, "speech": speech_epochs, "search": search_epochs}
    jobs = []
    for job in SIMULATED_JOBS:
        factor = 1 if real_gpus is None else REAL_GPU_EPOCH_FACTOR
        widest = job.max_width if real_gpus is None else min(job.max_width, real_gpus)
        jobs.append(replace(job, epochs=asked[job.tenant] or job.epochs * factor, max_width=widest))
    return tuple(jobs)


def find_checkout() -> Path:
    """Return the folder that holds ``hostfiles/`` and ``examples/``.

    Raises:
        NeedsOperator: ``HW-DEMO-001`` when there is none around this package or this folder.
    """
    around = [*Path(__file__).resolve().parents, Path.cwd(), *Path.cwd().parents]
    for folder in around:
        if (folder / "hostfiles" / "demo.toml").is_file() and (
            folder / "examples" / "digits_mlp.py"
        ).is_file():
            return folder
    raise NeedsOperator(
        "HW-DEMO-001",
        "the demo's inventory and example scripts are not here",
        because="they belong to the source tree, not to the installed package",
        hint="run the demo in a clone of Horowatt, or with that clone as the current folder",
    )


def check_requirements() -> None:
    """Check that this Python has what the jobs import.

    Raises:
        NeedsOperator: ``HW-DEMO-002`` names everything that is missing and how to get it.
    """
    needed = {
        "torch": "pip install torch",
        "horovod": "horowatt build-horovod",
        "sklearn": "pip install scikit-learn",
        "fastapi": "pip install 'horowatt[head]'",
        "rich": "pip install 'horowatt[head]'",
    }
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise NeedsOperator(
            "HW-DEMO-002",
            f"this Python lacks {', '.join(missing)}",
            because="the demo trains real PyTorch jobs with Horovod",
            hint="; ".join(dict.fromkeys(needed[name] for name in missing)),
        )
