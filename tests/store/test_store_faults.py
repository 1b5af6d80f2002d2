"""Each fault is injected, does what it says, and is hidden by the retries where it can be."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from fake_time import FakeTime

from diloco_cloud.errors import (
    AlreadyExistsError,
    DeniedError,
    ExpiredCredentialsError,
    NotFoundError,
    ThrottledError,
    UnreachableError,
)
from diloco_cloud.store import Data, ObjectStore, RetryingStore, open_driver
from diloco_cloud.store.faults import Faults, FaultyStore
from diloco_cloud.store.metered import MeteredStore

REFUSALS = {
    "throttled": ThrottledError,
    "timeout": UnreachableError,
    "expired": ExpiredCredentialsError,
}


@pytest.fixture(params=["memory", "directory"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> MeteredStore:
    """A driver without faults: what is really in the store, and how often it was asked."""
    if request.param == "directory":
        return MeteredStore(open_driver(tmp_path / "store"))
    return MeteredStore(open_driver(f"memory://{uuid.uuid4().hex}"))


@pytest.fixture
def fake_time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def faulty(driver: MeteredStore, fake_time: FakeTime) -> Callable[..., FaultyStore]:
    """Makes a faulty store over ``driver`` from the settings of its faults."""

    def make(**settings: Any) -> FaultyStore:
        faults = Faults(**{"seed": 3, **settings})
        return FaultyStore(driver, faults, rank=0, clock=fake_time.clock, sleep=fake_time.sleep)

    return make


def _use(store: ObjectStore) -> int:
    """Do everything a store can, and check it; returns the number of calls."""
    for i in range(40):
        store.create(f"a/{i}", b"created")
        with pytest.raises(AlreadyExistsError):
            store.create(f"a/{i}", b"other")
        store.put(f"a/{i}", [b"re", b"placed"])
        assert store.get(f"a/{i}") == b"replaced"
        assert store.get_range(f"a/{i}", 2, 3) == b"pla"
        assert store.head(f"a/{i}").size == 8
        store.delete(f"a/{i}")
        store.put(f"b/{i}", b"")
        assert [info.key for info in store.list()] == [f"b/{i}"]
        assert store.list_dirs() == ["b"]
        store.delete_many([f"b/{i}", "absent"])
    return 40 * 11


@pytest.mark.parametrize("kind", [*REFUSALS, "torn", "lost_reply", "duplicate"])
def test_fault_strikes_and_the_retries_hide_it(
    faulty: Callable[..., FaultyStore], driver: MeteredStore, fake_time: FakeTime, kind: str
) -> None:
    below = faulty(**{kind: 0.3})
    calls = _use(RetryingStore(below, fake_time.policy(attempts=50)))
    struck = below.injected[kind]
    assert below.injected.keys() == {kind}
    assert len(fake_time.sleeps) == (0 if kind == "duplicate" else struck)
    # Of n requests, 3 in 10 are struck; uploads are 5 in 11 calls, and what changes something 7.
    shares = {"torn": 5 / 11, "duplicate": 4 / 11, "lost_reply": 7 / 11}
    requests = (calls + len(fake_time.sleeps)) * shares.get(kind, 1.0)
    assert 0.2 * requests < struck < 0.45 * requests
    assert driver.list() == []


@pytest.mark.parametrize("kind", REFUSALS)
def test_refused_request_has_no_effect(
    faulty: Callable[..., FaultyStore], driver: MeteredStore, kind: str
) -> None:
    driver.put("there", b"1")
    before = driver.usage.requests.total()
    store = faulty(**{kind: 1.0})
    for call in (
        lambda: store.create("k", b"1"),
        lambda: store.put("there", b"2"),
        lambda: store.get("there"),
        lambda: store.get_range("there", 0, 1),
        lambda: store.head("there"),
        lambda: store.list(),
        lambda: store.list_dirs(),
        lambda: store.delete("there"),
        lambda: store.delete_many(["there"]),
    ):
        with pytest.raises(REFUSALS[kind], match="injected"):
            call()
    assert driver.usage.requests.total() == before
    assert store.injected[kind] == 9


def test_lost_reply_comes_after_the_effect(
    faulty: Callable[..., FaultyStore], driver: MeteredStore
) -> None:
    store = faulty(lost_reply=1.0)
    for call in (lambda: store.create("k", b"1"), lambda: store.put("l", b"2")):
        with pytest.raises(UnreachableError, match="lost reply"):
            call()
    assert (driver.get("k"), driver.get("l")) == (b"1", b"2")
    with pytest.raises(UnreachableError):  # the refusal is what was lost
        store.create("k", b"other")
    assert store.get("k") == b"1"
    for call in (lambda: store.delete("k"), lambda: store.delete_many(["l"])):
        with pytest.raises(UnreachableError):
            call()
    assert driver.list() == []


def test_torn_upload_leaves_nothing(
    faulty: Callable[..., FaultyStore], driver: MeteredStore
) -> None:
    store = faulty(torn=1.0)
    driver.put("old", b"as it was")
    with pytest.raises(UnreachableError, match=r"cut off after \d+ of 10 bytes"):
        store.create("k", [b"01234", b"56789"])
    with pytest.raises(UnreachableError):
        store.put("old", b"something new")
    assert [info.key for info in driver.list()] == ["old"]
    assert driver.get("old") == b"as it was"


def test_torn_upload_leaves_its_first_part_where_stores_are_not_atomic(
    faulty: Callable[..., FaultyStore], driver: MeteredStore, fake_time: FakeTime
) -> None:
    body = bytes(range(200))
    store = faulty(torn=1.0, torn_visible=True)
    for key, write in (("created", store.create), ("put", store.put)):
        with pytest.raises(UnreachableError):
            write(key, body)
        found = driver.get(key)
        assert len(found) < len(body)
        assert body.startswith(found)
    with pytest.raises(AlreadyExistsError):  # what is there is not what was to be written
        RetryingStore(faulty(torn=0.5, torn_visible=True), fake_time.policy()).create("put", body)
    RetryingStore(faulty(torn=0.5, torn_visible=True), fake_time.policy()).put("put", body)
    assert driver.get("put") == body


def test_duplicates_arrive_at_once_or_with_the_next_request(
    faulty: Callable[..., FaultyStore], driver: MeteredStore
) -> None:
    store, late = faulty(duplicate=1.0), 0
    for i in range(40):
        before = driver.usage.requests["put"]
        body = bytearray(b"first")
        store.put(f"{i}", body)
        body[:] = b"reuse"  # the caller's buffer is free again
        at_once = driver.usage.requests["put"] - before == 2
        driver.put(f"{i}", b"others")
        store.head(f"{i}")
        assert driver.get(f"{i}") == (b"others" if at_once else b"first")
        late += not at_once
    assert 10 < late < 30
    assert store.injected == {"duplicate": 40}


def test_duplicate_create_is_refused_unless_the_object_has_gone(
    faulty: Callable[..., FaultyStore], driver: MeteredStore
) -> None:
    store = faulty(duplicate=1.0)
    for i in range(40):
        store.create(f"kept/{i}", b"mine")
        driver.put(f"kept/{i}", b"others")
        store.create(f"gone/{i}", b"mine")
        driver.delete(f"gone/{i}")
    store.list()
    assert {driver.get(info.key) for info in driver.list("kept/")} == {b"others"}
    assert 10 < len(driver.list("gone/")) < 30


def test_late_duplicate_never_undoes_its_senders_own_newer_write(
    faulty: Callable[..., FaultyStore],
) -> None:
    store = faulty(duplicate=1.0)

    def overwrite(me: int) -> None:
        for i in range(100):
            store.put(f"{me}", f"{i}".encode())
            store.put(f"{me}", f"newer {i}".encode())
            assert store.get(f"{me}") == f"newer {i}".encode()
        store.delete(f"{me}")

    with ThreadPoolExecutor(4) as pool:  # any of them may carry the copies of the others
        list(pool.map(overwrite, range(4)))
    assert store.list() == []
    assert store.injected["duplicate"] == 800


class _Gated(MeteredStore):
    """Holds a copy of "older" that arrives by itself at the gate, once it is closed."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.opened, self.reached = Event(), Event()
        self.opened.set()

    def put(self, key: str, data: Data) -> None:
        if data == b"older" and not self.opened.is_set():
            self.reached.set()
            assert self.opened.wait(timeout=30)
        super().put(key, data)


