"""Large contributions: sent, averaged and read chunk by chunk, before the decision if possible."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_cloud import keys
from diloco_cloud.errors import ExchangeError, NotFoundError
from diloco_cloud.exchange.codecs import get_codec
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.contributing import Contributing
from diloco_cloud.exchange.following import sums_of
from diloco_cloud.exchange.layout import TensorLayout
from diloco_cloud.exchange.membership import Membership
from diloco_cloud.exchange.payloads import Payloads
from diloco_cloud.exchange.rounds import RoundExchange
from diloco_cloud.exchange.upload import dealt, open_contribution, send_chunks
from diloco_cloud.exchange.volunteer import Volunteer
from diloco_cloud.exchange.watch import Clock
from diloco_cloud.exchange.work import RoundResult, Work
from diloco_cloud.store.memory import MemoryStore

CHUNK = 1024
SIZES = (700, 33, 1500, 1)


class Recording(MemoryStore):
    """Remembers its requests, and who made them."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.created: list[str] = []
        self.read: list[str] = []

    def create(self, key: str, data: Any) -> None:
        super().create(key, data)
        self.created.append(key)

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        self.read.append(key)
        return super().get_range(key, start, length)


class Late(MemoryStore):
    """Its life 1 of rank 2 comes when two others have averaged everything with life 0's work."""

    def __init__(self, name: str, chunks: int) -> None:
        super().__init__(name)
        self.chunks = chunks

    def create(self, key: str, data: Any) -> None:
        if "/open/0002.0001" in key:
            deadline = time.monotonic() + 20
            while sum("/sum/" in info.key for info in self.list()) < 2 * self.chunks // 3:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        super().create(key, data)


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


def tensors(rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=g).to(dtype) for size in SIZES]


def replica(name: str, rank: int, world_size: int = 3, **settings: Any) -> RoundExchange:
    strict = settings.pop("strict", True)
    own = RoundExchange(
        Recording(name),
        "run",
        rank,
        world_size,
        timeout_s=20.0,
        poll_interval_s=0.02,
        chunk_bytes=CHUNK,
        patience_s=settings.pop("patience_s", 0.05),
        **{"reduction": "sharded", **settings},
    )
    if not strict:
        own.membership = Membership(world_size, quorum=2, grace_s=0.1, heartbeat_s=0.1)
    return own


def together(owns: Sequence[RoundExchange], round_: int = 0, **more: Any) -> list[RoundResult]:
    def work(own: RoundExchange) -> RoundResult:
        return own.exchange(round_, 0, tensors(own.rank), Work(tokens=10), **more)

    with ThreadPoolExecutor(len(owns)) as pool:
        return [one.result(timeout=60) for one in [pool.submit(work, own) for own in owns]]


def mean(ranks: Sequence[int]) -> list[torch.Tensor]:
    found = [torch.zeros(size) for size in SIZES]
    for rank in ranks:
        for total, values in zip(found, tensors(rank), strict=True):
            total += values
    return [total / len(ranks) for total in found]


def equal(result: RoundResult, expected: Sequence[torch.Tensor]) -> bool:
    assert result.tensors is not None
    return all(map(torch.equal, result.tensors, expected))


