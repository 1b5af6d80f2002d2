"""Encoded chunks that lie in the memory of the tensors they were made of."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_streaming import CHUNK, Late

from diloco_cloud.errors import ExchangeError, RoundTimeoutError, StoreError
from diloco_cloud.exchange.buffers import ChunkedBytes
from diloco_cloud.exchange.contributing import Contributing
from diloco_cloud.exchange.contribution import RAW
from diloco_cloud.exchange.rounds import RoundExchange
from diloco_cloud.exchange.upload import open_contribution, send_chunks
from diloco_cloud.exchange.work import RoundResult, Work
from diloco_cloud.store.memory import MemoryStore

#: Chunks that lie across tensors, a tensor of many chunks, and a last chunk of one element.
SIZES = (700, 33, 2000, 83, 1)
LOSSY = ["bf16", "int8", "e3m0", "e2m1"]

Make = Callable[[int], list[torch.Tensor]]


def tensors(rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=g).to(dtype) for size in SIZES]


def replica(
    name: str, rank: int, codec: str, world_size: int = 3, **settings: Any
) -> RoundExchange:
    own = RoundExchange(
        MemoryStore(name),
        "run",
        rank,
        world_size,
        timeout_s=20.0,
        poll_interval_s=0.02,
        patience_s=0.05,
        chunk_bytes=CHUNK,
        codec=codec,
        **settings,
    )
    own.contributing.overwrites_from = 0
    return own


def together(owns: list[RoundExchange], make: Make, *, in_place: bool) -> list[RoundResult]:
    def work(own: RoundExchange) -> RoundResult:
        return own.exchange(0, 0, make(own.rank), Work(tokens=10), in_place=in_place)

    with ThreadPoolExecutor(len(owns)) as pool:
        return list(pool.map(work, owns))


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("reduction", ["all-gather", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_are_the_same_bits(codec: str, reduction: str, dtype: torch.dtype) -> None:
    def make(rank: int) -> list[torch.Tensor]:
        return tensors(rank, dtype)

    found = []
    for in_place in (False, True):
        name = uuid.uuid4().hex
        owns = [replica(name, rank, codec, reduction=reduction) for rank in range(3)]
        for result in together(owns, make, in_place=in_place):
            assert result.tensors is not None
            found.append(result.tensors)
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))


@pytest.mark.parametrize("codec", LOSSY)
def test_nothing_is_held_beside_the_tensors(codec: str) -> None:
    own = Contributing(MemoryStore(uuid.uuid4().hex), "run", 0, 0, codec=codec, chunk_bytes=CHUNK)
    own.overwrites_from = 0
    apart = own.pack(0, 0, tensors(0), Work()).own
    within = own.pack(0, 0, tensors(0), Work(), in_place=True).own
    assert within.header.checksums == apart.header.checksums
    assert within.encoded is not None
    assert not any(within.encoded)
    for chunk in range(within.header.chunks):
        assert b"".join(within.pieces(chunk)) == b"".join(apart.pieces(chunk))
        mine, other = within.chunk(chunk), apart.chunk(chunk)
        assert mine is not None
        assert other is not None
        assert torch.equal(mine, other)


def test_a_chunk_that_grows_is_kept_apart() -> None:
    """One bf16 value has two bytes, and with a scale of its own three."""
    own = Contributing(MemoryStore(uuid.uuid4().hex), "run", 0, 0, codec="int8", chunk_bytes=64)
    own.overwrites_from = 0
    values = [torch.randn(33).to(torch.bfloat16)]
    packed = own.pack(0, 0, values, Work(), in_place=True).own
    assert packed.encoded is not None
    assert [len(one) for one in packed.encoded] == [0, 3]


@pytest.mark.parametrize("codec", [RAW, "sparse"])
def test_what_is_not_encoded_or_is_owed_stays_as_it_is(codec: str) -> None:
    own = Contributing(MemoryStore(uuid.uuid4().hex), "run", 0, 0, codec=codec, chunk_bytes=CHUNK)
    own.overwrites_from = 0
    values = tensors(0)
    own.pack(0, 0, values, Work(), in_place=True)
    assert all(map(torch.equal, values, tensors(0)))


@pytest.mark.parametrize("codec", [RAW, *LOSSY])
@pytest.mark.parametrize("reduction", ["all-gather", "sharded"])
def test_tensors_that_share_memory_are_averaged_as_any_others(codec: str, reduction: str) -> None:
    def tied(rank: int) -> list[torch.Tensor]:
        one, *others = tensors(rank)
        return [one, *others, one, others[1][500:1500]]

    def apart(rank: int) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in tied(rank)]

    found = []
    for make in (apart, tied):
        name = uuid.uuid4().hex
        owns = [replica(name, rank, codec, reduction=reduction) for rank in range(3)]
        for result in together(owns, make, in_place=True):
            assert result.tensors is not None
            found.append(result.tensors)
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))


def test_small_tensors_stay_as_they_are() -> None:
    own = Contributing(MemoryStore(uuid.uuid4().hex), "run", 0, 0, codec="e3m0")
    values = tensors(0)
    packed = own.pack(0, 0, values, Work(), in_place=True)
    assert not packed.in_place
    assert all(map(torch.equal, values, tensors(0)))


def test_a_contribution_that_is_left_to_others_changes_nothing() -> None:
    name = uuid.uuid4().hex
    own, values = replica(name, 0, "e3m0", reduction="sharded"), tensors(0)
    own.contribute(0, 0, values, Work(tokens=10))
    assert all(map(torch.equal, values, tensors(0)))


def test_chunks_that_a_wrong_expectation_has_overwritten_are_read_from_the_store() -> None:
    """A life of rank 2 sent all of its chunks and died; the next life sends other ones."""
    name = uuid.uuid4().hex
    earlier = replica(name, 2, "e3m0", reduction="sharded").contributing
    earlier.codec, earlier.reduction, earlier.chunk_bytes = "e3m0", "sharded", CHUNK
    packed = earlier.pack(0, 0, tensors(7), Work(tokens=10), contributors=3)
    assert open_contribution(earlier.store, packed.own)
    send_chunks(earlier.store, packed.own, 2)
    owns = [replica(name, rank, "e3m0", reduction="sharded") for rank in (0, 1)]
    owns.append(replica(name, 2, "e3m0", reduction="sharded", attempt=1))
    owns[2].store = owns[2].contributing.store = Late(name, packed.own.header.chunks)
    results = together(owns, tensors, in_place=True)
    other = uuid.uuid4().hex
    expected = together(
        [replica(other, rank, "e3m0", reduction="sharded") for rank in range(3)],
        tensors,
        in_place=False,
    )
    for result in results:
        assert result.tensors is not None
        assert expected[0].tensors is not None
        assert all(map(torch.equal, result.tensors, expected[0].tensors))


def test_bytes_that_begin_a_chunk_leave_the_rest() -> None:
    first, second = bytearray(5), bytearray(5)
    chunks = ChunkedBytes([memoryview(first), memoryview(second)], 8)
    assert chunks.begin_with(0, torch.arange(1, 7, dtype=torch.uint8))
    assert (bytes(first), bytes(second)) == (b"\1\2\3\4\5", b"\6\0\0\0\0")
    assert chunks.read(0, 6).tolist() == [1, 2, 3, 4, 5, 6]
    assert [bytes(piece) for piece in chunks.pieces(0, 6)] == [b"\1\2\3\4\5", b"\6"]
    assert not chunks.begin_with(1, torch.ones(3, dtype=torch.uint8))
    assert bytes(second) == b"\6\0\0\0\0"


class Refusing(MemoryStore):
    """Takes no contribution at first."""

    refuses = True

    def create(self, key: str, data: Any) -> None:
        if self.refuses and "/put/" in key:
            raise StoreError("out of order")
        super().create(key, data)


@pytest.mark.parametrize("codec", LOSSY)
def test_what_a_failed_try_has_left_is_not_contributed(codec: str) -> None:
    name = uuid.uuid4().hex
    owns = [replica(name, rank, codec, 2, reduction="all-gather") for rank in range(2)]
    owns[0].store = owns[0].contributing.store = store = Refusing(name)
    values = tensors(0)
    with pytest.raises(StoreError, match="out of order"):
        owns[0].exchange(0, 0, values, Work(tokens=10), in_place=True)
    store.refuses = False
    with pytest.raises(ExchangeError, match="what an earlier try has left"):
        owns[0].exchange(0, 0, values, Work(tokens=10), in_place=True)
    assert not store.list()
    for value, copy in zip(values, tensors(0), strict=True):
        value.copy_(copy)
    results = together(owns, lambda rank: tensors(rank) if rank else values, in_place=True)
    other = uuid.uuid4().hex
    apart = [replica(other, rank, codec, 2, reduction="all-gather") for rank in range(2)]
    expected = together(apart, tensors, in_place=False)[0]
    for result in results:
        assert result.tensors is not None
        assert expected.tensors is not None
        assert all(map(torch.equal, result.tensors, expected.tensors))


def test_a_wait_that_was_too_long_is_gone_on_with() -> None:
    name = uuid.uuid4().hex
    owns = [replica(name, rank, "bf16", 2, reduction="all-gather") for rank in range(2)]
    owns[0].timeout_s = owns[0].join_timeout_s = 0.05
    values = tensors(0)
    with pytest.raises(RoundTimeoutError):
        owns[0].exchange(0, 0, values, Work(tokens=10), in_place=True)
    owns[0].timeout_s = owns[0].join_timeout_s = 20.0
    results = together(owns, lambda rank: tensors(rank) if rank else values, in_place=True)
    other = uuid.uuid4().hex
    apart = [replica(other, rank, "bf16", 2, reduction="all-gather") for rank in range(2)]
    expected = together(apart, tensors, in_place=False)[0]
    for result in results:
        assert result.tensors is not None
        assert expected.tensors is not None
        assert all(map(torch.equal, result.tensors, expected.tensors))
