"""The exported result: a whole one counts at any time, whoever writes, stands still or dies."""

from __future__ import annotations

import json
import random
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from safetensors.torch import load

from diloco_cloud import keys
from diloco_cloud.outer.result import Exported, add_files, export, exported, global_digest
from diloco_cloud.outer.state import FragmentState
from diloco_cloud.result import read_result
from diloco_cloud.run.status import is_whole
from diloco_cloud.store.memory import MemoryStore

METHODS = ("create", "put", "get", "list", "delete_many")
#: More requests than an export makes.
MOST = 16


class Killed(BaseException):
    """What a killed process would not live to see."""


def _states(round_: int) -> list[FragmentState]:
    """What the parameters are after so many rounds."""
    return [FragmentState("f", ("w",), (torch.full((3,), float(round_)),), {})]


def _export(store: Any, round_: int, *, final: bool = True) -> None:
    export(store, _states(round_), round_=round_, step=round_, final=final)


def _standing(store: MemoryStore) -> Exported | None:
    """What counts, which must be whole, with nothing of another round in it."""
    result = read_result(store)
    if result is None:
        return None
    assert result.manifest["round"] == result.round
    assert result.manifest["digest"] == global_digest(_states(result.round))
    assert result.manifest["files"] == ["config.json", "model.safetensors"]
    assert store.get(result.directory + "config.json") == b"{}"
    assert result.model is not None
    assert load(store.get(result.model))["w"].tolist() == [result.round] * 3
    assert exported(store) == Exported(result.round, result.is_final)
    return exported(store)


def _check(store: MemoryStore, round_: int, *, final: bool = True, alone: bool = True) -> None:
    """The result is that of a round, and if it is to be alone, nothing of earlier ones is left."""
    assert _standing(store) == Exported(round_, final)
    if alone:
        rounds = {keys.result_round(info.key) for info in store.list(keys.RESULT)}
        assert rounds - {None} == {round_}


class Fateful:
    """A store in which something happens before the ``k``-th call, and perhaps death."""

    def __init__(
        self, inner: Any, k: int, happens: Callable[[], None] = lambda: None, *, dies: bool
    ) -> None:
        self._inner, self._left, self._happens, self._dies = inner, k, happens, dies

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self._happens()
                if self._dies:
                    raise Killed
            return method(*args)

        return call if name in METHODS else method


OLD = [None, Exported(3, final=True), Exported(5, final=False)]


def _new_store(old: Exported | None = None) -> MemoryStore:
    """A run's prefix, with a trainer's file, and an earlier result or not."""
    store = MemoryStore(uuid.uuid4().hex)
    add_files(store, {"config.json": b"{}"})
    if old is not None:
        _export(store, old.round, final=old.final)
    return store


@pytest.fixture
def store() -> MemoryStore:
    return _new_store()


def _requests(old: Exported | None, round_: int) -> int:
    """How many an export makes."""
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    store: Any = _new_store(old)
    for k in range(1, 100):
        store = Fateful(store, k, call, dies=False)
    _export(store, round_)
    return calls


@pytest.mark.parametrize("old", OLD, ids=str)
def test_killed_at_any_request_a_whole_result_counts(old: Exported | None) -> None:
    assert _requests(old, 7) < MOST
    for k in range(1, MOST):
        store = _new_store(old)
        with suppress(Killed):
            _export(Fateful(store, k, dies=True), 7)
        assert _standing(store) in (old, Exported(7, final=True)), k
        _export(store, 7)  # its next life
        _check(store, 7)


@pytest.mark.parametrize("dies", [False, True], ids=["ends", "dies"])
@pytest.mark.parametrize("old", OLD, ids=str)
@pytest.mark.parametrize("final", [False, True], ids=["so far", "final"])
@pytest.mark.parametrize(("slow", "quick"), [(5, 7), (7, 5), (7, 7)])
def test_who_stands_still_at_any_request_takes_nothing_from_another(
    slow: int, quick: int, final: bool, old: Exported | None, dies: bool
) -> None:
    for k in range(1, MOST):
        store = _new_store(old)
        during: list[Exported | None] = []

        def other(store: MemoryStore = store, during: list[Exported | None] = during) -> None:
            _export(store, quick)
            during.append(_standing(store))

        with suppress(Killed):
            _export(Fateful(store, k, other, dies=dies), slow, final=final)
        mine, others = Exported(slow, final), [one for one in (old, *during) if one is not None]
        found = _standing(store)
        assert found is not None
        if during and dies:  # Perhaps when its own was there.
            assert found in (max(others), max([mine, *others])), k
        else:
            assert found == max([mine, *others]), k
            _check(store, found.round, final=found.final)


def test_a_model_without_a_manifest_holds_nobody_up(store: MemoryStore) -> None:
    """Its writer may be dead."""
    with suppress(Killed):
        _export(Fateful(store, 6, dies=True), 7)
    assert any(info.key.endswith(keys.MODEL) for info in store.list(keys.RESULT))
    assert _standing(store) is None
    _export(store, 5)
    _check(store, 5, alone=False)
    _export(store, 7)
    _check(store, 7)


