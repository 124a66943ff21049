# SPDX-License-Identifier: Apache-2.0
"""How long the command line takes to start, against a bare Python.

    python bench/cli_startup.py [--rounds N]

Prints the fastest of N starts of each command and its ratio to ``python -c pass``. Client commands are
asked of a socket where nobody listens, so that their time is theirs alone.
"""

import argparse
import os
import subprocess
import sys
import time

COMMANDS = (
    ("horowatt --help", ["--help"]),
    ("horowatt submit --help", ["submit", "--help"]),
    ("horowatt ps (no service)", ["ps"]),
    ("horowatt explain (no service)", ["explain", "job"]),
    ("horowatt report (no service)", ["report"]),
)
TARGETS_MS = {"horowatt --help": 150.0}
CLIENT_TARGET_MS = 250.0


def fastest_ms(command, rounds):
    """Return the shortest wall time of several runs: the one least disturbed by the machine."""
    environment = {**os.environ, "HOROWATT_SOCKET": "/nonexistent/horowatt.sock"}
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        subprocess.run(command, env=environment, capture_output=True, check=False)
        best = min(best, time.perf_counter() - began)
    return 1000.0 * best


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    bare_ms = fastest_ms([sys.executable, "-c", "pass"], rounds)
    print(f"{'python -c pass':<32} {bare_ms:7.1f} ms   1.0 x")
    for name, arguments in COMMANDS:
        taken_ms = fastest_ms([sys.executable, "-m", "horowatt_allocator.cli.main", *arguments], rounds)
        target_ms = TARGETS_MS.get(name, CLIENT_TARGET_MS)
        print(f"{name:<32} {taken_ms:7.1f} ms {taken_ms / bare_ms:5.1f} x   target {target_ms:.0f} ms")


if __name__ == "__main__":
    main()
