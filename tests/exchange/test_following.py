"""The plan of a round is in the commit before it, and followed by all."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco_cloud import keys
from diloco_cloud.errors import CorruptContributionError
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.contribution import Header
from diloco_cloud.exchange.deciding import decide
from diloco_cloud.exchange.following import first_chunk_bytes, kind_of, plan_next
from diloco_cloud.exchange.history import History
from diloco_cloud.exchange.links import LinkMeter
from diloco_cloud.exchange.prediction import Kind, Plan
from diloco_cloud.exchange.rounds import RoundExchange
from diloco_cloud.exchange.work import RoundResult, Work
from diloco_cloud.store.memory import MemoryStore

MB = 2**20
NUMEL = 3 * MB // 4 + 1000


def header(rank: int, **changes: Any) -> Header:
    plain = Header(
        kind="contribution",
        run="r",
        round=0,
        fragment=0,
        rank=rank,
        attempt=0,
        layout="L",
        nbytes=256 * MB,
        base="B",
        tokens=100,
        up=25e6,
        down=25e6,
        latency=0.03,
    )
    return replace(plain, **changes)


def meter(rate: float) -> LinkMeter:
    """Of a link that has carried so many bytes per second, 30 ms away."""
    time_s = [0.0]
    found = LinkMeter(lambda: time_s[0])
    found.answered(0.03)
    for way in (found.sending, found.receiving):
        with way(100_000):
            time_s[0] += 0.03 + 100_000 / rate
    return found


def tensor(rank: int, round_: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * round_ + rank))


def exchanges(rates: Sequence[float], **settings: Any) -> list[RoundExchange]:
    name = uuid.uuid4().hex
    return [
        RoundExchange(
            MemoryStore(name),
            "run",
            rank,
            len(rates),
            timeout_s=20.0,
            poll_interval_s=0.02,
            meter=meter(rate),
            **settings,
        )
        for rank, rate in enumerate(rates)
    ]


def together(owns: Sequence[RoundExchange], round_: int) -> list[RoundResult]:
    def work(own: RoundExchange) -> RoundResult:
        return own.exchange(round_, 0, [tensor(own.rank, round_)], Work(tokens=10))

    with ThreadPoolExecutor(len(owns)) as pool:
        return [one.result(timeout=60) for one in [pool.submit(work, own) for own in owns]]


def means(results: Sequence[RoundResult]) -> torch.Tensor:
    """That all have, to the bit."""
    first = results[0].tensors
    assert first is not None
    for one in results:
        assert one.tensors is not None
        assert torch.equal(one.tensors[0], first[0])
    return first[0]


@pytest.mark.parametrize("rates", [[1e6, 1e6, 1e6], [1e9, 1e3, 1e9]])
def test_the_plan_is_the_same_for_all_and_followed_in_the_next_round(rates: list[float]) -> None:
    """In the second case one link is slow, or somebody lies; it costs time only."""
    owns = exchanges(rates)
    fixed = exchanges(rates, reduction="all-gather")
    for round_ in range(2):
        results = together(owns, round_)
        plans = {result.commit.next for result in results}
        assert plans == {own.history.plans[0] for own in owns}
        assert len(plans) == 1
        assert torch.equal(means(results), means(together(fixed, round_)))
        planned = results[0].commit.next
        assert planned is not None
        if round_ == 0:  # by size alone
            first = planned
            assert results[0].commit.plan == "all-gather"
            assert first.kind == "sharded"
    assert results[0].commit.plan == "sharded"
    assert results[0].commit.chunk_bytes == first.chunk_bytes


def test_a_size_that_was_asked_for_wins_over_the_plan() -> None:
    owns = exchanges([1e6, 1e6], chunk_bytes=512 * 1024)
    for round_ in range(2):
        commit = together(owns, round_)[0].commit
        assert commit.chunk_bytes == 512 * 1024
        assert commit.next is not None


def test_a_history_carries_the_plans() -> None:
    """So a replica that joins by a snapshot, or by a commit, follows them too."""
    history = History(round=3, plans={1: Plan("sharded", 2 * MB, 8)})
    again = History.from_json(history.to_json())
    assert again.plans == history.plans == history.copy().plans
    chosen = Plan("all-gather", MB, 4)
    commit = Commit(run="r", round=3, fragment=0, decision="discard", next=chosen)
    again.note(Commit.decode(commit.encode()), applied=False)
    assert again.plans == {0: chosen, 1: Plan("sharded", 2 * MB, 8)}
    again.note(replace(commit, round=4, next=None), applied=False)
    assert again.plans[0] == chosen


def test_a_door_measures_its_link_and_tells_of_it(tmp_path: Any) -> None:
    uri = str(tmp_path / "run")
    doors = [ObjectStoreAllReduce(uri, r, 2, timeout_s=20, poll_interval_s=0.02) for r in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            list(pool.map(lambda door: door.allreduce(tensor(door.rank, 0)), doors))
    key = keys.put(1, 0, 0, 0)
    found = doors[0].prefix.get(key)
    assert b'"up":0.0' not in found[:4096]
    assert doors[0].exchange.meter is not None
    assert doors[0].exchange.meter.link is not None


# -- deciding ----------------------------------------------------------------------------------


def decided(headers: Sequence[Header], **settings: Any) -> Commit:
    named = {one.rank: (one, f"digest{one.rank}") for one in headers}
    return decide(named, run="r", round_=4, fragment=0, **settings)


def test_a_plan_is_the_same_in_whatever_order_headers_come() -> None:
    headers = [header(rank, up=1e6 * (rank + 1), latency=0.01 * rank) for rank in range(9)]
    found = set()
    for seed in range(20):
        random.Random(seed).shuffle(headers)
        found.add(decided(headers).next)
    assert len(found) == 1


def test_a_plan_in_use_is_kept_for_small_gains() -> None:
    headers = [header(rank) for rank in range(8)]
    first = decided(headers).next
    assert first is not None
    near = replace(first, parallel=2 * first.parallel)
    assert decided(headers, before=History(plans={0: near})).next == near
    far = Plan("all-gather", MB, 4)
    assert decided(headers, before=History(plans={0: far})).next == first


@pytest.mark.parametrize("liar", [{"sizes": (0,) * 64}, {"sizes": (2**53,) * 64}])
def test_sizes_that_cannot_be_true_still_give_a_plan(liar: dict[str, Any]) -> None:
    headers = [header(rank, codec="int8", sizes=(MB,) * 64) for rank in range(2)]
    headers.append(header(2, codec="int8", **liar))
    assert plan_next(headers, "auto", None) is not None


@pytest.mark.parametrize(
    ("reduction", "volunteers", "codec", "kinds"),
    [
        ("auto", 0, "raw", {"sharded"}),
        ("auto", 4, "raw", {"reducers"}),
        ("sharded", 0, "raw", {"sharded"}),
        ("sharded", 4, "raw", {"reducers"}),
        ("all-gather", 4, "raw", {"all-gather"}),
        ("auto", 0, "sparse", {"all-gather"}),
        ("sharded", 0, "sparse", {"all-gather"}),
    ],
)
def test_a_plan_keeps_to_what_the_run_allows(
    reduction: str, volunteers: int, codec: str, kinds: set[Kind]
) -> None:
    sizes = () if codec == "raw" else (MB // 200,) * 64
    chunk = {"codec": codec, "sizes": sizes, "volunteers": volunteers}
    plan = plan_next([header(rank, **chunk) for rank in range(8)], reduction, None)
    assert plan is not None
    assert plan.kind in kinds


def test_what_cannot_be_dealt_out_has_no_plan() -> None:
    assert plan_next([header(rank, nbytes=1000) for rank in range(4)], "sharded", None) is None


@pytest.mark.parametrize("next_", [1, "sharded", {}, {"kind": "ring", "chunk_bytes": 64}])
def test_a_commit_with_something_else_for_a_plan_is_refused(next_: Any) -> None:
    commit = Commit(run="r", round=0, fragment=0, decision="discard")
    data = commit.encode().replace(b'"next":null', b'"next":' + repr(next_).encode())
    with pytest.raises(CorruptContributionError):
        Commit.decode(data.replace(b"'", b'"'))


# -- following ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [(1, MB), (200 * MB, MB), (256 * MB, 2 * MB), (512 * MB, 4 * MB), (2**36, 4 * MB)],
)
def test_the_first_round_has_a_hundred_chunks_or_so(nbytes: int, size: int) -> None:
    assert first_chunk_bytes(nbytes) == size


@pytest.mark.parametrize(
    ("plan", "settings", "kind"),
    [
        (None, {}, "sharded"),
        (None, {"nbytes": 4 * MB}, "all-gather"),
        (None, {"nbytes": 4 * MB, "reduction": "sharded"}, "sharded"),
        (None, {"reducers": 2}, "reducers"),
        (None, {"codec": "sparse"}, "all-gather"),
        (None, {"contributors": 2}, "all-gather"),
        (None, {"contributors": 2, "reduction": "sharded"}, "sharded"),
        (None, {"contributors": 2, "reducers": 1}, "reducers"),
        (None, {"contributors": 3, "codec": "e3m0"}, "sharded"),
        ("all-gather", {}, "all-gather"),
        ("all-gather", {"reduction": "sharded"}, "sharded"),
        ("sharded", {"nbytes": 4 * MB}, "sharded"),
        ("sharded", {"reducers": 2}, "sharded"),
        ("sharded", {"reduction": "all-gather"}, "all-gather"),
        ("reducers", {"reducers": 2}, "reducers"),
        ("reducers", {}, "sharded"),  # They have gone.
    ],
)
def test_a_plan_is_followed_where_it_can_be(
    plan: Kind | None, settings: dict[str, Any], kind: Kind
) -> None:
    given = None if plan is None else Plan(plan, MB, 8)
    plain = {
        "reduction": "auto",
        "nbytes": 64 * MB,
        "codec": "raw",
        "contributors": 4,
        "reducers": 0,
    }
    assert kind_of(given, **(plain | settings)) == kind


@pytest.mark.parametrize(
    ("sent", "kind"),
    [({"spread": 4}, "sharded"), ({"spread": 1}, "all-gather"), ({}, "all-gather")],
)
def test_until_a_link_is_measured_rounds_go_the_way_they_went(
    sent: dict[str, int], kind: str
) -> None:
    """However slow the encoding, beside which one way is as good as another."""
    unknown = {"codec": "e3m0", "sizes": (MB // 8,) * 256, "encode_rate": 1e6}
    none = {"up": 0.0, "down": 0.0, "latency": 0.0}
    plan = plan_next([header(rank, **unknown, **none, **sent) for rank in range(4)], "auto", None)
    assert plan is not None
    assert plan.kind == kind
    measured = plan_next([header(rank, **unknown, **sent) for rank in range(8)], "auto", plan)
    assert measured is not None
    assert measured.expected_s > 0
