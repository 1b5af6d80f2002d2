"""What is left of a run whose replicas are killed all the time.

    python benchmarks/goodput.py paced|shared|spare [--kills 56] [--seed 0]

Eight replicas, with rounds of a second, whose processes take 1.5 seconds to start. How long a
killed one takes to be back in a committed round is measured first (D); then each is killed every
7.3 D on average, the ratio at which Decoupled DiLoCo (arXiv:2604.21428) reports a goodput of 88 %
(simulated), and which leaves a barrier of eight 48 % by the same formula. Goodput is tokens merged
per second, relative to the same run before the first kill. Then the same kills meet the same
program with a quorum of everyone: an all-or-nothing barrier.

* paced: each replica has an accelerator of its own. What a dead one does not compute nobody does,
  so no program can keep more than its uptime, 1 - 1 / 7.3 = 86 % if it is useless until it is back.
* shared: the replicas share the cores, and the living use what the dead leave.
* spare: paced, with nine replicas where eight are needed; relative to eight without kills.

Kills spare a replica that is not back yet, in all arms.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import measured

from diloco_cloud.chaos.evidence import recoveries
from diloco_cloud.chaos.referee import Verdict, judge
from diloco_cloud.chaos.rehearsal import Fleet, Rehearsal
from diloco_cloud.chaos.report import BARRIER_GOODPUT, DECOUPLED_GOODPUT, verdict_json
from diloco_cloud.chaos.storm import Fault, renewal_kills
from diloco_cloud.chaos.warm import WarmProcessExecutor

REPLICAS: Final = 8
#: Mean time between kills of a replica, in recovery times.
RATIO: Final = 7.3
#: Of a measurement without kills, and of one that only lets a run settle.
CALM_S: Final = 30.0
SETTLE_S: Final = 3.0
PROBES: Final = 6
#: Until a new life begins: a container's start and its imports, more or less.
START_S: Final = 1.5
PACED: Final = Fleet(replicas=REPLICAS, sync_every=25, step_s=0.04, supervision_s=0.2)
FLEETS: Final = {
    "paced": PACED,
    "shared": replace(PACED, sync_every=250, step_s=0.0),
    "spare": replace(PACED, replicas=REPLICAS + 1),
}


@dataclass(frozen=True)
class Arm:
    """One program under the same kills.

    Attributes:
        calm: before them.
        storm: during them.
    """

    calm: Verdict
    storm: Verdict

    def goodput(self, baseline: Verdict) -> float:
        return self.storm.tokens_per_s / baseline.tokens_per_s


class Benchmark:
    """All arms of one variant."""

    def __init__(self, variant: str, kills: int, seed: int, directory: Path) -> None:
        self.fleet, self._kills, self._seed = FLEETS[variant], kills, seed
        self._directory = directory
        self.recovery_s = 0.0
        self._schedule: tuple[Fault, ...] = ()
        self._seconds = 0.0

    def run(self, executor: WarmProcessExecutor) -> dict[str, Any]:
        """Measure; returns what is to be written down."""
        ours = self._arm("ours", self.fleet, executor)
        barrier = self._arm("barrier", replace(self.fleet, quorum=self.fleet.replicas), executor)
        baseline = ours.calm
        if self.fleet.replicas > REPLICAS:
            baseline = self._calm(replace(self.fleet, replicas=REPLICAS), executor)
        return {
            "recovery_s": self.recovery_s,
            "kill_every_s": RATIO * self.recovery_s,
            "seconds": self._seconds,
            "goodput": ours.goodput(baseline),
            "barrier_goodput": barrier.goodput(baseline),
            "baseline": verdict_json(baseline),
            "ours": verdict_json(ours.storm),
            "barrier": verdict_json(barrier.storm),
        }

    def _arm(self, name: str, fleet: Fleet, executor: WarmProcessExecutor) -> Arm:
        with Rehearsal(name, fleet, executor, self._directory) as rehearsal:
            rehearsal.gather()
            calm = rehearsal.measure(SETTLE_S if self._schedule else CALM_S)
            if not self._schedule:
                self._plan(rehearsal, fleet)
            storm = rehearsal.measure(self._seconds, self._schedule, spare_the_weak=True)
            evidence = rehearsal.end()
        return Arm(judge(evidence, calm), judge(evidence, storm))

    def _plan(self, rehearsal: Rehearsal, fleet: Fleet) -> None:
        """Measure the recovery time by kills far apart, and draw the storm's."""
        times = [entry.time for entry in rehearsal.chronicle.in_order()]
        round_s = statistics.median(b - a for a, b in itertools.pairwise(times))
        gap = 3.3 * round_s  # not a whole number, so that they fall into all parts of a round
        probes = [Fault(i * gap, "kill", i % fleet.replicas) for i in range(PROBES)]
        rehearsal.measure(PROBES * gap, probes, spare_the_weak=True)
        rehearsal.recover()
        found = recoveries(rehearsal.injections, rehearsal.chronicle.in_order())
        self.recovery_s = statistics.median(one.back_s for one in found if one.back_s is not None)
        mean_s = RATIO * self.recovery_s
        self._seconds = self._kills * mean_s / fleet.replicas
        self._schedule = renewal_kills(
            seed=self._seed,
            replicas=fleet.replicas,
            seconds=self._seconds,
            mean_s=mean_s,
            least_s=self.recovery_s,
        )

    def _calm(self, fleet: Fleet, executor: WarmProcessExecutor) -> Verdict:
        with Rehearsal("needed", fleet, executor, self._directory) as rehearsal:
            rehearsal.gather()
            window = rehearsal.measure(CALM_S)
            return judge(rehearsal.end(), window)


