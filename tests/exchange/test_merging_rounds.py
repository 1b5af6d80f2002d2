"""Radial-directional averaging through the store: the same bits for all, and the formula's."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.contribution import Header
from diloco_cloud.exchange.deciding import decide
from diloco_cloud.exchange.layout import TensorLayout
from diloco_cloud.exchange.merging import directions, norm, rescale
from diloco_cloud.exchange.rounds import RoundExchange
from diloco_cloud.exchange.weighting import PLAIN, mean_norms
from diloco_cloud.exchange.work import RoundResult, Work
from diloco_cloud.store.memory import MemoryStore

CHUNK = 1024
SIZES = (700, 33, 1500, 64)
#: The second tensor is an embedding.
EMBEDDINGS = (False, True, False, False)


def tensors(rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    return [(10.0**-rank * torch.randn(size, generator=g)).to(dtype) for size in SIZES]


def replicas(name: str, world_size: int = 3, **settings: Any) -> list[RoundExchange]:
    return [
        RoundExchange(
            MemoryStore(name),
            "run",
            rank,
            world_size,
            timeout_s=20.0,
            poll_interval_s=0.02,
            chunk_bytes=CHUNK,
            patience_s=0.05,
            merge="rda",
            **settings,
        )
        for rank in range(world_size)
    ]


def together(
    owns: Sequence[RoundExchange], dtype: torch.dtype = torch.float32, **more: Any
) -> list[RoundResult]:
    def work(own: RoundExchange) -> RoundResult:
        done = Work(tokens=10 * (own.rank + 1), inner_steps=5)
        mine = tensors(own.rank, dtype)
        return own.exchange(0, 0, mine, done, averaged_plainly=EMBEDDINGS, **more)

    with ThreadPoolExecutor(len(owns)) as pool:
        return [one.result(timeout=60) for one in [pool.submit(work, own) for own in owns]]


def by_hand(dtype: torch.dtype, weights: Sequence[float]) -> list[torch.Tensor]:
    """To the bit: directions, added in fp32 in order of rank, rounded, and made as long."""
    found = [directions(tensors(rank, dtype), EMBEDDINGS) for rank in range(len(weights))]
    largest, merged = max(weights), []
    for parts in zip(*(contributed for contributed, _ in found), strict=True):
        total = torch.zeros(len(parts[0]))
        for part, weight in zip(parts, weights, strict=True):
            total += part.float() * (weight / largest)
        merged.append((total / sum(w / largest for w in weights)).to(dtype))
    rescale(merged, mean_norms([norms for _, norms in found], weights))
    return merged


def formula(weights: Sequence[float]) -> list[torch.Tensor]:
    """The paper's, in fp64 and without this package."""
    merged = []
    for index, is_plain in enumerate(EMBEDDINGS):
        parts = [tensors(rank)[index].double() for rank in range(len(weights))]
        total = sum(weights)
        lengths = [1.0 if is_plain else float(part.norm()) for part in parts]
        both = list(zip(weights, parts, lengths, strict=True))
        direction = torch.stack([w / total * part / length for w, part, length in both]).sum(0)
        if not is_plain:
            radius = sum(w * length for w, _, length in both) / total
            direction = radius * direction / direction.norm()
        merged.append(direction.float())
    return merged


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["all-gather", "sharded"])
def test_everybody_has_what_is_worked_out_by_hand(
    reduction: str, dtype: torch.dtype, in_place: bool
) -> None:
    name = uuid.uuid4().hex
    results = together(replicas(name, reduction=reduction), dtype, in_place=in_place)
    assert {result.commit.plan for result in results} == {reduction}
    expected = by_hand(dtype, [10.0, 20.0, 30.0])
    for result in results:
        assert result.tensors is not None
        assert all(map(torch.equal, result.tensors, expected))
    joiner = replicas(name)[0]
    layout = TensorLayout.of(tensors(0, dtype))
    again = joiner.replay(results[0].commit, layout).tensors
    assert again is not None
    assert all(map(torch.equal, again, expected))


