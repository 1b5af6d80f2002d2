"""The storm of `diloco-cloud chaos`, written down.

    python benchmarks/storm.py [--replicas 32] [--minutes 3] [--scale 10] [--seed 0] [--round 4]

A half hour of ft-diloco's storm (28 kills, 9 partitions, 8 stops over 32 replicas) in three
minutes, on real processes, beside a fault-free run of the same fleet.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import measured

from diloco_cloud.chaos.compare import Settings, rehearse


def main() -> None:
    parser = argparse.ArgumentParser(description="A storm of faults")
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--scale", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=float, help="seconds of a round's training")
    parser.add_argument("--name", default="storm", help="of the files in results/")
    arguments = parser.parse_args()
    where = measured.machine()
    settings = Settings(
        replicas=arguments.replicas,
        seconds=60 * arguments.minutes,
        scale=arguments.scale,
        seed=arguments.seed,
        round_s=arguments.round,
    )
    with tempfile.TemporaryDirectory() as directory:
        report = rehearse(settings, directory, say=lambda line: print(line, file=sys.stderr))
    rows = [[row.what, row.ours, row.others] for row in report.rows()]
    notes = (
        f"Rounds of {report.round_s:g} s of training; {report.calm.seconds:.0f} s without faults "
        f"({report.calm.rounds:.1f} rounds), {report.storm.seconds:.0f} s with them "
        f"({report.storm.rounds:.1f} rounds), {report.scale:g} times faster than life; "
        f"seed {report.seed}. Violations: {', '.join(report.violations) or 'none'}."
    )
    text = f"{notes}\n\n{measured.table(['', 'this machine', 'others'], rows)}"
    measured.write(arguments.name, "A storm of faults", where, text, report.to_json())


if __name__ == "__main__":
    main()