def test_a_result_so_far_is_replaced_by_the_final_one_and_not_the_other_way_round(
    store: MemoryStore,
) -> None:
    _export(store, 5, final=False)
    _check(store, 5, final=False)
    _export(store, 5)
    _check(store, 5)
    _export(store, 5, final=False)
    _check(store, 5)
    _export(store, 6, final=False)
    _check(store, 6, final=False)


def test_of_two_results_of_one_round_the_final_one_counts(store: MemoryStore) -> None:
    for digest, final in (("aaa", True), ("bbb", False)):
        manifest = json.dumps({"final": final, "files": []}).encode()
        store.put(keys.result(5, digest) + keys.RESULT_MANIFEST, manifest)
    result = read_result(store)
    assert result is not None
    assert (result.directory, result.model) == ("result/00000005-aaa/", None)


@pytest.mark.parametrize("data", [b"", b"junk", b"\xff", b"[]"])
def test_a_manifest_that_is_none_does_not_count(store: MemoryStore, data: bytes) -> None:
    _export(store, 5)
    store.put(keys.result(7, "abc") + keys.RESULT_MANIFEST, data)
    _check(store, 5, alone=False)
    store.put(keys.RESULT_FILES + keys.RESULT_MANIFEST, b'{"round": 9}')
    _check(store, 5, alone=False)
    store.delete_many(info.key for info in store.list(keys.result(5, "")[:-1]))
    assert read_result(store) is None


def test_a_result_that_is_replaced_while_it_is_read_is_followed(store: MemoryStore) -> None:
    _export(store, 5)
    result = read_result(Fateful(store, 2, lambda: _export(store, 7), dies=False))  # type: ignore[arg-type]
    assert result is not None
    assert result.round == 7


def test_rounds_are_compared_as_numbers(store: MemoryStore) -> None:
    _export(store, 99_999_999)
    _export(store, 100_000_000)
    _check(store, 100_000_000)


class Turns:
    """Makes the store calls of several writers one at a time, in a random order."""

    def __init__(self, store: MemoryStore, rng: random.Random) -> None:
        self._store, self._rng = store, rng

    def run(self, *writers: Callable[[Any], None]) -> None:
        actors = [_Actor(self._store) for _ in writers]
        best = _standing(self._store)

        def live(actor: _Actor, writer: Callable[[Any], None]) -> None:
            try:
                writer(actor)
            finally:
                actor.done = True
                actor.waits.release()

        with ThreadPoolExecutor(len(actors)) as pool:
            futures = [pool.submit(live, *both) for both in zip(actors, writers, strict=True)]
            for actor in actors:
                assert actor.waits.acquire(timeout=30)
            while going := [actor for actor in actors if not actor.done]:
                chosen = self._rng.choice(going)
                chosen.turn.release()
                assert chosen.waits.acquire(timeout=30)
                now = _standing(self._store)
                assert best is None or (now is not None and now >= best)
                best = now
            for future in futures:
                future.result()


class _Actor:
    """One writer's store: each call waits for its turn."""

    def __init__(self, inner: MemoryStore) -> None:
        self.waits, self.turn = threading.Semaphore(0), threading.Semaphore(0)
        self.done = False
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any) -> Any:
            self.waits.release()
            assert self.turn.acquire(timeout=30)
            return method(*args)

        return call if name in METHODS else method


@pytest.mark.parametrize("seed", range(200))
def test_of_writers_of_two_rounds_the_later_one_counts_in_any_order(
    store: MemoryStore, seed: int
) -> None:
    rng = random.Random(seed)
    final, *deaths = rng.random() < 0.5, rng.randrange(1, MOST), rng.randrange(1, MOST)
    if rng.random() < 0.5:
        _export(store, 3, final=rng.random() < 0.5)

    def earlier(mine: Any) -> None:
        _export(mine, 5, final=final)

    def later(mine: Any) -> None:
        with suppress(Killed):
            _export(Fateful(mine, deaths.pop(), dies=True), 7)
            return
        _export(mine, 7)  # its next life

    Turns(store, rng).run(earlier, later, later)
    _check(store, 7)


@pytest.mark.parametrize(
    ("manifest", "rounds", "expected"),
    [
        ({"round": 4}, None, True),
        ({"round": 4, "final": True}, None, True),
        ({"round": 4, "final": False}, None, False),  # others went on
        ({"round": 4, "final": False}, 4, True),
        ({"round": 4, "final": True}, 5, False),
        ({}, 4, False),
    ],
)
def test_a_result_is_whole_once_no_round_is_to_come(
    manifest: dict[str, object], rounds: int | None, expected: bool
) -> None:
    assert is_whole(manifest, rounds) is expected