def test_it_is_the_papers_formula() -> None:
    result = together(replicas(uuid.uuid4().hex))[0]
    assert result.tensors is not None
    for found, expected in zip(result.tensors, formula([10, 20, 30]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_what_was_given_is_left_alone_where_nothing_else_was_said() -> None:
    owns = replicas(uuid.uuid4().hex)
    mine = [tensors(rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda own: own.exchange(0, 0, mine[own.rank]), owns))
    for rank in range(3):
        assert all(map(torch.equal, mine[rank], tensors(rank)))


@pytest.mark.parametrize(
    ("codec", "cosine"), [("bf16", 0.9999), ("int8", 0.999), ("e3m0", 0.95), ("sparse", 0.0)]
)
@pytest.mark.parametrize("reduction", ["all-gather", "sharded"])
def test_directions_can_be_encoded(codec: str, cosine: float, reduction: str) -> None:
    name = uuid.uuid4().hex
    results = together(replicas(name, 9, codec=codec, reduction=reduction), in_place=True)
    first = results[0].tensors
    assert first is not None
    for result in results:
        assert result.tensors is not None
        assert all(map(torch.equal, result.tensors, first))
    layout = TensorLayout.of(tensors(0))
    again = replicas(name, 9, codec=codec)[0].replay(results[0].commit, layout).tensors
    assert again is not None
    assert all(map(torch.equal, again, first))
    expected = formula([10.0 * (rank + 1) for rank in range(9)])
    for is_plain, found, whole, length in zip(
        EMBEDDINGS, first, expected, results[0].commit.norms, strict=True
    ):
        # The embedding is in blocks with directions here, which are far longer.
        if not is_plain:
            assert torch.nn.functional.cosine_similarity(found, whole, dim=0) >= cosine
        if not is_plain and cosine:  # Encoding takes nothing from the length.
            assert norm(found) == pytest.approx(length, rel=1e-5)


def test_quality_counts_large_batches() -> None:
    owns = replicas(uuid.uuid4().hex, weighting="quality")
    commit = together(owns)[0].commit
    assert [one.weight for one in commit.contributors] == [20.0, 80.0, 180.0]


# -- deciding ----------------------------------------------------------------------------------


def header(rank: int, norms: tuple[float, ...]) -> Header:
    return Header(
        kind="contribution",
        run="r",
        round=0,
        fragment=0,
        rank=rank,
        attempt=0,
        layout="L",
        nbytes=1000,
        tokens=10,
        norms=norms,
    )


def decided(*headers: Header) -> Commit:
    named = {one.rank: (one, f"digest{one.rank}") for one in headers}
    return decide(named, run="r", round_=0, fragment=0)


def test_a_commit_says_how_long_the_mean_is_to_be() -> None:
    commit = decided(header(0, (1.0, PLAIN)), header(1, (3.0, PLAIN)))
    assert commit.norms == (2.0, PLAIN)
    assert Commit.decode(commit.encode()).norms == (2.0, PLAIN)


def test_who_merges_another_way_is_left_out() -> None:
    commit = decided(header(0, ()), header(1, (1.0, 2.0)), header(2, (2.0, 2.0)))
    assert [one.rank for one in commit.contributors] == [1, 2]
    exclusion = commit.exclusion_of(0)
    assert exclusion is not None
    assert "merged another way" in exclusion.reason


@pytest.mark.parametrize("norms", [(), (1.0,), (1.0, 1e308, 1.0, 1.0)])
def test_norms_that_cannot_be_used_spoil_no_replica(norms: tuple[float, ...]) -> None:
    name = uuid.uuid4().hex
    results = together(replicas(name))
    commit = replace(results[0].commit, norms=norms)
    result = replicas(name)[0].replay(commit, TensorLayout.of(tensors(0)))
    assert (result.tensors is None) == bool(norms)
