"""What the fast replicas lose to a slow one.

    python benchmarks/heterogeneous.py [--seconds 60] [--step 0.05] [--seed 0]

Three replicas, each at the pace of an accelerator of its own; then the same three with a fourth
that is four times slower; then those four with a quorum of everyone, which waits for the slowest.
What counts is the tokens of the three fast ones that are merged per second.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import measured

from diloco_cloud.chaos.referee import Verdict, judge
from diloco_cloud.chaos.rehearsal import Fleet, Rehearsal
from diloco_cloud.chaos.report import verdict_json
from diloco_cloud.chaos.warm import WarmProcessExecutor

FAST: Final = 3
SLOWNESS: Final = 4.0
ALONE: Final = Fleet(replicas=FAST, sync_every=100)
MIXED: Final = replace(ALONE, replicas=FAST + 1, trainer_args={"slow": {str(FAST): SLOWNESS}})
FLEETS: Final = {
    "three fast": ALONE,
    "and a slow one": MIXED,
    "and a slow one, quorum all": replace(MIXED, quorum=FAST + 1),
}


def fast_tokens_per_s(verdict: Verdict) -> float:
    """Merged tokens of the fast replicas."""
    return sum(verdict.tokens_by_rank.get(r, 0.0) for r in range(FAST)) / verdict.seconds


def measure(seconds: float, step_s: float, seed: int, directory: Path) -> dict[str, Verdict]:
    """One verdict for each fleet."""
    verdicts = {}
    with WarmProcessExecutor(directory / "processes") as executor:
        for number, (name, fleet) in enumerate(FLEETS.items()):
            fleet = replace(fleet, step_s=step_s, seed=seed)
            with Rehearsal(f"fleet-{number}", fleet, executor, directory) as rehearsal:
                rehearsal.gather()
                window = rehearsal.measure(seconds)
                verdicts[name] = judge(rehearsal.end(), window)
    return verdicts


def page(verdicts: dict[str, Verdict]) -> str:
    """What was found."""
    alone = fast_tokens_per_s(verdicts["three fast"])
    rows: list[list[Any]] = [
        [
            name,
            f"{fast_tokens_per_s(verdict):.0f}",
            f"{fast_tokens_per_s(verdict) / alone:.1%}",
            f"{verdict.tokens_by_rank.get(FAST, 0.0) / verdict.seconds:.0f}",
            f"{verdict.rounds_per_s:.3f}",
            f"{verdict.participation:.2f}",
            len(verdict.violations),
        ]
        for name, verdict in verdicts.items()
    ]
    header = ["fleet", "fast, tokens/s", "of alone", "slow, tokens/s", "rounds/s", "in a round"]
    return measured.table([*header, "rule violations"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="A fleet with a slow replica")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each fleet")
    parser.add_argument("--step", type=float, default=0.05, help="seconds of an inner step")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    where = measured.machine()
    with tempfile.TemporaryDirectory() as directory:
        verdicts = measure(arguments.seconds, arguments.step, arguments.seed, Path(directory))
    notes = (
        f"H = {ALONE.sync_every}, steps of {1e3 * arguments.step:.0f} ms, of the slow one "
        f"{1e3 * SLOWNESS * arguments.step:.0f} ms; {arguments.seconds:.0f} s of each fleet."
    )
    measured.write(
        "heterogeneous",
        "A slow replica among fast ones",
        where,
        f"{notes}\n\n{page(verdicts)}",
        {"fleets": {name: verdict_json(verdict) for name, verdict in verdicts.items()}},
    )


if __name__ == "__main__":
    main()
