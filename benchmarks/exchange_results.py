"""What a measurement found: medians of rounds, and whether the replicas got what they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import exchange_tensors
from exchange_fleet import Round
from exchange_replica import Job
from exchange_stores import Place

#: Methods of a store that read an object.
_READS = ("get", "get_range", "head")


@dataclass
class Result:
    """One contender in one place.

    Attributes:
        store: name of the place.
        mbit_s: of each replica's line, each way; None for none.
        replicas: N.
        mib: S.
        name, kind, codec: of the contender.
        rounds_s: seconds of each round, from the moment when all began to the last one's end.
        seconds: their median.
        sent, received: bytes of the replica that sent and that received most, in a round.
        requests: by method, of the replica with most, in the last round.
        missed: part of the GETs and HEADs, of all replicas and rounds, that met nothing.
        replica_cpu_s, server_cpu_s, links_cpu_s: of a round, all replicas and volunteers together.
        busy: part of the machine's CPU time that anything used, others' work included.
        peak: of the replica with most, over its tensors, relative to S.
        agree: whether all replicas had the same bytes after every round; None for a limit.
        exact: whether they had the bytes of the slow mean after the last; None unless lossless.
        error: relative L2 error of the mean after the last round.
        planned: what the planner expected a round to take, relative to what it took; the median of
            the rounds that were planned by what the links had carried; 0 where none was.
        limit: name of the limit that this is to be compared with.
        limit_s: its seconds.
    """

    store: str
    mbit_s: float | None
    replicas: int
    mib: float
    name: str
    kind: str
    codec: str
    rounds_s: list[float]
    seconds: float
    sent: int
    received: int
    requests: dict[str, int]
    missed: float
    replica_cpu_s: float
    server_cpu_s: float
    links_cpu_s: float
    busy: float
    peak: float
    agree: bool | None
    exact: bool | None
    error: float | None
    planned: float = 0.0
    limit: str = ""
    limit_s: float | None = None


@dataclass
class SlowMean:
    """Digests of means, each found once."""

    _found: dict[tuple[tuple[int, ...], int, int], str] = field(default_factory=dict)

    def digest(self, sizes: tuple[int, ...], replicas: int, round_: int) -> str:
        key = (sizes, replicas, round_)
        if key not in self._found:
            self._found[key] = exchange_tensors.digest(exchange_tensors.slow_mean(*key))
        return self._found[key]


def result(job: Job, place: Place, rounds: Sequence[Round], means: SlowMean) -> Result:
    """The figures of a job's rounds."""
    contender, nbytes = job.contender, 4 * sum(job.sizes)
    every = [measure for round_ in rounds for measure in round_.measures]
    last = rounds[-1].measures
    exchanged = contender.kind != "limit"
    exact = None
    if exchanged and contender.is_lossless:
        expected = means.digest(job.sizes, job.replicas, len(rounds))
        exact = all(outcome.digest == expected for outcome in rounds[-1].outcomes)
    reads = Counter[str]()
    for measure in every:
        reads.update(measure.requests)
    return Result(
        store=place.name,
        mbit_s=place.mbit_s,
        replicas=job.replicas,
        mib=nbytes / 2**20,
        name=contender.name,
        kind=contender.kind,
        codec=contender.codec,
        rounds_s=[round(one.seconds, 4) for one in rounds],
        seconds=_middle(rounds, lambda one: one.seconds),
        sent=max(measure.sent for measure in every),
        received=max(measure.received for measure in every),
        requests=_requests(
            max(last, key=lambda one: sum(_requests(one.requests).values())).requests
        ),
        missed=reads["missed"] / max(sum(reads[name] for name in _READS), 1),
        replica_cpu_s=_middle(rounds, lambda one: one.replica_cpu_s),
        server_cpu_s=_middle(rounds, lambda one: one.server_cpu_s),
        links_cpu_s=_middle(rounds, lambda one: one.links_cpu_s),
        busy=_middle(rounds, lambda one: one.busy),
        peak=max(measure.peak for measure in every) / nbytes,
        agree=all(one.agree for one in rounds) if exchanged else None,
        exact=exact,
        error=rounds[-1].outcomes[0].error if exchanged else None,
        planned=_planned(rounds),
    )


def _middle(rounds: Sequence[Round], value: Callable[[Round], float]) -> float:
    return round(median(value(one) for one in rounds), 4)


def _planned(rounds: Sequence[Round]) -> float:
    ratios = [one.measures[0].planned_s / one.seconds for one in rounds]
    return round(median([ratio for ratio in ratios if ratio > 0] or [0.0]), 4)


def _requests(counted: dict[str, int] | Counter[str]) -> dict[str, int]:
    return {name: count for name, count in sorted(counted.items()) if name != "missed"}