def test_newer_write_waits_for_a_copy_that_another_thread_is_delivering() -> None:
    gated = _Gated(open_driver(f"memory://{uuid.uuid4().hex}"))
    store = FaultyStore(gated, Faults(seed=0, duplicate=1.0), rank=0)
    with ThreadPoolExecutor(2) as pool:
        for key in map(str, range(1000)):
            before = gated.usage.requests["put"]
            store.put(key, b"older")
            if gated.usage.requests["put"] == before + 1:  # its copy is under way
                break
        gated.opened.clear()
        reader = pool.submit(store.list)
        assert gated.reached.wait(timeout=30)
        writer = pool.submit(store.put, key, b"newer")
        wait([writer], timeout=0.2)
        gated.opened.set()
        reader.result(timeout=30)
        writer.result(timeout=30)
    assert gated.get(key) == b"newer"


def test_latency_is_exponential(faulty: Callable[..., FaultyStore], fake_time: FakeTime) -> None:
    store = faulty(latency=2.0)
    for _ in range(500):
        store.list()
    slept = sorted(fake_time.sleeps)
    assert len(slept) == store.injected["latency"] == 500
    assert slept[0] > 0.0
    assert 1.8 < sum(slept) / 500 < 2.2
    assert 1.2 < slept[250] < 1.6  # the median is ln 2 of the mean


