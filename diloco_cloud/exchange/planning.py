"""Which way a round's bytes go: chosen from what the links carried in the rounds before.

The plan of a round is part of the commit before it, so that all follow the same one. It is a pure
function of what that commit's contributors wrote in their headers; a link that somebody has made up
costs time, never the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from diloco_cloud.exchange import wire
from diloco_cloud.exchange.links import Link
from diloco_cloud.exchange.prediction import (
    Cost,
    Job,
    Kind,
    Plan,
    possible,
    predict,
    slowest,
    streams,
)
from diloco_cloud.store.prices import Prices

_MB: Final = 2**20
#: Raw bytes of a chunk, and requests under way, that are considered. Smaller chunks fill a pipeline
#: sooner and share out more evenly; larger ones, and more at once, hide latency.
CHUNK_BYTES: Final = (1 * _MB, 2 * _MB, 4 * _MB, 8 * _MB, 16 * _MB)
PARALLEL: Final = (4, 8, 16, 32)
#: In the order in which equally good ones are taken: the fewer moving parts, the better.
KINDS: Final[tuple[Kind, ...]] = ("all-gather", "sharded", "reducers")
#: What a reader of a plan accepts.
_LARGEST_CHUNK: Final = 64 * _MB
_MOST_PARALLEL: Final = 256

#: Bytes under way are at most this part of the payload, or the constant where that is more.
_MEMORY_SHARE: Final = 24
_LEAST_MEMORY: Final = 8 * _MB
#: Objects of one contribution.
_MOST_CHUNKS: Final = 4096
#: Seconds that differ by less than this part are equal, and the cheaper plan is taken.
_EQUAL: Final = 0.02
#: What a plan must gain to replace the one in use: measurements waver, and a new chunk size makes
#: every codec begin its error feedback's bookkeeping anew.
_WORTH_CHANGING: Final = 0.10
#: What a measured round corrects a prediction by, whatever anybody claims of it.
_LEAST_FACTOR, _LARGEST_FACTOR = 0.5, 4.0


@dataclass(frozen=True)
class Choice:
    """What the choice goes by, where that is not time alone.

    Attributes:
        prices: of the store; None where it has none.
        same_region: whether the replicas are where the bucket is, and read for nothing.
        dollars_per_hour: what an hour of the whole fleet is worth, such as its GPUs' price. A plan
            is then chosen by its time's worth and its requests' and traffic's cost together.
            Without it, money decides only between plans that are equally fast.
    """

    prices: Prices | None = None
    same_region: bool = False
    dollars_per_hour: float | None = None

    def predict(self, plan: Plan, job: Job, links: Sequence[Link]) -> Cost:
        """:func:`~diloco_cloud.exchange.prediction.predict` with these prices."""
        return predict(plan, job, links, self.prices, same_region=self.same_region)

    def weigh(self, cost: Cost) -> float:
        """What counts, in seconds."""
        if self.dollars_per_hour is None or cost.dollars is None:
            return cost.seconds
        return cost.seconds + cost.dollars / self.dollars_per_hour * 3600


BY_TIME: Final = Choice()


def choose(
    job: Job,
    links: Sequence[Link] = (),
    *,
    by: Choice = BY_TIME,
    current: Plan | None = None,
    kinds: Sequence[Kind] = KINDS,
    took_s: float | None = None,
) -> Plan:
    """The plan for a job, with the seconds that it is expected to take where links were measured.

    Args:
        job: what the next round has to move.
        links: that the contributors have measured, in any order; empty in the first round.
        by: prices, and what time is worth.
        current: the plan in use, which is kept unless another gains more than a tenth.
        kinds: that may be chosen.
        took_s: seconds of a round that went as ``current``, if there was one. What a prediction was
            wrong by then, it will be wrong by again, as where replicas share processors.
    """
    is_measured = bool(links)
    links = [slowest(links)]  # what decides; the same in whatever order they came
    costs = {one: by.predict(one, job, links) for one in candidates(job, kinds)}
    least = min(by.weigh(cost) for cost in costs.values())
    factor = 1.0 if is_measured else 0.0
    if current is not None and current.kind in kinds and possible(current, job):
        now = by.predict(current, job, links)
        if took_s is not None:
            factor *= min(max(took_s / now.seconds, _LEAST_FACTOR), _LARGEST_FACTOR)
        if by.weigh(now) <= least / (1 - _WORTH_CHANGING):
            return replace(current, expected_s=now.seconds * factor)
    equal = [one for one, cost in costs.items() if by.weigh(cost) <= least * (1 + _EQUAL)]
    best = min(equal, key=lambda one: _preference(one, costs[one]))
    return replace(best, expected_s=costs[best].seconds * factor)


def candidates(job: Job, kinds: Sequence[Kind] = KINDS) -> Iterator[Plan]:
    """Plans that a job can be done by, within bounds of memory and objects."""
    memory = max(job.nbytes // _MEMORY_SHARE, _LEAST_MEMORY)
    for kind in kinds:
        for chunk_bytes in CHUNK_BYTES:
            too_many = job.nbytes > _MOST_CHUNKS * chunk_bytes and chunk_bytes != CHUNK_BYTES[-1]
            for parallel in PARALLEL:
                one = Plan(kind, chunk_bytes, parallel)
                fits = parallel * chunk_bytes <= memory and _parts_fit(one, job, memory)
                if not too_many and fits and possible(one, job):
                    yield one


def _parts_fit(one: Plan, job: Job, memory: int) -> bool:
    """Whether the parts that a replica holds of the chunks it averages are within bounds.

    They arrive in any order and are added in one: of two chunks at a time, all may have to wait.
    """
    averages = one.kind != "reducers" and streams(one, job)
    if not averages or one.chunk_bytes == CHUNK_BYTES[0]:
        return True
    return 2 * job.contributors * one.chunk_bytes <= memory * job.put_ratio


def _preference(one: Plan, cost: Cost) -> tuple[float, int, int, int, int]:
    requests = sum(cost.requests.values())
    return cost.dollars or 0.0, requests, KINDS.index(one.kind), one.parallel, one.chunk_bytes


# -- on the wire -------------------------------------------------------------------------------


def plan_json(one: Plan) -> dict[str, Any]:
    """A plan as a commit holds it."""
    return asdict(one)


def plan(value: Any) -> Plan:
    """Check :func:`plan_json` as anybody may have written it.

    Raises:
        ValueError: it is no plan, or not one that can be followed.
    """
    return Plan(**wire.fields(value, _FIELDS))


def _chunk_bytes(value: Any) -> int:
    size = wire.count(value)
    if not 64 <= size <= _LARGEST_CHUNK or size % 8:
        raise ValueError("not a chunk size")
    return size


def _parallel(value: Any) -> int:
    count = wire.count(value)
    if not 1 <= count <= _MOST_PARALLEL:
        raise ValueError("not a number of requests")
    return count


_FIELDS: Final[dict[str, Callable[[Any], Any]]] = {
    "kind": wire.one_of(*KINDS),
    "chunk_bytes": _chunk_bytes,
    "parallel": _parallel,
    "expected_s": wire.magnitude,
}
