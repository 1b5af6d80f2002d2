"""Whether it matters who does the work, and when: replicas that come and go, uploads that are lost.

    python benchmarks/elastic.py [--rounds 80] [--seeds 0 1 2]

The merged model's loss as a function of merged tokens, of four replicas throughout; of four, then
eight, then four again, with real processes that start and are cancelled in mid-run; and of four
half of whose contributions to each round are lost at random. The model and the language are
small, and the language's entropy is known, so that the part of the loss that a model can do
something about is told apart from the part that it cannot.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import measured

from diloco_cloud.chaos.evidence import Evidence
from diloco_cloud.chaos.referee import judge
from diloco_cloud.chaos.rehearsal import Fleet, Rehearsal
from diloco_cloud.chaos.warm import WarmProcessExecutor

FEW: Final = 4
MANY: Final = 8
BATCH: Final = 64
#: An inner step takes so long that eight replicas leave the machine time for everything else.
STEADY: Final = Fleet(replicas=FEW, sync_every=20, step_s=0.01, supervision_s=0.2)
#: In every sixth round nobody gets in who was in the last one: to the rest that looks as if all
#: had died, and were about to begin again.
LOSSY: Final = replace(STEADY, grace_s=0.1, join_s=1.0, trainer_args={"lose": 0.5})
PATIENCE_S: Final = 120.0


@dataclass(frozen=True)
class Curve:
    """Loss by merged tokens.

    Attributes:
        points: (tokens, loss in nats per token), by tokens.
        violations: of the run.
        breadths: contributors of each round.
    """

    points: tuple[tuple[float, float], ...]
    violations: tuple[str, ...]
    breadths: tuple[int, ...]

    @property
    def tokens(self) -> float:
        return self.points[-1][0]

    def at(self, tokens: float) -> float:
        """Loss after so many merged tokens, between two rounds linearly."""
        for (x0, y0), (x1, y1) in itertools.pairwise(self.points):
            if x0 <= tokens <= x1:
                return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)
        raise ValueError(f"{tokens} tokens are outside the run")


def curve(evidence: Evidence) -> Curve:
    """The loss curve of a run."""
    entries = [evidence.entries[round_] for round_ in sorted(evidence.entries)]
    committed = [e.commit for e in entries if e.commit.decision == "commit"]
    merged = [0, *itertools.accumulate(sum(c.tokens for c in x.contributors) for x in committed)]
    losses = {int(seen["val_step"]): seen["val_loss"] for seen in evidence.metrics}
    return Curve(
        tuple((float(merged[step]), losses[step]) for step in sorted(losses)),
        judge(evidence, (entries[0].time, entries[-1].time)).violations,
        tuple(len(commit.contributors) for commit in committed),
    )


def run(name: str, fleet: Fleet, tokens: float, executor: WarmProcessExecutor, at: Path) -> Curve:
    """A run of so many merged tokens, with the same replicas throughout."""
    with Rehearsal(name, fleet, executor, at) as rehearsal:
        rehearsal.chronicle.await_(lambda: merged_tokens(rehearsal) >= tokens, PATIENCE_S)
        return curve(rehearsal.end())


def run_elastic(fleet: Fleet, tokens: float, executor: WarmProcessExecutor, at: Path) -> Curve:
    """A run that has more replicas in its middle third, by tokens."""
    with Rehearsal("elastic", fleet, executor, at) as rehearsal:

        def reach(part: float) -> None:
            there = rehearsal.chronicle.await_(
                lambda: merged_tokens(rehearsal) >= part * tokens, PATIENCE_S
            )
            assert there, "the run has come to a halt"

        reach(1 / 3)
        rehearsal.run.resume(replicas=MANY)
        rehearsal.gather(MANY)
        reach(2 / 3)
        rehearsal.run.cancel(range(FEW, MANY))
        reach(1)
        return curve(rehearsal.end())


def merged_tokens(rehearsal: Rehearsal) -> int:
    """Tokens merged so far."""
    entries = rehearsal.chronicle.in_order()
    return sum(one.tokens for entry in entries for one in entry.commit.contributors)


def one_seed(seed: int, rounds: int, directory: Path) -> dict[str, Any]:
    """All runs with one seed, compared at the tokens that all have."""
    tokens = float(rounds * FEW * STEADY.sync_every * BATCH)
    steady, lossy = replace(STEADY, seed=seed), replace(LOSSY, seed=seed)
    with WarmProcessExecutor(directory / "processes") as executor:
        curves = {
            "steady": run("steady", steady, tokens, executor, directory),
            "elastic": run_elastic(steady, tokens, executor, directory),
            "lossy": run("lossy", lossy, tokens, executor, directory),
        }
    shared = min(found.tokens for found in curves.values())
    return {
        "seed": seed,
        "tokens": shared,
        "entropy": entropy(seed),
        "loss": {name: found.at(shared) for name, found in curves.items()},
        "violations": {name: found.violations for name, found in curves.items()},
        "breadth": {name: statistics.fmean(found.breadths) for name, found in curves.items()},
        "widest": {name: max(found.breadths) for name, found in curves.items()},
        "curves": {name: found.points for name, found in curves.items()},
    }


def entropy(seed: int) -> float:
    """Of the language of a seed."""
    from diloco_cloud.chaos.task import Language

    return Language.make(24, seed).entropy


def page(found: Sequence[dict[str, Any]]) -> str:
    """What was found, by seed and in the median."""

    def perplexity(one: dict[str, Any], name: str) -> float:
        return math.exp(one["loss"][name] - one["loss"]["steady"]) - 1

    def excess(one: dict[str, Any], name: str) -> float:
        floor = one["entropy"]
        return (one["loss"][name] - floor) / (one["loss"]["steady"] - floor) - 1

    rows = []
    for name, others in (
        ("steady", ""),
        ("elastic", "no difference (DiLoCo, figure 7)"),
        ("lossy", "+2.1 % perplexity (DiLoCo)"),
    ):
        rows.append(
            [
                name,
                ", ".join(f"{one['loss'][name]:.4f}" for one in found),
                f"{statistics.median(perplexity(one, name) for one in found):+.2%}",
                f"{statistics.median(excess(one, name) for one in found):+.2%}",
                f"{statistics.fmean(one['breadth'][name] for one in found):.2f}",
                max(one["widest"][name] for one in found),
                sum(len(one["violations"][name]) for one in found),
                others,
            ]
        )
    header = ["run", "loss by seed", "perplexity", "excess loss", "in a round", "at most"]
    return measured.table([*header, "rule violations", "others"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Replicas come and go, uploads are lost")
    parser.add_argument("--rounds", type=int, default=80, help="of the steady run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    where = measured.machine()
    found = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as directory:
            found.append(one_seed(seed, arguments.rounds, Path(directory)))
    floors = ", ".join(f"{one['entropy']:.4f}" for one in found)
    notes = (
        f"H = {STEADY.sync_every}, {found[0]['tokens']:.0f} merged tokens; the language's entropy "
        f"is {floors}. Perplexity and excess loss (above the entropy) are medians, relative to "
        f"steady at equal merged tokens. elastic: {FEW}, then {MANY}, then {FEW} replicas, a third "
        "of the tokens each. lossy: half of all contributions never arrive, and their work is in "
        "later ones."
    )
    text = f"{notes}\n\n{page(found)}"
    measured.write(
        "elastic", "Replicas come and go, uploads are lost", where, text, {"runs": found}
    )


if __name__ == "__main__":
    main()
