"""An all-gather of what is large: read and averaged by everybody while it is on its way."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_streaming import CHUNK, SIZES, Recording, decoded_mean, equal, mean, name, tensors
from test_streaming import replica as any_replica
from test_streaming import together as all_together

from diloco_cloud import keys
from diloco_cloud.errors import CorruptContributionError, NotFoundError
from diloco_cloud.exchange.codecs import get_codec
from diloco_cloud.exchange.contributing import Contributing
from diloco_cloud.exchange.layout import TensorLayout
from diloco_cloud.exchange.prediction import Plan
from diloco_cloud.exchange.rounds import RoundExchange
from diloco_cloud.exchange.signing import Signer
from diloco_cloud.exchange.upload import open_contribution, send_chunks
from diloco_cloud.exchange.work import RoundResult, Work
from diloco_cloud.store.memory import MemoryStore

__all__ = ["name"]

MB = 2**20
CHUNKS = -(-4 * sum(SIZES) // CHUNK)


def replica(name: str, rank: int, world_size: int = 3, **settings: Any) -> RoundExchange:
    own = any_replica(name, rank, world_size, **{"reduction": "all-gather", **settings})
    own.contributing.streams_from = 0
    return own


def sending(name: str, rank: int, attempt: int = 0) -> Contributing:
    return Contributing(
        MemoryStore(name),
        "run",
        rank,
        attempt,
        reduction="all-gather",
        chunk_bytes=CHUNK,
        streams_from=0,
    )


def with_store(own: RoundExchange, store: MemoryStore) -> RoundExchange:
    own.store = own.contributing.store = store
    return own


def until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def parts_read(owns: Sequence[RoundExchange]) -> list[int]:
    stores = [own.store for own in owns]
    return [sum("/part/" in key for key in store.read) for store in stores]  # type: ignore[attr-defined]


# -- what comes out ----------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("codec", ["raw", "bf16", "e3m0", "sparse"])
def test_the_bits_are_those_of_whole_contributions(
    name: str, codec: str, world_size: int, in_place: bool
) -> None:
    owns = [replica(name, rank, world_size, codec=codec) for rank in range(world_size)]
    whole = [replica(f"{name}-whole", rank, world_size, codec=codec) for rank in range(world_size)]
    for own in whole:
        own.contributing.streams_from = None
    for round_ in range(2):  # The second with what an error feedback kept back.
        found = all_together(owns, round_, in_place=in_place)
        plain = all_together(whole, round_, in_place=in_place)
        assert {result.commit.plan for result in (*found, *plain)} == {"all-gather"}
        for result in found:
            assert plain[0].tensors is not None
            assert equal(result, plain[0].tensors)
        if round_ == 0:
            expected = (
                torch.cat(mean(range(world_size)))
                if codec == "raw"
                else decoded_mean(codec, "all-gather", world_size)
            )
            assert found[0].tensors is not None
            assert torch.equal(torch.cat(found[0].tensors), expected)
    stored = [info.key for info in MemoryStore(name).list()]
    assert sum("/part/" in key for key in stored) == 2 * world_size * CHUNKS
    assert not [key for key in stored if "/sum/" in key]
    assert not [info.key for info in MemoryStore(f"{name}-whole").list() if "/part/" in info.key]


@pytest.mark.parametrize("world_size", [2, 3])
def test_everything_is_read_before_the_decision(name: str, world_size: int) -> None:
    """The last to seal holds the decision up until all have read all."""
    owns = [replica(name, rank, world_size) for rank in range(world_size)]
    whole = [(world_size - 1) * CHUNKS] * world_size

    class Patient(Recording):
        def create(self, key: str, data: Any) -> None:
            if key == keys.put(0, 0, world_size - 1, 0):
                until(lambda: parts_read(owns) == whole)
            super().create(key, data)

    with_store(owns[-1], Patient(name))
    results = all_together(owns)
    assert all(equal(result, mean(range(world_size))) for result in results)
    assert parts_read(owns) == whole  # and nothing again


def test_means_take_the_place_of_what_was_contributed(name: str) -> None:
    owns = [replica(name, rank, 2) for rank in range(2)]
    mine = [tensors(rank) for rank in range(2)]

    def work(rank: int) -> RoundResult:
        return owns[rank].exchange(0, 0, mine[rank], in_place=True)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, range(2)))
    for rank, result in enumerate(results):
        assert result.tensors is not None
        assert all(map(torch.equal, mine[rank], mean(range(2))))
        assert [a.data_ptr() for a in mine[rank]] == [b.data_ptr() for b in result.tensors]


def test_a_signed_run_reads_so_too_and_can_be_replayed(name: str) -> None:
    owns = [replica(name, rank, 2, signer=Signer(b"k" * 32, "run")) for rank in range(2)]
    results = all_together(owns)
    assert all(equal(result, mean(range(2))) for result in results)
    later = replica(name, 2, 3, signer=Signer(b"k" * 32, "run"))
    assert equal(later.replay(results[0].commit, TensorLayout.of(tensors(2))), mean(range(2)))


def test_one_that_sends_everything_at_once_is_averaged_all_the_same(name: str) -> None:
    owns = [replica(name, rank) for rank in range(3)]
    owns[1].contributing.streams_from = None
    assert all(equal(result, mean(range(3))) for result in all_together(owns))


# -- what does not come as expected ------------------------------------------------------------


def test_a_contribution_that_is_begun_and_never_ends_is_done_without(name: str) -> None:
    dead = sending(name, 2)
    packed = dead.pack(0, 0, tensors(2), Work(tokens=10), contributors=3)
    assert packed.own.header.is_for_all
    assert open_contribution(dead.store, packed.own)
    owns = [replica(name, rank, strict=False, join_timeout_s=0.3) for rank in (0, 1)]
    assert all(equal(result, mean([0, 1])) for result in all_together(owns))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("codec", ["raw", "e3m0"])
def test_an_expectation_that_does_not_come_true_costs_nothing_but_time(
    name: str, codec: str, in_place: bool
) -> None:
    """A life of rank 2 sent all of its chunks and died; the next life sends other ones."""
    earlier = sending(name, 2)
    earlier.codec = codec
    packed = earlier.pack(0, 0, tensors(7), Work(tokens=10), contributors=3)
    assert open_contribution(earlier.store, packed.own)
    send_chunks(earlier.store, packed.own, 2)
    owns = [replica(name, rank, codec=codec) for rank in (0, 1)]

    class Late(Recording):
        """Rank 2 comes when the others have averaged everything with its earlier life's work."""

        def create(self, key: str, data: Any) -> None:
            if "/open/0002.0001" in key:
                until(lambda: parts_read(owns[:2]) == [2 * CHUNKS] * 2)
            super().create(key, data)

    owns.append(with_store(replica(name, 2, attempt=1, codec=codec), Late(name)))
    results = all_together(owns, in_place=in_place)
    expected = mean(range(3))
    if codec != "raw":
        expected = list(torch.split(decoded_mean(codec, "all-gather", 3), SIZES))
    assert all(equal(result, expected) for result in results)


