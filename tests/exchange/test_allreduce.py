"""All-reduce through a store: the same mean everywhere, whatever happens on the way."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from processors import output_on

from diloco_cloud import keys
from diloco_cloud.errors import (
    DeniedError,
    ExchangeError,
    LayoutMismatchError,
    RoundTimeoutError,
)
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.contribution import checksums, decode, header_size
from diloco_cloud.exchange.layout import byte_view
from diloco_cloud.exchange.membership import Life
from diloco_cloud.exchange.watch import Clock
from diloco_cloud.store import open_store
from diloco_cloud.store.base import Data, buffers
from diloco_cloud.store.memory import MemoryStore


@pytest.fixture
def uri() -> str:
    return f"memory://{uuid.uuid4().hex}"


def on_ranks(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    """Run ``work(rank)`` for all ranks at once."""
    with ThreadPoolExecutor(world_size) as pool:
        return [f.result(timeout=60) for f in [pool.submit(work, r) for r in range(world_size)]]


def door(uri: str, rank: int, world_size: int, **settings: Any) -> ObjectStoreAllReduce:
    settings = {"timeout_s": 30.0, "poll_interval_s": 0.02} | settings
    return ObjectStoreAllReduce(uri, rank, world_size, **settings)


def some_tensors(rank: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    return [
        torch.randn(1001, generator=g),
        torch.randn(3, 7, generator=g).bfloat16(),
        torch.randn(2003, generator=g),
        torch.randn(33, generator=g).half(),
        torch.empty(0),
        torch.tensor(float(rank)),
    ]


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("reduction", ["all-gather", "sharded"])
def test_mean_is_the_fp32_mean_in_rank_order(uri: str, world_size: int, reduction: str) -> None:
    def work(rank: int) -> list[torch.Tensor]:
        store = door(uri, rank, world_size, reduction=reduction)
        store.exchange.chunk_bytes = 512
        return store.allreduce(some_tensors(rank))

    results = on_ranks(world_size, work)
    for i, mine in enumerate(results[0]):
        total = torch.zeros(mine.shape)
        for rank in range(world_size):
            total += some_tensors(rank)[i].float()
        expected = (total / world_size).to(mine.dtype)
        assert all(torch.equal(result[i], expected) for result in results)
    sums = [i for i in open_store(uri).list() if "/sum/" in i.key]
    nbytes = sum(mine.nbytes for mine in results[0])
    assert len(sums) == (-(-nbytes // 512) if reduction == "sharded" else 0)


def test_single_tensor_is_changed_in_place_and_returned(uri: str) -> None:
    def work(rank: int) -> bool:
        tensor = torch.full((4,), float(rank))
        returned = door(uri, rank, 2).allreduce(tensor, name="t")
        return returned is tensor and torch.equal(tensor, torch.full((4,), 0.5))

    assert on_ranks(2, work) == [True, True]


def test_rounds_advance_and_old_ones_are_removed(uri: str) -> None:
    def work(rank: int) -> int:
        store = door(uri, rank, 2)
        for _ in range(6):
            store.allreduce(torch.ones(10) * rank)
        return store.round_id

    assert on_ranks(2, work) == [6, 6]
    assert open_store(uri).list_dirs("rounds/") == ["00000005.0"]


def test_world_of_one_passes_through_without_the_store(uri: str) -> None:
    store = door(uri, 0, 1, round_id=7)
    tensor = torch.randn(3)
    assert torch.equal(store.allreduce(tensor.clone()), tensor)
    assert store.round_id == 8
    assert open_store(uri).list() == []


@pytest.mark.parametrize("rank", [-1, 2, 5])
def test_rank_outside_the_world_is_refused(uri: str, rank: int) -> None:
    with pytest.raises(ValueError, match=r"outside \[0, 2\)"):
        ObjectStoreAllReduce(uri, rank, 2)


def test_uri_ends_with_a_slash(uri: str) -> None:
    assert door(uri, 0, 2).uri == uri + "/"
    assert door(uri + "/", 0, 2).uri == uri + "/"


def test_missing_peer_is_a_timeout_that_names_it(uri: str) -> None:
    time = [0.0]
    clock = Clock(now=lambda: time[0], sleep=lambda s: time.__setitem__(0, time[0] + s))
    with pytest.raises(RoundTimeoutError, match="replica 1, 2 did not contribute within 30 s"):
        door(uri, 0, 3, clock=clock).allreduce(torch.ones(2))
    assert time[0] >= 30
    assert issubclass(RoundTimeoutError, TimeoutError)


@pytest.mark.parametrize(("begun", "waited"), [([], 500), ([1], 500), ([1, 2], 30)])
def test_first_round_waits_longer_for_replicas_that_have_not_begun(
    uri: str, begun: list[int], waited: int
) -> None:
    time = [0.0]
    clock = Clock(now=lambda: time[0], sleep=lambda s: time.__setitem__(0, time[0] + s))
    store = door(uri, 0, 3, clock=clock, join_timeout_s=500.0)
    lives: dict[int, Life] = {r: "alive" if r in begun else "starting" for r in range(3)}
    store.exchange.membership.roster = lambda: lives
    with pytest.raises(RoundTimeoutError, match=f"within {waited} s"):
        store.allreduce(torch.ones(2))


def test_waiting_costs_few_requests(uri: str) -> None:
    time = [0.0]
    clock = Clock(now=lambda: time[0], sleep=lambda s: time.__setitem__(0, time[0] + s))
    store = door(uri, 0, 2, clock=clock, timeout_s=600.0, poll_interval_s=5.0)
    with pytest.raises(RoundTimeoutError):
        store.allreduce(torch.ones(2))
    assert store.usage.requests["list"] < 600 / 5 + 100


@pytest.mark.parametrize("other", [torch.ones(5), torch.ones(4).half(), torch.ones(2, 2)])
def test_replicas_with_other_tensors_all_get_the_same_error(uri: str, other: torch.Tensor) -> None:
    def work(rank: int) -> str:
        with pytest.raises(LayoutMismatchError) as caught:
            door(uri, rank, 3).allreduce(other.clone() if rank == 1 else torch.ones(4))
        return caught.value.message

    messages = set(on_ranks(3, work))
    assert len(messages) == 1
    assert "replica 1 trains tensors of other names, shapes or dtypes" in messages.pop()


def test_unlike_names_are_not_averaged(uri: str) -> None:
    def work(rank: int) -> None:
        with pytest.raises(LayoutMismatchError):
            door(uri, rank, 2).allreduce(torch.ones(4), name=f"name{rank}")

    on_ranks(2, work)


def test_nan_of_one_replica_never_reaches_the_mean(uri: str) -> None:
    def work(rank: int) -> torch.Tensor:
        tensor = torch.full((4,), float("nan") if rank == 1 else float(rank))
        return door(uri, rank, 3).allreduce(tensor)

    for result in on_ranks(3, work):
        assert torch.equal(result, torch.full((4,), 1.0))


def test_requests_do_not_grow_with_the_number_of_tensors(uri: str) -> None:
    def requests(name: str, tensors: int) -> list[int]:
        def work(rank: int) -> int:
            store = door(f"{uri}/{name}", rank, 3)
            store.allreduce([torch.ones(8) for _ in range(tensors)])
            counts = store.usage.requests
            # Looking out for peers depends on who is faster, not on the tensors.
            return sum(counts.values()) - counts["list"] - counts["get"]

        return on_ranks(3, work)

    one, many = requests("one", 1), requests("many", 290)
    assert max(many) <= 2 + 2 * 2  # own object and commit; header and payload of two peers
    assert sum(many) <= sum(one) + 2


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("attempt", [0, 1])
def test_a_second_run_in_the_same_prefix_is_refused(uri: str, rounds: int, attempt: int) -> None:
    def work(rank: int) -> None:
        store = door(uri, rank, 2)
        for _ in range(rounds):
            store.allreduce(torch.ones(3))

    on_ranks(2, work)
    for rank in range(2):
        tensor = torch.zeros(3)
        with pytest.raises(ExchangeError, match=r"already decided|holds rounds of another run"):
            door(uri, rank, 2, attempt=attempt).allreduce(tensor)
        assert torch.equal(tensor, torch.zeros(3))


def test_a_run_can_be_continued_at_its_next_round(uri: str) -> None:
    on_ranks(2, lambda rank: door(uri, rank, 2).allreduce(torch.ones(3)))
    on_ranks(2, lambda rank: door(uri, rank, 2, round_id=1).allreduce(torch.ones(3)))
    with pytest.raises(ExchangeError, match="holds rounds of another run"):
        door(uri, 0, 2, round_id=0).allreduce(torch.ones(3))


def test_nan_everywhere_is_an_error_and_the_next_round_works(uri: str) -> None:
    def work(rank: int) -> torch.Tensor:
        store = door(uri, rank, 2)
        with pytest.raises(ExchangeError, match="nothing to average"):
            store.allreduce(torch.full((2,), float("nan")))
        return store.allreduce(torch.full((2,), float(rank)))

    for result in on_ranks(2, work):
        assert torch.equal(result, torch.full((2,), 0.5))


def test_a_mean_that_overflows_is_applied_by_nobody(uri: str) -> None:
    def work(rank: int) -> torch.Tensor:
        tensor = torch.full((2,), 3e38)
        with pytest.raises(ExchangeError, match="the mean has NaN or infinite values"):
            door(uri, rank, 2).allreduce(tensor)
        return tensor

    for result in on_ranks(2, work):
        assert torch.equal(result, torch.full((2,), 3e38))


def test_an_expanded_tensor_is_refused_before_anything_is_sent(uri: str) -> None:
    with pytest.raises(ValueError, match="clone"):
        door(uri, 0, 2).allreduce(torch.ones(1).expand(4))
    assert open_store(uri).list() == []


def test_rounds_that_cannot_be_deleted_do_not_stop_the_run(uri: str) -> None:
    class NoDelete(MemoryStore):
        def delete_many(self, keys: Iterable[str]) -> None:
            raise DeniedError("deleting is not allowed")

    def work(rank: int) -> int:
        store = door(uri, rank, 2, store=NoDelete(uri))
        for _ in range(3):
            store.allreduce(torch.ones(2))
        return store.round_id

    assert on_ranks(2, work) == [3, 3]


def test_other_objects_among_the_rounds_are_ignored(uri: str) -> None:
    store = open_store(uri)
    for key in ("put/²²²².0000", "put/0001", "note", "put/0001.0000/x", "leave/9999.0000"):
        store.put(keys.directory(0, 0) + key, b"junk")
    results = on_ranks(2, lambda r: door(uri, r, 2).allreduce(torch.full((2,), float(r))))
    assert all(torch.equal(result, torch.full((2,), 0.5)) for result in results)


def test_owner_of_a_shard_uses_the_sum_that_is_stored(uri: str) -> None:
    """Whoever wrote it first: it is what all others read."""

    class Altered(MemoryStore):
        def create(self, key: str, data: Data) -> None:
            if "/sum/" in key and key.endswith("/000000"):
                header, body = buffers(data)
                values = torch.frombuffer(bytearray(body), dtype=torch.float32) + 1
                sums = checksums([byte_view(values)], 64)
                forged = replace(decode(bytes(header), key), checksums=sums)
                MemoryStore(uri).create(key, [forged.encode(), byte_view(values)])
            super().create(key, data)

    def work(rank: int) -> torch.Tensor:
        store = door(uri, rank, 3, reduction="sharded", store=Altered(uri))
        store.exchange.chunk_bytes = 64
        return store.allreduce(torch.full((300,), float(rank)))

    results = on_ranks(3, work)
    assert torch.equal(results[0][:16], torch.full((16,), 2.0))
    assert torch.equal(results[0][16:], torch.full((284,), 1.0))
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_weighted_mean_has_the_same_bits_on_every_kind_of_cpu() -> None:
    code = """
