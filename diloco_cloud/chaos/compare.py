"""A fleet without faults, then the same fleet in a storm."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diloco_cloud.chaos.referee import judge
from diloco_cloud.chaos.rehearsal import Fleet, Rehearsal
from diloco_cloud.chaos.report import Report
from diloco_cloud.chaos.storm import poisson_storm
from diloco_cloud.chaos.warm import WarmProcessExecutor
from diloco_cloud.errors import ConfigError
from diloco_cloud.run.preflight import check_environment

#: ft-diloco's: of 32 replicas in an hour.
FAULTS_PER_REPLICA_HOUR: Final = 90 / 32
#: Steps of a round: at least so many, and more in a long one. A replica contributes between two.
_LEAST_STEPS: Final = 20
_STEP_S: Final = 0.2
#: CPU seconds of a small replica's round, mostly for reading so many others' contributions; and
#: the part of the machine that a rehearsal may take, lest it measures the machine.
_ROUND_CPU_S: Final = 0.1
_LOAD: Final = 0.5
_SHORTEST_ROUND_S: Final = 2.0
#: What a run has at life's speed, in seconds; a storm goes by faster.
_HEARTBEAT_S: Final = 5.0
_SUPERVISION_S: Final = 3.0
#: Until a process that has torch to import does something.
_START_S: Final = 5.0
_SHORTEST_LOOK_S: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of a storm.

    Attributes:
        replicas: number of ranks.
        seconds: length of the storm; the fault-free run is half as long.
        faults_per_hour: at life's speed; None: ft-diloco's rate per replica.
        scale: how many times faster than life it goes by.
        seed: of the faults and of the training.
        round_s: seconds of a round's training; None: as long as this machine needs.
    """

    replicas: int = 32
    seconds: float = 180.0
    faults_per_hour: float | None = None
    scale: float = 10.0
    seed: int = 0
    round_s: float | None = None

    def fleet(self) -> Fleet:
        """What runs."""
        round_s = fitting_round_s(self.replicas) if self.round_s is None else self.round_s
        steps = max(_LEAST_STEPS, round(round_s / _STEP_S))
        return Fleet(
            replicas=self.replicas,
            sync_every=steps,
            step_s=round_s / steps,
            heartbeat_s=max(_HEARTBEAT_S / self.scale, _SHORTEST_LOOK_S),
            supervision_s=max(_SUPERVISION_S / self.scale, _SHORTEST_LOOK_S),
            seed=self.seed,
        )


def fitting_round_s(replicas: int) -> float:
    """Seconds of a round that leaves this machine idle for a good part of the time."""
    cores = len(os.sched_getaffinity(0))
    return max(_SHORTEST_ROUND_S, replicas * _ROUND_CPU_S / cores / _LOAD)


def rehearse(
    settings: Settings,
    directory: str | os.PathLike[str],
    *,
    say: Callable[[str], None] = lambda _line: None,
) -> Report:
    """Run a fleet twice, without faults and in a storm.

    Args:
        settings: of the storm.
        directory: for the store, and the replicas' logs and records.
        say: told what happens, a line at a time.

    Raises:
        MissingDependencyError: torch or torchft is not installed.
        ConfigError: the storm is so short that there is no fault in it.
        ExchangeError: the replicas do not come together.
    """
    fleet = settings.fleet()
    check_environment(fleet.spec("calm"), backend="local")
    rate = settings.faults_per_hour
    faults = poisson_storm(
        seed=settings.seed,
        replicas=fleet.replicas,
        seconds=settings.seconds,
        per_hour=FAULTS_PER_REPLICA_HOUR * fleet.replicas if rate is None else rate,
        scale=settings.scale,
    )
    if not faults:
        raise ConfigError(
            f"no fault falls into {settings.seconds:.0f} s with {fleet.replicas} replicas",
            fix="Use more --minutes, more --replicas, or another --seed.",
        )
    verdicts = []
    start_s = _START_S / settings.scale
    with WarmProcessExecutor(Path(directory, "processes"), start_s=start_s) as executor:
        say("importing torch")
        executor.warm_up()
        for name, seconds, storm in (
            ("calm", settings.seconds / 2, ()),
            ("storm", settings.seconds, faults),
        ):
            say(f"{name}: {fleet.replicas} replicas start")
            with Rehearsal(
                name, fleet, executor, directory, on_event=lambda event: say(event.text)
            ) as rehearsal:
                rehearsal.gather()
                say(f"{name}: {len(storm)} faults in {seconds:.0f} s")
                window = rehearsal.measure(seconds, storm)
                say(f"{name}: the killed come back, and the run ends")
                verdicts.append(judge(rehearsal.end(), window))
    calm, storm_verdict = verdicts
    return Report(
        replicas=fleet.replicas,
        scale=settings.scale,
        seed=settings.seed,
        round_s=fleet.sync_every * fleet.step_s,
        calm=calm,
        storm=storm_verdict,
    )