class Damaging(Recording):
    """Of rank 1, whose sixth chunk is stored as other bytes, or as fewer."""

    cut = 0

    def create(self, key: str, data: Any) -> None:
        if "/part/" in key and key.endswith("000005/0001.0000"):
            data = bytes(len(b"".join(data)) - self.cut)
        super().create(key, data)


class Second(Recording):
    """Somebody else is quicker to decide."""

    def create(self, key: str, data: Any) -> None:
        if keys.is_commit(key):
            until(lambda: any(keys.is_commit(info.key) for info in self.list(key)))
        super().create(key, data)


class DamagingSecond(Damaging, Second):
    """Both."""


@pytest.mark.parametrize("cut", [0, 1])
def test_what_is_found_damaged_on_its_way_is_left_out_by_who_found_it(name: str, cut: int) -> None:
    owns = [replica(name, rank, 2) for rank in range(2)]

    class Waiting(DamagingSecond):
        def create(self, key: str, data: Any) -> None:
            if key == keys.put(0, 0, 1, 0):
                until(lambda: any("000005/0001" in key for key in owns[0].store.read))  # type: ignore[attr-defined]
                time.sleep(0.05)
            super().create(key, data)

    store = Waiting(name)
    store.cut = cut
    with_store(owns[1], store)
    results = all_together(owns)
    assert all(equal(result, mean([0])) for result in results)
    (left_out,) = results[0].commit.excluded
    assert (left_out.rank, left_out.kept) == (1, True)
    assert ("truncated" if cut else "chunk 5 is damaged") in left_out.reason