@given(st.integers(0, 300), st.integers(1, 9), st.integers(0, 8))
def test_every_chunk_is_sent_once_and_columns_in_order(
    chunks: int, groups: int, place: int
) -> None:
    order = list(dealt(chunks, groups, place))
    assert sorted(order) == list(range(chunks))
    columns = [chunk // groups for chunk in order]
    assert columns == sorted(columns)


def test_at_any_time_every_owner_is_sent_one_chunk() -> None:
    orders = [list(dealt(12, 4, place)) for place in range(4)]
    for sent in zip(*orders, strict=True):
        assert sorted(chunk % 4 for chunk in sent) == [0, 1, 2, 3]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_means_are_there_before_the_decision(name: str, world_size: int) -> None:
    """The last to seal holds the decision up until all means are stored."""
    chunks = -(-4 * sum(SIZES) // CHUNK)

    class Patient(Recording):
        def create(self, key: str, data: Any) -> None:
            if key == keys.put(0, 0, world_size - 1, 0):
                stored = MemoryStore(name)
                deadline = time.monotonic() + 20
                while sum("/sum/" in info.key for info in stored.list()) < chunks:
                    assert time.monotonic() < deadline, "nobody averages ahead"
                    time.sleep(0.01)
            super().create(key, data)

    owns = [replica(name, rank, world_size) for rank in range(world_size)]
    owns[-1].store = owns[-1].contributing.store = Patient(name)
    results = together(owns)
    assert all(equal(result, mean(range(world_size))) for result in results)
    sums = [info.key for info in MemoryStore(name).list() if "/sum/" in info.key]
    assert len(sums) == chunks


def test_nobody_reads_more_than_its_share(name: str) -> None:
    owns = [replica(name, rank, 4, patience_s=20.0) for rank in range(4)]
    together(owns)
    chunks = -(-4 * sum(SIZES) // CHUNK)
    for own in owns:
        assert isinstance(own.store, Recording)
        reads = Counter(key.split("/")[2] for key in own.store.read if ".stream/" in key)
        mine = len(range(own.rank, chunks, 4))
        assert reads["part"] == 3 * mine
        assert reads["sum"] == chunks - mine


class Raced(Recording):
    """The decision is made before what is averaged ahead begins, or while it reads its headers."""

    def __init__(self, name: str, *, decides_first: bool) -> None:
        super().__init__(name)
        self._decides_first = decides_first
        self._looked, self._read_put, self._averaged = (threading.Event() for _ in range(3))

    def list(self, prefix: str = "") -> list[Any]:
        if prefix == keys.openings(0, 0) and self._decides_first:
            assert self._read_put.wait(20)
        found = super().list(prefix)
        if prefix == keys.directory(0, 0):
            self._looked.set()
        return found

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        if "/open/" in key and not self._decides_first:
            assert self._looked.wait(20)
        found = super().get_range(key, start, length)
        if "/put/" in key:
            self._read_put.set()
        return found

    def create(self, key: str, data: Any) -> None:
        if key == keys.commit(0, 0):
            assert self._averaged.wait(20)
        super().create(key, data)
        if "/sum/" in key:
            self._averaged.set()


@pytest.mark.parametrize("decides_first", [True, False])
def test_who_decides_and_averages_ahead_reads_every_header_once(
    name: str, decides_first: bool
) -> None:
    for rank in (1, 2):
        replica(name, rank).contribute(0, 0, tensors(rank), Work(tokens=10))
    own = replica(name, 0)
    own.store = own.contributing.store = store = Raced(name, decides_first=decides_first)
    assert equal(own.exchange(0, 0, tensors(0), Work(tokens=10)), mean([0, 1, 2]))
    headers = [key for key in store.read if "/open/" in key or "/put/" in key]
    assert sorted(key[-9:] for key in headers) == ["0001.0000", "0002.0000"]


def test_a_contribution_that_is_begun_and_never_ends_is_done_without(name: str) -> None:
    """Its header has gone ahead, and the others have averaged in expectation of the rest."""
    dead = Contributing(MemoryStore(name), "run", 2, 0, reduction="sharded", chunk_bytes=CHUNK)
    packed = dead.pack(0, 0, tensors(2), Work(tokens=10), contributors=3)
    assert open_contribution(dead.store, packed.own)
    results = together([replica(name, rank, strict=False, join_timeout_s=0.3) for rank in (0, 1)])
    assert all(equal(result, mean([0, 1])) for result in results)


@pytest.mark.parametrize("in_place", [False, True])
def test_an_expectation_that_does_not_come_true_costs_nothing_but_time(
    name: str, in_place: bool
) -> None:
    """A life of rank 2 sent all of its chunks and died; the next life sends other ones."""
    earlier = Contributing(MemoryStore(name), "run", 2, 0, reduction="sharded", chunk_bytes=CHUNK)
    packed = earlier.pack(0, 0, tensors(7), Work(tokens=10), contributors=3)
    assert open_contribution(earlier.store, packed.own)
    send_chunks(earlier.store, packed.own, 2)
    owns = [replica(name, rank) for rank in (0, 1)]
    owns.append(replica(name, 2, attempt=1))
    owns[2].store = owns[2].contributing.store = Late(name, packed.own.header.chunks)
    results = together(owns, in_place=in_place)
    assert all(equal(result, mean(range(3))) for result in results)
    names = {info.key.split("/")[3] for info in MemoryStore(name).list() if "/sum/" in info.key}
    assert len(names) == 2


def test_means_take_the_place_of_what_was_contributed(name: str) -> None:
    owns = [replica(name, rank) for rank in range(3)]
    mine = [tensors(rank) for rank in range(3)]

    def work(rank: int) -> RoundResult:
        return owns[rank].exchange(0, 0, mine[rank], in_place=True)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(work, range(3)))
    for rank, result in enumerate(results):
        assert result.tensors is not None
        for before, after, expected in zip(mine[rank], result.tensors, mean(range(3)), strict=True):
            assert before.data_ptr() == after.data_ptr()
            assert torch.equal(before, expected)


def test_a_damaged_chunk_is_the_same_for_everybody(name: str) -> None:
    class Damaging(Recording):
        def create(self, key: str, data: Any) -> None:
            if "/part/" in key and key.endswith("000005/0001.0000"):
                data = bytes(len(b"".join(data)))
            super().create(key, data)

    owns = [replica(name, rank) for rank in range(3)]
    owns[1].store = owns[1].contributing.store = Damaging(name)
    results = together(owns)
    assert all(result.tensors is None for result in results)
    assert len({result.reason for result in results}) == 1
    assert "chunk 5 is damaged" in results[0].reason


@pytest.mark.parametrize("over", [False, True])
def test_a_round_that_is_being_deleted_is_not_damaged(name: str, over: bool) -> None:
    """Its objects go one after the other; the decision may be the last."""
    commit = together([replica(name, rank) for rank in range(3)])[0].commit
    store = MemoryStore(name)
    store.delete_many([info.key for info in store.list(keys.sums(0, 0, commit.digest[:16]))])
    store.delete(keys.part(0, 0, 4, 3, 0, 0))
    if over:
        store.create(keys.commit(1, 0), b"")
        with pytest.raises(NotFoundError):
            replica(name, 2).replay(commit, TensorLayout.of(tensors(2)))
    else:  # Then it can only have been lost, and everybody is told so.
        result = replica(name, 2).replay(commit, TensorLayout.of(tensors(2)))
        assert result.tensors is None
    told = [b'"kind":"void"' in store.get(info.key) for info in store.list(keys.stream(0, 0))]
    assert any(told) is not over


# -- codecs ----------------------------------------------------------------------------------------


def decoded_mean(codec: str, reduction: str, world_size: int) -> torch.Tensor:
    """Worked out chunk by chunk, without the exchange."""
    encoder = get_codec(codec)
    flat = [torch.cat(tensors(rank)) for rank in range(world_size)]
    per_chunk, found = CHUNK // 4, []
    for start in range(0, len(flat[0]), per_chunk):
        parts = [values[start : start + per_chunk] for values in flat]
        chunk = encoder.mean(len(parts[0]))
        for values in parts:
            chunk.add(encoder.encode(values), 1.0)
        result = chunk.result()
        if reduction == "sharded" and sums_of(codec) != "raw":
            again = get_codec(sums_of(codec))
            result = again.decode(again.encode(result), len(result))
        found.append(result)
    return torch.cat(found)


@pytest.mark.parametrize("reduction", ["all-gather", "sharded"])
@pytest.mark.parametrize("codec", ["bf16", "int8", "e3m0", "e2m1", "sparse"])
def test_encoded_contributions_are_averaged(name: str, codec: str, reduction: str) -> None:
    world_size = 9  # more than e3m0 saves, so that it is sharded
    owns = [replica(name, r, world_size, codec=codec, reduction=reduction) for r in range(9)]
    results = together(owns)
    how = "all-gather" if codec == "sparse" else reduction
    assert {result.commit.plan for result in results} == {how}
    expected = decoded_mean(codec, how, world_size)
    for result in results:
        assert result.tensors is not None
        assert torch.equal(torch.cat(result.tensors), expected)


def test_many_small_chunks_are_read_at_once(name: str) -> None:
    owns = [replica(name, rank, 3, codec="sparse") for rank in range(3)]
    together(owns)
    for own in owns:
        assert isinstance(own.store, Recording)
        # At most a header, before the decision, and the chunks.
        assert max(Counter(own.store.read).values()) <= 2


def test_what_was_not_sent_goes_into_the_next_round(name: str) -> None:
    """Error feedback: over some rounds, everything arrives."""
    owns = [replica(name, rank, 2, codec="sparse") for rank in range(2)]
    target, arrived = torch.cat(mean(range(2))), torch.zeros(sum(SIZES))
    for round_ in range(12):
        (first, _) = together(owns, round_)
        assert first.tensors is not None
        arrived += torch.cat(first.tensors)
    sent = (arrived != 0).float().mean()
    (once, _) = together([replica(name + "-once", rank, 2, codec="sparse") for rank in range(2)])
    assert once.tensors is not None
    assert sent > 3 * (torch.cat(once.tensors) != 0).float().mean()
    assert torch.nn.functional.cosine_similarity(arrived, target, dim=0) > 0.5


# -- volunteers ------------------------------------------------------------------------------------


def volunteers(name: str, count: int, over: Callable[[], bool]) -> list[threading.Thread]:
    found = []
    for index in range(count):
        one = Volunteer(MemoryStore(name), "run", index, poll_interval_s=0.02)
        found.append(threading.Thread(target=one.work, args=(over,)))
        found[-1].start()
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_with_volunteers_replicas_read_no_contributions(name: str, count: int) -> None:
    over = threading.Event()
    threads = volunteers(name, count, over.is_set)
    try:
        owns = [replica(name, rank, patience_s=20.0, reducers=lambda: count) for rank in range(3)]
        for round_ in range(3):
            results = together(owns, round_)
            assert all(equal(result, mean(range(3))) for result in results)
            assert {result.commit.reducers for result in results} == {count}
    finally:
        over.set()
        for thread in threads:
            thread.join()
    for own in owns:
        assert isinstance(own.store, Recording)
        assert not [key for key in own.store.read if "/part/" in key]


def test_without_the_volunteers_that_were_there_the_replicas_do_it_all(name: str) -> None:
    owns = [replica(name, rank, reducers=lambda: 2) for rank in range(3)]
    results = together(owns)
    assert all(equal(result, mean(range(3))) for result in results)
    assert results[0].commit.reducers == 2


def test_a_volunteer_does_the_dead_ones_chunks(name: str) -> None:
    over = threading.Event()
    threads = volunteers(name, 1, over.is_set)  # of two
    try:
        owns = [replica(name, rank, patience_s=20.0, reducers=lambda: 2) for rank in range(3)]
        assert all(equal(result, mean(range(3))) for result in together(owns))
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'{"commit": {}, "layout": []}',
        b'{"commit": 1, "layout": [["a", [1], "float32"]]}',
        b"[" * 100_000,
    ],
)
def test_a_volunteer_lives_through_outlines_that_are_none(name: str, data: bytes) -> None:
    store = MemoryStore(name)
    store.create(keys.outline(0, 0, "0" * 16), data)
    asked = iter([False, False, False, True, True])
    assert Volunteer(store, "run", 0, poll_interval_s=0.01).work(lambda: next(asked)) == 0


