"""GRPO by four replicas against one replica with four times the batch, at equal samples.

    python benchmarks/composer_replicas.py [--seeds 3] [--rounds 16] [--sync-every 5]

Both see the same number of rollouts from the same tiny model, on prompts of their own; replicas
meet in a directory. What counts is how far the reward rises, and that all replicas end with the
same parameters.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from dataclasses import dataclass
from typing import Any, Final

import measured

from diloco_cloud import Run, RunSpec, launch
from diloco_cloud.run import new_run_id

REPLICAS: Final = 4
BATCH: Final = 8
#: Logs whose mean is the reward that a replica ended with.
LAST: Final = 3
HIGH: Final = 0.9


class Letters:
    """A task that a model with random weights can learn: write small letters, whatever is asked."""

    def rows(self, count: int, *, seed: int) -> list[dict[str, Any]]:
        draw = random.Random(seed)
        return [{"prompt": f"{draw.randrange(10**4)}: "} for _ in range(count)]

    def reward(self, completions: list[str], **_: Any) -> list[float | None]:
        return [sum(map(str.islower, text)) / max(1, len(text)) for text in completions]


@dataclass(frozen=True)
class Outcome:
    """Of one run: the replicas' mean reward in each round, and whether they ended equal."""

    rewards: list[float]
    digest: str | None
    states: list[str]

    @property
    def last(self) -> float:
        """What the reward has risen to."""
        return statistics.fmean(self.rewards[-LAST:])

    @property
    def rounds_to_high(self) -> float:
        """Rounds until the reward was high, infinite if it never was."""
        return next((n for n, one in enumerate(self.rewards, 1) if one >= HIGH), float("inf"))


def run_once(
    replicas: int,
    batch: int,
    seed: int,
    *,
    rounds: int,
    sync_every: int,
    outer: tuple[float, float],
    store: str,
) -> Outcome:
    """Launch, wait, and read the rewards that the replicas report with every round."""
    spec = RunSpec(
        run_id=new_run_id("letters"),
        backend="local",
        replicas=replicas,
        sync_every=sync_every,
        rounds=rounds,
        # One replica has nothing to merge: its outer step is none at all.
        outer_lr=outer[0] if replicas > 1 else 1.0,
        outer_momentum=outer[1] if replicas > 1 else 0.0,
        trainer="diloco_cloud.trainers.composer:train",
        trainer_args={
            "model": "tiny",
            "task": "composer_replicas:Letters",
            "learning_rate": 3e-3,
            "batch_size": batch,
            "num_generations": BATCH,
            "max_completion_length": 8,
            "logging_steps": 1,
            "seed": seed,
            "grpo": {"lr_scheduler_type": "constant"},
        },
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(measured.RESULTS.parent)},
        timeout=1800,
        join_timeout=600,
        round_timeout=600,
    )
    launched = launch(spec, store)
    status = launched.wait(timeout=1800)
    run = Run.open(launched.store_uri, launched.run_id)
    results = run.results()
    by_round: dict[int, list[float]] = {}
    for row in run.metrics():
        if "reward" in row:
            by_round.setdefault(row["round"], []).append(row["reward"])
    rewards = [statistics.fmean(by_round[round_]) for round_ in sorted(by_round)]
    return Outcome(
        rewards=rewards,
        digest=results.digest,
        states=[view.state for view in status.replicas],
    )


def page(outcomes: dict[str, list[Outcome]]) -> str:
    """What was found."""
    rows: list[list[Any]] = []
    for name, found in outcomes.items():
        last = [one.last for one in found]
        rows.append(
            [
                name,
                f"{statistics.fmean(one.rewards[0] for one in found):.3f}",
                f"{statistics.fmean(last):.3f}",
                f"{statistics.stdev(last) if len(last) > 1 else 0.0:.3f}",
                ", ".join(f"{one.rounds_to_high:.0f}" for one in found),
                all(one.digest is not None for one in found),
            ]
        )
    return measured.table(
        [
            *("replicas", "reward in round 1", f"in the last {LAST}", "deviation"),
            *(f"rounds to {HIGH}", "all parameters equal"),
        ],
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO by replicas and by one")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--sync-every", type=int, default=5)
    parser.add_argument("--outer-lr", type=float, default=0.7, help="of four replicas")
    parser.add_argument("--outer-momentum", type=float, default=0.9, help="of four replicas")
    arguments = parser.parse_args()
    where = measured.machine()
    outcomes: dict[str, list[Outcome]] = {"4 × 8": [], "1 × 32": []}
    with tempfile.TemporaryDirectory() as store:
        for seed in range(arguments.seeds):
            for name, replicas, batch in (
                ("4 × 8", REPLICAS, BATCH),
                ("1 × 32", 1, REPLICAS * BATCH),
            ):
                found = run_once(
                    replicas,
                    batch,
                    seed,
                    rounds=arguments.rounds,
                    sync_every=arguments.sync_every,
                    outer=(arguments.outer_lr, arguments.outer_momentum),
                    store=store,
                )
                print(name, seed, found, flush=True)
                outcomes[name].append(found)
    values = {name: [vars(one) for one in found] for name, found in outcomes.items()}
    measured.write(
        "composer_replicas", "GRPO by replicas and by one", where, page(outcomes), values
    )


if __name__ == "__main__":
    main()