import numpy, torch
from concurrent.futures import ThreadPoolExecutor
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.layout import digest_tensors
from diloco_cloud.exchange.work import Work
def work(rank):
    store = ObjectStoreAllReduce("memory://cpu", rank, 3, poll_interval_s=0.02)
    data = torch.from_numpy(numpy.random.default_rng(rank).standard_normal(10_000, "f"))
    return store.exchange.exchange(0, 0, [data], Work(tokens=10 + 3 * rank)).tensors
with ThreadPoolExecutor(3) as pool:
    print({digest_tensors(tensors) for tensors in pool.map(work, range(3))})
"""
    printed = {output_on(capability, code) for capability in ("default", "avx2")}
    assert len(printed) == 1
    assert printed.pop().count("'") == 2


def test_a_restart_before_the_decision_uses_what_it_had_written(uri: str) -> None:
    time = [0.0]
    clock = Clock(now=lambda: time[0], sleep=lambda s: time.__setitem__(0, time[0] + s))
    with pytest.raises(RoundTimeoutError):
        door(uri, 0, 2, clock=clock).allreduce(torch.full((2,), 1.0))

    waiting = threading.Event()

    def work(rank: int) -> torch.Tensor:
        store = door(uri, rank, 2)
        if rank == 0:
            # Rank 0's second life computed something else; peers may have read the first.
            store.exchange.waiting_for = lambda _missing: waiting.set()
            return store.allreduce(torch.full((2,), 100.0))
        assert waiting.wait(30)
        return store.allreduce(torch.full((2,), 3.0))

    for result in on_ranks(2, work):
        assert torch.equal(result, torch.full((2,), 2.0))


def test_a_damaged_contribution_is_left_out(uri: str) -> None:
    store = open_store(uri)
    key = keys.put(0, 0, 1, 0)
    time = [0.0]
    clock = Clock(now=lambda: time[0], sleep=lambda s: time.__setitem__(0, time[0] + s))
    with pytest.raises(RoundTimeoutError):
        door(uri, 1, 2, clock=clock).allreduce(torch.ones(50))
    data = bytearray(store.get(key))
    data[header_size(200) + 9] ^= 1
    store.put(key, bytes(data))
    assert torch.equal(door(uri, 0, 2).allreduce(torch.full((50,), 3.0)), torch.full((50,), 3.0))
    (excluded,) = Commit.decode(store.get(keys.commit(0, 0))).excluded
    assert (excluded.rank, excluded.kept) == (1, True)
    assert "chunk 0 is damaged" in excluded.reason


def test_a_truncated_contribution_is_left_out(uri: str) -> None:
    store = open_store(uri)
    time = [0.0]
    clock = Clock(now=lambda: time[0], sleep=lambda s: time.__setitem__(0, time[0] + s))
    with pytest.raises(RoundTimeoutError):
        door(uri, 1, 2, clock=clock).allreduce(torch.ones(50))
    key = keys.put(0, 0, 1, 0)
    store.put(key, store.get(key)[:-4])
    assert torch.equal(door(uri, 0, 2).allreduce(torch.full((50,), 3.0)), torch.full((50,), 3.0))


def test_a_shard_whose_owner_died_is_done_by_another(uri: str) -> None:
    """Rank 2 contributes and is never heard of again; the others still get every shard."""

    def contribute_only() -> None:
        time = [0.0]
        clock = Clock(now=lambda: time[0], sleep=lambda s: time.__setitem__(0, time[0] + s))
        dead = door(uri, 2, 3, clock=clock)
        dead.exchange.chunk_bytes = 64
        with pytest.raises(RoundTimeoutError):
            dead.allreduce(torch.full((300,), 2.0))

    contribute_only()

    def work(rank: int) -> torch.Tensor:
        store = door(uri, rank, 3, reduction="sharded")
        store.exchange.chunk_bytes = 64
        store.exchange.patience_s = 0.0
        return store.allreduce(torch.full((300,), float(rank)))

    for result in on_ranks(2, work):
        assert torch.equal(result, torch.full((300,), 1.0))
