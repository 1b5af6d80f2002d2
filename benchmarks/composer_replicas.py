"""GRPO by four replicas against one replica with four times the batch, at equal samples.

    python benchmarks/composer_replicas.py [--seeds 3] [--rounds 16] [--sync-every 5]

All see the same number of rollouts from the same tiny model, on prompts of their own; replicas
meet in a directory. The one replica runs twice. First as anyone would run it: it has nothing to
merge, so its outer step is none at all (learning rate 1, no momentum). Then under the outer step
that the four have, so that the settings differ in nothing but who draws the batch; its momentum
speeds one replica up too.

What counts is how far the reward rises, and that all replicas end with the same parameters. The
rule: at the end, the four are not below either by more than the noise of the seeds, see
:func:`compare`. How fast it rises, the mean over all rounds, is compared in the same way and said.
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
AT_THE_END: Final = f"reward in the last {LAST} rounds"
#: Student's t that 2.5 % lie beyond, by degrees of freedom: twice the seeds less one.
T_QUANTILES: Final = {2: 4.303, 4: 2.776, 6: 2.447, 8: 2.306, 10: 2.228, 12: 2.179, 14: 2.145}


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
    def mean(self) -> float:
        """Over all rounds: what is still told apart where all have reached the top."""
        return statistics.fmean(self.rewards)

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
        outer_lr=outer[0],
        outer_momentum=outer[1],
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


def compare(four: list[float], one: list[float]) -> dict[str, Any]:
    """Four replicas against one, by the noise of the seeds.

    The noise is half the width of the 95 % confidence interval of the difference of means:
    Student's t, with the pooled deviation of the seeds.

    Args:
        four: a figure of the four replicas, one for each seed.
        one: the same of the one replica, for as many seeds.
    """
    seeds = len(four)
    pooled = ((statistics.variance(four) + statistics.variance(one)) / 2) ** 0.5
    noise = T_QUANTILES[2 * (seeds - 1)] * pooled * (2 / seeds) ** 0.5
    difference = statistics.fmean(four) - statistics.fmean(one)
    verdict = "within noise"
    if abs(difference) > noise:
        verdict = "above" if difference > 0 else "below"
    return {"difference": difference, "noise": noise, "verdict": verdict}


def holds(outcomes: dict[str, list[Outcome]], compared: list[dict[str, Any]]) -> bool:
    """The rule: as far as one replica, and all parameters equal."""
    is_equal = all(one.digest is not None for found in outcomes.values() for one in found)
    return is_equal and all(
        one["verdict"] != "below" for one in compared if one["figure"] == AT_THE_END
    )


def comparisons(outcomes: dict[str, list[Outcome]]) -> list[dict[str, Any]]:
    """The four replicas against either run of the one, at the end and on the way."""
    four, *others = outcomes
    return [
        {
            "against": name,
            "figure": words,
            **compare([figure(o) for o in outcomes[four]], [figure(o) for o in outcomes[name]]),
        }
        for name in others
        for words, figure in (
            (AT_THE_END, lambda outcome: outcome.last),
            ("mean reward of all rounds", lambda outcome: outcome.mean),
        )
    ]


def page(outcomes: dict[str, list[Outcome]], compared: list[dict[str, Any]]) -> str:
    """What was found."""
    rows = [
        [
            name,
            f"{statistics.fmean(one.rewards[0] for one in found):.3f}",
            _with_deviation([one.last for one in found]),
            _with_deviation([one.mean for one in found]),
            ", ".join(f"{one.rounds_to_high:.0f}" for one in found),
            all(one.digest is not None for one in found),
        ]
        for name, found in outcomes.items()
    ]
    header = [
        *("replicas × batch", "reward in round 1", f"in the last {LAST}", "mean of all rounds"),
        *(f"rounds to {HIGH}", "all parameters equal"),
    ]
    verdicts = [
        [
            one["against"],
            one["figure"],
            f"{one['difference']:+.4f}",
            f"{one['noise']:.4f}",
            one["verdict"],
        ]
        for one in compared
    ]
    word = "holds" if holds(outcomes, compared) else "FAILS"
    return (
        f"{measured.table(header, rows)}\n\n"
        "Deviations are the seeds'. The rule, that at the end the four are not below one replica "
        f"with four times the batch by more than the noise, and all parameters equal: **{word}**. "
        "The noise is half the width of the 95 % confidence interval of the difference of means "
        "(Student's t over the seeds, pooled deviation).\n\n"
        + measured.table(["4 × 8 against", "figure", "difference", "noise", ""], verdicts)
    )


def _with_deviation(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO by replicas and by one")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--sync-every", type=int, default=5)
    parser.add_argument("--outer-lr", type=float, default=0.7, help="of four replicas")
    parser.add_argument("--outer-momentum", type=float, default=0.9, help="of four replicas")
    arguments = parser.parse_args()
    if 2 * (arguments.seeds - 1) not in T_QUANTILES:
        parser.error(f"--seeds goes from 2 to {max(T_QUANTILES) // 2 + 1}")
    where = measured.machine()
    outer = (arguments.outer_lr, arguments.outer_momentum)
    arms: dict[str, tuple[int, int, tuple[float, float]]] = {
        "4 × 8": (REPLICAS, BATCH, outer),
        "1 × 32": (1, REPLICAS * BATCH, (1.0, 0.0)),
        "1 × 32, the same outer step": (1, REPLICAS * BATCH, outer),
    }
    outcomes: dict[str, list[Outcome]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory() as store:
        for seed in range(arguments.seeds):
            for name, (replicas, batch, settings) in arms.items():
                found = run_once(
                    replicas,
                    batch,
                    seed,
                    rounds=arguments.rounds,
                    sync_every=arguments.sync_every,
                    outer=settings,
                    store=store,
                )
                print(name, seed, found, flush=True)
                outcomes[name].append(found)
    compared = comparisons(outcomes)
    values = {
        **{name: [vars(one) for one in found] for name, found in outcomes.items()},
        "comparisons": compared,
        "holds": holds(outcomes, compared),
    }
    text = page(outcomes, compared)
    measured.write("composer_replicas", "GRPO by replicas and by one", where, text, values)


if __name__ == "__main__":
    main()