def test_a_volunteer_leaves_a_round_that_went_another_way(name: str) -> None:
    """Its outline names a decision that was not made, and parts that never came."""
    together([replica(name, rank, 2, reducers=lambda: 1, patience_s=0.0) for rank in range(2)])
    store = MemoryStore(name)
    decided = Commit.decode(store.get(keys.commit(0, 0)))
    store.put(keys.commit(0, 0), replace(decided, reason="another").encode())
    for info in store.list():
        if "/sum/" in info.key or "/part/" in info.key:
            store.delete(info.key)
    time_s = [0.0]

    def sleep(seconds: float) -> None:
        time_s[0] += seconds

    clock = Clock(now=lambda: time_s[0], sleep=sleep)
    volunteer = Volunteer(store, "run", 0, clock=clock)
    assert volunteer.work(lambda: time_s[0] > 60) == 0
    assert not [info.key for info in store.list() if "/sum/" in info.key]


@pytest.mark.parametrize("sent", ["nothing else", "a short chunk"])
def test_what_is_cut_off_stops_nobody(name: str, sent: str) -> None:
    """A chunk that is shorter than its header says is damaged, and everybody is told so."""

    class Cutting(Recording):
        def create(self, key: str, data: Any) -> None:
            if sent == "a short chunk" and "/part/" in key and key.endswith("000005/0001.0000"):
                data = b"".join(data)[:-1]
            super().create(key, data)

    owns = [replica(name, rank) for rank in range(3)]
    owns[1].store = owns[1].contributing.store = Cutting(name)
    results = together(owns)
    if sent == "a short chunk":
        assert all(result.tensors is None for result in results)
        assert "truncated" in results[0].reason
    else:
        assert all(equal(result, mean(range(3))) for result in results)


