"""What every driver promises (``diloco_cloud.store.base``), tried on each."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest

from diloco_cloud.errors import AlreadyExistsError, CorruptError, NotFoundError
from diloco_cloud.store import ObjectStore, open_store, probe_store
from diloco_cloud.store.uris import split_query


def _keys(store: ObjectStore, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def test_create_then_get_returns_the_bytes(store: ObjectStore) -> None:
    store.create("a/b", b"hello")
    assert store.get("a/b") == b"hello"


def test_create_twice_keeps_the_first(store: ObjectStore) -> None:
    store.create("k", b"first")
    with pytest.raises(AlreadyExistsError):
        store.create("k", b"second")
    assert store.get("k") == b"first"


def test_create_after_put_fails(store: ObjectStore) -> None:
    store.put("k", b"first")
    with pytest.raises(FileExistsError):
        store.create("k", b"second")


def test_create_after_delete_succeeds(store: ObjectStore) -> None:
    store.create("d/k", b"1")
    store.delete("d/k")
    store.create("d/k", b"2")
    assert store.get("d/k") == b"2"


def test_put_replaces(store: ObjectStore) -> None:
    store.put("k", b"longer than the next")
    store.put("k", b"short")
    assert store.get("k") == b"short"
    assert store.head("k").size == 5


@pytest.mark.parametrize("write", ["create", "put"])
def test_write_joins_several_buffers_of_any_kind(store: ObjectStore, write: str) -> None:
    data = [b"ab", bytearray(b"cd"), memoryview(b"xefx")[1:3], b"", memoryview(bytes(8)).cast("d")]
    getattr(store, write)("k", data)
    assert store.get("k") == b"abcdef" + bytes(8)


@pytest.mark.parametrize("write", ["create", "put"])
@pytest.mark.parametrize("data", [b"", [], [b"", b""]])
def test_write_of_nothing_makes_an_empty_object(
    store: ObjectStore, write: str, data: bytes | list[bytes]
) -> None:
    getattr(store, write)("k", data)
    assert store.get("k") == b""
    assert store.head("k").size == 0
    assert _keys(store) == ["k"]


def test_write_of_many_megabytes_round_trips(store: ObjectStore) -> None:
    parts = [bytes([i]) * (3 << 20) for i in range(4)]
    store.create("big", parts)
    assert store.head("big").size == 12 << 20
    assert store.get("big") == b"".join(parts)
    assert store.get_range("big", (6 << 20) - 1, 2) == b"\1\2"


def test_get_range_returns_the_part(store: ObjectStore) -> None:
    store.create("k", b"0123456789")
    part = store.get_range("k", 3, 4)
    assert isinstance(part, memoryview)
    assert part == b"3456"
    assert store.get_range("k", 0, 10) == b"0123456789"
    assert store.get_range("k", 10, 0) == b""


@pytest.mark.parametrize(("start", "length"), [(5, 6), (10, 1), (100, 1), (11, 0)])
def test_get_range_beyond_the_end_is_corrupt(store: ObjectStore, start: int, length: int) -> None:
    store.create("k", b"0123456789")
    with pytest.raises(CorruptError):
        store.get_range("k", start, length)


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, -1)])
def test_get_range_refuses_negative_numbers(store: ObjectStore, start: int, length: int) -> None:
    with pytest.raises(ValueError, match="byte range"):
        store.get_range("k", start, length)


@pytest.mark.parametrize(
    "read",
    [
        lambda store: store.get("no/such"),
        lambda store: store.get_range("no/such", 0, 1),
        lambda store: store.get_range("no/such", 0, 0),
        lambda store: store.head("no/such"),
        lambda store: store.get("folder"),  # the beginning of a key is not an object
        lambda store: store.head("folder"),
    ],
)
def test_read_of_an_absent_object_is_not_found(
    store: ObjectStore, read: Callable[[ObjectStore], object]
) -> None:
    store.put("folder/k", b"")
    with pytest.raises(NotFoundError) as caught:
        read(store)
    assert isinstance(caught.value, FileNotFoundError)


def test_head_tells_size_and_the_stores_time(store: ObjectStore) -> None:
    store.put("k", b"12345")
    info = store.head("k")
    assert (info.key, info.size) == ("k", 5)
    assert abs(info.last_modified - time.time()) < 60  # the server is on this machine


def test_list_is_in_key_order_with_sizes(store: ObjectStore) -> None:
    for key in ("b", "a/z", "a-b", "a/b/c", "a.b", "B"):
        store.put(key, key.encode())
    assert [(info.key, info.size) for info in store.list()] == [
        ("B", 1),
        ("a-b", 3),
        ("a.b", 3),
        ("a/b/c", 5),
        ("a/z", 3),
        ("b", 1),
    ]


def test_list_takes_a_plain_string_prefix(store: ObjectStore) -> None:
    for key in ("a/b/c", "a/bc", "a/c", "ab"):
        store.put(key, b"")
    assert _keys(store, "a/b") == ["a/b/c", "a/bc"]
    assert _keys(store, "a/b/") == ["a/b/c"]
    assert _keys(store, "a") == ["a/b/c", "a/bc", "a/c", "ab"]
    assert _keys(store, "a/b/c") == ["a/b/c"]
    assert _keys(store, "a/b/c/") == []
    assert _keys(store, "zz/") == []


@pytest.mark.parametrize("store", ["directory", "memory", "s3", "faults"], indirect=True)
def test_list_beyond_one_page_is_complete(store: ObjectStore) -> None:
    keys = [f"k/{i:04d}" for i in range(1100)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
    assert _keys(store, "k/") == keys
    store.delete_many(keys)
    assert _keys(store) == []


def test_list_sees_what_was_written_after_an_earlier_list(store: ObjectStore) -> None:
    store.put("d/1", b"")
    assert _keys(store, "d/") == ["d/1"]
    store.create("d/2", b"")
    assert _keys(store, "d/") == ["d/1", "d/2"]
    store.delete("d/1")
    assert _keys(store, "d/") == ["d/2"]


def test_list_dirs_names_the_children_that_hold_objects(store: ObjectStore) -> None:
    for key in ("runs/b/x/y", "runs/a/x", "runs/file", "other/x"):
        store.put(key, b"")
    assert store.list_dirs() == ["other", "runs"]
    assert store.list_dirs("runs/") == ["a", "b"]
    assert store.list_dirs("runs/a/") == []
    assert store.list_dirs("none/") == []


# SeaweedFS clears empty directories away later.
@pytest.mark.parametrize("store", ["directory", "memory", "faults"], indirect=True)
def test_list_dirs_forgets_emptied_ones(store: ObjectStore) -> None:
    store.put("rounds/1/put/0", b"")
    store.put("rounds/2/put/0", b"")
    store.delete("rounds/1/put/0")
    assert store.list_dirs("rounds/") == ["2"]


def test_delete_removes_and_may_be_repeated(store: ObjectStore) -> None:
    store.put("a/b", b"")
    store.delete("a/b")
    store.delete("a/b")
    store.delete("never/there")
    assert _keys(store) == []


def test_delete_of_a_folder_leaves_its_objects(store: ObjectStore) -> None:
    store.put("a/b", b"")
    store.delete("a")
    assert _keys(store) == ["a/b"]


def test_delete_many_takes_any_iterable_and_absent_keys(store: ObjectStore) -> None:
    for key in ("a/1", "a/2", "b"):
        store.put(key, b"")
    store.delete_many(key for key in ("a/1", "gone", "b"))
    store.delete_many([])
    assert _keys(store) == ["a/2"]


def test_child_is_the_same_objects_below_a_path(store: ObjectStore) -> None:
    child = store.child("runs/one")
    child.create("k", b"1")
    store.put("runs/one-more", b"")
    assert store.get("runs/one/k") == b"1"
    assert _keys(child) == ["k"]
    assert child.head("k").key == "k"
    path, query = split_query(store.uri)
    assert child.child("x/").uri == f"{path}/runs/one/x{query}"
    assert child.list_dirs() == []


# The s3:// URI of s3fs is opened by the S3 driver.
@pytest.mark.parametrize("store", ["directory", "memory", "s3", "faults"], indirect=True)
def test_uri_opens_the_store_again(store: ObjectStore) -> None:
    store.put("k", b"1")
    again = open_store(store.uri)
    assert again.uri == store.uri
    assert again.get("k") == b"1"


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", ".", "..", "a/../b", "a/./b", "a\\b", "a\0", "a\nb", "\ud800"]
)
def test_odd_keys_are_refused(store: ObjectStore, key: str) -> None:
    for call in (
        lambda: store.create(key, b""),
        lambda: store.put(key, b""),
        lambda: store.get(key),
        lambda: store.get_range(key, 0, 1),
        lambda: store.head(key),
        lambda: store.delete(key),
    ):
        with pytest.raises(ValueError, match="not an object key"):
            call()


@pytest.mark.parametrize(
    "key", ["ü/日本", "a b", "a~b", "p%41", "h#x", "q?x", "pl+us", "am&", "c:d", "e=f@"]
)
def test_keys_in_any_script_round_trip(store: ObjectStore, key: str) -> None:
    store.create(f"odd/{key}", b"1")
    assert _keys(store, "odd/") == [f"odd/{key}"]
    assert store.get(f"odd/{key}") == b"1"
    store.delete_many([f"odd/{key}"])
    assert _keys(store) == []


def test_create_has_exactly_one_winner_of_many_threads(store: ObjectStore) -> None:
    racers, races = 8, 20
    gates = [Barrier(racers) for _ in range(races)]

    def racer(number: int) -> bool:
        race, me = divmod(number, racers)
        gates[race].wait(timeout=30)
        try:
            store.create(f"race/{race}", f"{me}".encode())
        except AlreadyExistsError:
            return False
        return True

    # Races overlap: SeaweedFS makes the losers of one wait for up to seconds.
    with ThreadPoolExecutor(racers * races) as pool:
        won = list(pool.map(racer, range(racers * races)))
    for race in range(races):
        winners = [me for me in range(racers) if won[race * racers + me]]
        assert len(winners) == 1
        assert store.get(f"race/{race}") == f"{winners[0]}".encode()


def test_reader_never_sees_a_half_written_object(store: ObjectStore) -> None:
    size, stop = 1 << 20, Event()
    store.put("k", bytes(size))

    def overwrite() -> None:
        for fill in range(1, 16):
            store.put("k", bytes([fill]) * size)
        stop.set()

    def read() -> int:
        reads = 0
        while not stop.is_set():
            data = store.get("k")
            assert len(data) == size
            assert data.count(data[:1]) == size
            reads += 1
        return reads

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            pool.submit(overwrite).result(timeout=60)
        finally:
            stop.set()
        assert all(reader.result(timeout=30) > 0 for reader in readers)


def test_create_and_delete_of_neighbours_do_not_disturb_each_other(store: ObjectStore) -> None:
    def churn(me: int) -> None:
        for i in range(15):
            store.create(f"deep/er/{me}.{i}", b"x")
            store.delete(f"deep/er/{me}.{i}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(4)))
    assert _keys(store) == []


def test_probe_passes_and_leaves_nothing(store: ObjectStore) -> None:
    probe_store(store)
    assert _keys(store) == []