def test_who_reads_damage_that_was_decided_on_does_not_apply_it(name: str) -> None:
    """The writer, who has its own bytes, knows nothing of it: as with a whole contribution."""
    reader, writer = replica(name, 0, 2), replica(name, 1, 2)
    with_store(reader, Second(name))
    with_store(writer, Damaging(name))
    with ThreadPoolExecutor(2) as pool:
        first, second = (
            pool.submit(own.exchange, 0, 0, tensors(own.rank), Work(tokens=10))
            for own in (reader, writer)
        )
        with pytest.raises(CorruptContributionError, match="chunk 5 is damaged"):
            first.result(timeout=60)
        assert equal(second.result(timeout=60), mean(range(2)))


def test_a_chunk_that_is_missing_is_not_made_up_for(name: str) -> None:
    commit = all_together([replica(name, rank, 2) for rank in range(2)])[0].commit
    MemoryStore(name).delete(keys.part(0, 0, 3, 1, 1, 0))
    with pytest.raises(NotFoundError):
        replica(name, 2).replay(commit, TensorLayout.of(tensors(2)))


# -- what it asks for --------------------------------------------------------------------------


def test_every_chunk_is_written_once_and_read_once(name: str) -> None:
    owns = [replica(name, rank) for rank in range(3)]
    all_together(owns)
    for own in owns:
        assert isinstance(own.store, Recording)
        created = Counter(key.split("/")[2] for key in own.store.created)
        assert (created["part"], created["open"]) == (CHUNKS, 1)
        read = Counter(key for key in own.store.read if "/part/" in key)
        assert len(read) == 2 * CHUNKS
        assert set(read.values()) == {1}


def test_chunks_that_were_sent_and_averaged_are_let_go_of(name: str) -> None:
    owns = [replica(name, rank, 2, codec="e3m0") for rank in range(2)]
    kept: list[int] = []
    send = Contributing.send

    class Watched(Contributing):
        def send(self, packed: Any, *rest: Any) -> Any:
            kept.append(sum(map(len, packed.own.encoded)))
            found = send(self, packed, *rest)
            until(lambda: not any(map(len, packed.own.encoded)))
            return found

    for own in owns:
        own.contributing.__class__ = Watched
    results = all_together(owns)
    assert min(kept) > 0
    assert all(result.tensors is not None for result in results)


# -- when --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mib", "codec", "contributors", "chunk_bytes", "streams"),
    [
        (16, "raw", 2, None, False),  # read and checked before the decision
        (17, "raw", 2, None, True),
        (12, "raw", 3, None, True),
        (20, "e3m0", 2, None, False),
        (20, "e3m0", 9, 2 * MB, True),
        (20, "e3m0", 9, MB, False),  # chunks of 135 kB
        (20, "raw", 2, 32 * MB, False),  # one chunk
        (24, "sparse", 300, None, False),  # chunks of 10 kB
    ],
)
def test_much_is_sent_chunk_by_chunk(
    mib: int, codec: str, contributors: int, chunk_bytes: int | None, streams: bool
) -> None:
    one = Contributing(MemoryStore("unused"), "run", 0, 0, codec=codec, reduction="all-gather")
    one.chunk_bytes = chunk_bytes
    given = [torch.ones(mib * MB // 4)]
    header = one.pack(0, 0, given, Work(), contributors=contributors).own.header
    assert header.is_for_all is streams
    assert header.spread == int(streams)


def test_two_begin_with_it_and_go_on_as_planned() -> None:
    one = Contributing(MemoryStore("unused"), "run", 0, 0)
    given = [torch.ones(24 * MB // 4)]
    assert one.pack(0, 0, given, Work()).own.header.is_for_all
    by_shards = Plan("sharded", MB, 4)
    assert one.pack(0, 0, given, Work(), plan=by_shards).own.header.spread == 2
    assert one.pack(0, 0, given, Work(), contributors=3).own.header.spread == 3
    assert get_codec("sparse").decay is not None
    one.codec = "bf16"
    assert one.pack(0, 0, [torch.ones(40 * MB // 4)], Work()).own.header.is_for_all
