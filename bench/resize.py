# SPDX-License-Identifier: Apache-2.0
"""What a resize costs, side by side with stock Horovod; and the soak.

    python bench/resize.py [--quick] [--only pause,state,ranks,commit,idle,soak] [--seed N] [--keep]

Prints one line ``figure  measured  target`` for each figure, writes ``bench/out/resize.json``, and exits 1
when one falls short. Progress goes to standard error. Everything runs on this machine and its CPUs;
the targets are meant for two idle cores. docs/benchmarks.md says how each figure is measured.
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import resize_figures as figures
from resize_figures import FULL, QUICK, Figure, Size, say
from resize_jobs import Stuck

BUSY_LOAD = 0.7
OUT = Path(__file__).parent / "out" / "resize.json"


def commit(folder: Path, size: Size) -> Iterator[Figure]:
    """How long a durable commit of 300 MB keeps training waiting, against a blocking save."""
    out = folder / "commit.json"
    # The script installs its own hooks, so it has a process of its own.
    done = subprocess.run(
        [
            *(sys.executable, str(Path(__file__).with_name("resize_commit.py"))),
            *("--json", str(out), "--rounds", "3" if size is QUICK else "7", "--folder", str(folder)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if not out.exists():
        raise Stuck(f"resize_commit.py failed\n{done.stdout}{done.stderr}")
    say(done.stdout.splitlines()[0])
    report = json.loads(out.read_text())
    times_s = report["times_s"]
    plain_s, save_s = times_s["plain_step"], statistics.median(times_s["save"])
    steps = statistics.median(times_s["durable_round"]) / statistics.median(plain_s)
    spread_s = steps * statistics.median(
        abs(one - two) for one, two in zip(plain_s[::2], plain_s[1::2], strict=True)
    )
    # A difference of rounds that differ by more anyway says nothing.
    telling = spread_s <= save_s
    for figure in report.pop("figures"):
        yield Figure(
            "training blocked by a 300 MB commit, share",
            figure["measured"] if telling else None,
            figure["target"],
            "",
            f"of a blocking save, {save_s:.2f} s"
            + ("" if telling else f"; rounds without a commit differ by {spread_s:.2f} s"),
            report,
        )


def soak(folder: Path, size: Size, seed: int) -> Iterator[Figure]:
    """Hundreds of resizes and dozens of kills of one job; every problem counts."""
    from resize_soak import Soak

    resizes, worker_kills, launcher_kills = size.soak
    report = Soak(
        folder,
        seed=seed,
        resizes=resizes,
        worker_kills=worker_kills,
        launcher_kills=launcher_kills,
        progress=say,
    ).run()
    for problem in report.problems:
        say(f"soak: {problem}")
    name = f"soak of {resizes} resizes, {worker_kills}+{launcher_kills} kills"
    yield Figure(f"{name}: problems", len(report.problems), 0, "", f"seed {seed}", asdict(report))
    yield from (Figure(f"soak: {name}", value, None, unit) for name, value, unit in report.figures())


def main() -> int:
    """Measure and print; return 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: 4 minutes instead of 25")
    parser.add_argument("--only", help="figures to measure, separated by commas")
    parser.add_argument("--seed", type=int, default=None, help="of the soak; random when not given")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the jobs")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 30)
    parts: dict[str, Callable[[Path, Size], Iterator[Figure]]] = {
        "pause": figures.pauses,
        "state": figures.large_state,
        "ranks": figures.many_ranks,
        "commit": commit,
        "idle": figures.idle,
        "soak": lambda folder, size: soak(folder, size, seed),
    }
    wanted = options.only.split(",") if options.only else list(parts)
    if unknown := set(wanted) - set(parts):
        parser.error(f"no such figure: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        say(f"warning: the load of this machine is {load:.1f} now; targets are for idle cores")
    # Jobs are ended on the way out, also when a time limit ends the bench.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    lines: list[Figure] = []
    root = Path(tempfile.mkdtemp(prefix="bench-resize-"))
    began_s = time.monotonic()
    for name in wanted:
        say(f"{name}: {(parts[name].__doc__ or 'soak').splitlines()[0]}")
        part_s = time.monotonic()
        folder = root / name
        folder.mkdir()
        try:
            for figure in parts[name](folder, size):
                print(figure.line(), flush=True)
                lines.append(figure)
        except Stuck as stuck:
            say(str(stuck))
            lines.append(Figure(f"{name}: got stuck", None, 0.0, ""))
            print(lines[-1].line(), flush=True)
        say(f"{name}: took {time.monotonic() - part_s:.0f} s")
    if options.keep:
        say(f"kept {root}")
    else:
        shutil.rmtree(root, ignore_errors=True)
    OUT.parent.mkdir(exist_ok=True)
    document = {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": sys.version},
        "load_before": load,
        "quick": options.quick,
        "seed": seed,
        "took_s": time.monotonic() - began_s,
        "figures": [{**asdict(figure), "ok": figure.ok} for figure in lines],
    }
    OUT.write_text(json.dumps(document, indent=1) + "\n")
    missed = [figure.name for figure in lines if not figure.ok]
    say(f"{len(lines) - len(missed)} of {len(lines)} figures reach their targets; details in {OUT}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