def page(variant: str, found: dict[str, Any]) -> str:
    ours, barrier = found["ours"], found["barrier"]
    rows = [
        ["goodput", f"**{found['goodput']:.1%}**", f"{found['barrier_goodput']:.1%}"],
        ["kills", ours["faults"].get("kill", 0), barrier["faults"].get("kill", 0)],
        ["kills recovered", ours["recovered"], barrier["recovered"]],
        ["kill to being back, median s", *(f"{arm['back_s']:.2f}" for arm in (ours, barrier))],
        ["kill to next round, median s", *(f"{a['survivors_s']:.2f}" for a in (ours, barrier))],
        ["replicas in a round", *(f"{arm['participation']:.2f}" for arm in (ours, barrier))],
        ["rule violations", len(ours["violations"]), len(barrier["violations"])],
    ]
    bound = 1 - 1 / RATIO
    against = "eight replicas without kills" if variant == "spare" else "the same run before them"
    notes = (
        f"Recovery time D, from {PROBES} kills: {found['recovery_s']:.2f} s; each replica is "
        f"killed every {found['kill_every_s']:.1f} s on average, for {found['seconds']:.0f} s. "
        f"Relative to {against}, which merged {found['baseline']['tokens_per_s']:.0f} tokens/s. "
        f"Published: Decoupled DiLoCo {DECOUPLED_GOODPUT:.0%} (simulated), barrier of eight "
        f"{BARRIER_GOODPUT:.0%} (by formula)."
    )
    if variant == "paced":
        notes += f" That is {found['goodput'] / bound:.1%} of an uptime of {bound:.1%}."
    header = ["", "quorum: half of the living", "quorum: all"]
    return f"{notes}\n\n{measured.table(header, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Goodput under kill -9")
    parser.add_argument("variant", choices=FLEETS)
    parser.add_argument("--kills", type=int, default=56)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    where = measured.machine()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        benchmark = Benchmark(arguments.variant, arguments.kills, arguments.seed, path)
        with WarmProcessExecutor(path / "processes", start_s=START_S) as executor:
            found = benchmark.run(executor)
    measured.write(
        f"goodput-{arguments.variant}",
        f"Goodput under kill -9, {arguments.variant}",
        where,
        page(arguments.variant, found),
        {"seed": arguments.seed, **found},
    )


if __name__ == "__main__":
    main()