def test_stale_list_misses_the_newest_objects(
    faulty: Callable[..., FaultyStore], driver: MeteredStore
) -> None:
    for i in range(5):
        driver.put(f"d{i}/k", b"")
    store = faulty(stale_list=1.0, stale_n=2)
    listed = [info.key for info in store.list()]
    newest = sorted(driver.list(), key=lambda info: info.last_modified, reverse=True)[:2]
    assert sorted(listed + [info.key for info in newest]) == [f"d{i}/k" for i in range(5)]
    assert store.list_dirs() == [key.partition("/")[0] for key in listed]
    assert store.list("none/") == []
    assert store.get(newest[0].key) == b""
    assert store.injected == {"stale_list": 2}


def test_stale_list_lags_by_so_many_seconds(driver: MeteredStore) -> None:
    driver.put("d/k", b"")
    now = [driver.head("d/k").last_modified + 4.0]
    faults = Faults(stale_list=1.0, stale_s=5.0)
    store = FaultyStore(driver, faults, clock=lambda: now[0])
    assert (store.list(), store.list_dirs()) == ([], [])
    now[0] += 2.0
    assert ([info.key for info in store.list()], store.list_dirs()) == (["d/k"], ["d"])


def test_clock_skew_is_one_constant_of_each_process(driver: MeteredStore) -> None:
    for key in ("a", "b"):
        driver.put(key, b"")
    true = {info.key: info.last_modified for info in driver.list()}
    skews = []
    for rank in range(8):
        store = FaultyStore(driver, Faults(clock_skew_s=30.0), rank=rank)
        seen = [store.head("a"), store.head("b"), *store.list()]
        shifts = [info.last_modified - true[info.key] for info in seen]
        assert max(shifts) - min(shifts) < 1e-5
        skews.append(shifts[0])
    assert len({round(skew, 3) for skew in skews}) == 8
    assert all(abs(skew) <= 30.0 for skew in skews)
    assert min(skews) < -3.0
    assert max(skews) > 3.0


def test_windows_begin_and_end(faulty: Callable[..., FaultyStore], fake_time: FakeTime) -> None:
    store = faulty(partitions=((10, 20), (50, 51)), expiries=((30, 40),))
    seen = []
    for second in range(60):
        fake_time.now = 1000.0 + second
        try:
            store.list()
        except (UnreachableError, ExpiredCredentialsError) as error:
            seen.append((second, type(error)))
    assert seen == [
        *((second, UnreachableError) for second in range(10, 20)),
        *((second, ExpiredCredentialsError) for second in range(30, 40)),
        (50, UnreachableError),
    ]
    assert store.injected == {"partition": 11, "expired": 10}


@pytest.mark.parametrize("kind", ["partitions", "expiries"])
def test_retries_outlast_a_short_window_and_not_a_long_one(
    faulty: Callable[..., FaultyStore], fake_time: FakeTime, kind: str
) -> None:
    store = RetryingStore(faulty(**{kind: ((0, 20), (1000, 9000))}), fake_time.policy())
    store.create("k", b"1")
    assert 20 <= fake_time.now - 1000 < 40
    fake_time.now = 2000.0
    with pytest.raises(DeniedError if kind == "expiries" else UnreachableError, match="gave up"):
        store.get("k")
    assert fake_time.now - 2000 <= 120


def test_partition_cuts_off_the_whole_family_until_it_heals(
    faulty: Callable[..., FaultyStore], driver: MeteredStore
) -> None:
    store = faulty()
    child = store.child("runs/one")
    store.put("k", b"")
    child.partition()
    for cut in (store, child, store.child("later")):
        with pytest.raises(UnreachableError, match="partition"):
            cut.list()
    assert driver.usage.requests["list"] == 0
    store.heal()
    assert [info.key for info in child.list()] == []
    assert store.injected == child.injected == {"partition": 3}


def test_partition_file_cuts_off_one_rank(
    driver: MeteredStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(partition_file=str(tmp_path / "cut-{rank}"))
    monkeypatch.setenv("REPLICA_RANK", "1")
    first = FaultyStore(driver, faults)
    monkeypatch.setenv("DILOCO_RANK_ENV", "MY_RANK")
    monkeypatch.setenv("MY_RANK", "2")
    second = FaultyStore(driver, faults)
    monkeypatch.delenv("MY_RANK")
    launcher = FaultyStore(driver, faults)
    (tmp_path / "cut-1").touch()
    (tmp_path / "cut-launcher").touch()
    second.list()
    for cut in (first, launcher):
        with pytest.raises(UnreachableError):
            cut.list()
    (tmp_path / "cut-1").unlink()
    first.list()


def test_injected_counts_every_fault_of_every_thread(
    faulty: Callable[..., FaultyStore],
) -> None:
    store = faulty(throttled=1.0)

    def ask(_: int) -> None:
        for _ in range(200):
            with pytest.raises(ThrottledError):
                store.child("c").get("k")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert store.injected["throttled"] == 1600


def test_no_faults_change_nothing(faulty: Callable[..., FaultyStore]) -> None:
    store = faulty()
    _use(store)
    with pytest.raises(NotFoundError):
        store.get("absent")
    assert store.injected == {}