def test_another_process_of_the_same_life_is_told_to_take_the_next_attempt(name: str) -> None:
    earlier = Contributing(MemoryStore(name), "run", 0, 0, reduction="sharded", chunk_bytes=CHUNK)
    assert open_contribution(earlier.store, earlier.pack(0, 0, tensors(5), Work()).own)
    with pytest.raises(ExchangeError, match="began to send other work") as caught:
        replica(name, 0, 2).exchange(0, 0, tensors(0), Work())
    assert "DILOCO_ATTEMPT" in str(caught.value.fix)


def test_a_guess_without_oneself_is_not_followed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The means would take the place of chunks that are still being sent."""
    together([replica(name, rank, 2) for rank in range(2)])
    late = replica(name, 2, 2)
    monkeypatch.setattr(RoundExchange, "expected", [0, 1])
    packed = late._pack(0, 0, tensors(2), Work(tokens=10), None, None, in_place=True)
    payloads = Payloads(late.store, packed.own, late.signer)
    into = packed.destination()
    ahead = late._speculate(packed, payloads, into, threading.Event())
    assert ahead is not None
    time.sleep(0.3)
    ahead.stop()
    assert all(map(torch.equal, packed.tensors, tensors(2)))


def test_a_volunteer_does_not_believe_in_a_size(name: str) -> None:
    """The outline of an unsigned run may be anybody's; a chunk of memory for each would be all."""
    together([replica(name, rank, 2, reducers=lambda: 1, patience_s=0.0) for rank in range(2)])
    store = MemoryStore(name)
    (key,) = [info.key for info in store.list() if "/outline/" in info.key]
    outline = json.loads(store.get(key))
    size = 2**50
    outline["layout"] = [["t", [size // 4], "float32"]]
    layout = TensorLayout.from_rows(outline["layout"])
    outline["commit"] |= {"layout": layout.digest, "nbytes": size}
    store.put(key, json.dumps(outline).encode())
    asked = iter([False, False, True])
    assert Volunteer(store, "run", 0, poll_interval_s=0.01).work(lambda: next(asked)) == 0
