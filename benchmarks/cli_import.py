"""How long `diloco-cloud --help` keeps a user waiting, against the libraries it stands on.

    python benchmarks/cli_import.py [--runs 21]

Each line is a fresh interpreter, one after the other in turns, so that a slow moment of the machine
falls on all of them. Times are of the whole process; the ratio is to a bare interpreter.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time

PROGRAMS = {
    "bare interpreter": ["-c", "pass"],
    "import click": ["-c", "import click"],
    "import diloco_cloud": ["-c", "import diloco_cloud"],
    "diloco-cloud --help": ["-m", "diloco_cloud.cli.main", "--help"],
    "import torch": ["-c", "import torch"],
}


def seconds(arguments: list[str]) -> float:
    """Wall time of one interpreter."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="Start-up time of the command line")
    parser.add_argument("--runs", type=int, default=21, help="of each program; default 21")
    runs = parser.parse_args().runs
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for arguments in PROGRAMS.values():
        seconds(arguments)
    for _ in range(runs):
        for name, arguments in PROGRAMS.items():
            times[name].append(seconds(arguments))
    bare = statistics.median(times["bare interpreter"])
    print(f"{platform.platform()}, Python {platform.python_version()}, {runs} runs each\n")
    print("| program | median ms | min | max | over bare |")
    print("|---|---|---|---|---|")
    for name, measured in times.items():
        median = statistics.median(measured)
        low, high = min(measured) * 1e3, max(measured) * 1e3
        print(f"| {name} | {median * 1e3:.0f} | {low:.0f} | {high:.0f} | {median / bare:.1f} |")


if __name__ == "__main__":
    main()
