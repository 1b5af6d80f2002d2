"""The exported result: model and manifest are of one round, whoever else writes them meanwhile."""

from __future__ import annotations

import json
import random
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from safetensors.torch import load

from diloco_cloud import keys
from diloco_cloud.errors import ExchangeError
from diloco_cloud.outer.result import Exported, export, exported, global_digest
from diloco_cloud.outer.state import FragmentState
from diloco_cloud.run.status import is_whole
from diloco_cloud.store.memory import MemoryStore

METHODS = ("create", "put", "get", "get_range", "list", "delete_many")


class Killed(BaseException):
    """What a killed process would not live to see."""


def _states(round_: int) -> list[FragmentState]:
    """What the parameters are after so many rounds."""
    return [FragmentState("f", ("w",), (torch.full((3,), float(round_)),), {})]


def _export(store: Any, round_: int, *, final: bool = True) -> None:
    states = _states(round_)
    export(store, states, round_=round_, step=round_, final=final, sleep=lambda _s: None)


def _check(store: MemoryStore, round_: int, *, final: bool = True) -> None:
    """The result is that of a round, and nothing of another one's is in it."""
    assert exported(store) == Exported(round_, final)
    manifest = json.loads(store.get(keys.RESULT_MANIFEST))
    assert manifest["digest"] == global_digest(_states(round_))
    assert manifest["files"] == ["model.safetensors"]
    assert load(store.get(keys.MODEL))["w"].tolist() == [round_] * 3


class Meanwhile:
    """A store in which something happens once, just before or after a certain call takes effect."""

    def __init__(
        self, inner: MemoryStore, method: str, key: str, happens: Callable[[], None], *, after: bool
    ) -> None:
        self._inner, self._call, self._after = inner, (method, key), after
        self._happens: Callable[[], None] | None = happens

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any) -> Any:
            happens = None
            if (name, str(args[0])) == self._call:
                happens, self._happens = self._happens, None
            if happens is not None and not self._after:
                happens()
            try:
                return method(*args)
            finally:
                if happens is not None and self._after:
                    happens()

        return call


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("key", [keys.MODEL, keys.RESULT_MANIFEST])
@pytest.mark.parametrize("old", [None, 3], ids=["first", "replacing"])
def test_a_slow_writer_never_replaces_a_later_rounds_result(
    store: MemoryStore, key: str, after: bool, old: int | None
) -> None:
    if old is not None:
        _export(store, old)
    _export(Meanwhile(store, "create", key, lambda: _export(store, 7), after=after), 5)
    _check(store, 7)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("key", [keys.MODEL, keys.RESULT_MANIFEST])
def test_an_earlier_rounds_result_that_comes_between_is_replaced(
    store: MemoryStore, key: str, after: bool
) -> None:
    _export(Meanwhile(store, "create", key, lambda: _export(store, 5), after=after), 7)
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


@pytest.mark.parametrize("model", [b"", b"junk", b"\xff" * 64, b"\x02" + bytes(7) + b"{}"])
def test_a_model_that_does_not_tell_its_round_is_replaced(store: MemoryStore, model: bytes) -> None:
    store.put(keys.MODEL, model)
    store.put(keys.RESULT_MANIFEST, b'{"round": 3}')  # of a version that did not say more
    assert exported(store) == Exported(3, final=True)
    _export(store, 5)
    _check(store, 5)


class Turns:
    """Makes the store calls of several writers one at a time, in a random order."""

    def __init__(self, store: MemoryStore, rng: random.Random) -> None:
        self._store, self._rng = store, rng

    def run(self, *writers: Callable[[Any], None]) -> None:
        actors = [_Actor(self._store) for _ in writers]

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


class _Mortal:
    """Raises at the ``k``-th call, which it does not make."""

    def __init__(self, inner: Any, k: int) -> None:
        self._inner, self._left = inner, k

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise Killed
            return method(*args)

        return call if name in METHODS else method


@pytest.mark.parametrize("seed", range(200))
def test_writers_of_two_rounds_end_with_the_later_one_in_any_order(
    store: MemoryStore, seed: int
) -> None:
    rng = random.Random(seed)
    final, *deaths = rng.random() < 0.5, rng.randrange(1, 16), rng.randrange(1, 16)
    if rng.random() < 0.5:
        _export(store, 3, final=rng.random() < 0.5)

    def earlier(mine: Any) -> None:
        _export(mine, 5, final=final)

    def later(mine: Any) -> None:
        try:
            _export(_Mortal(mine, deaths.pop()), 7)
        except Killed:  # its next life
            _export(mine, 7)

    Turns(store, rng).run(earlier, later, later)
    _check(store, 7)


def test_a_writer_that_never_gets_its_way_says_so(store: MemoryStore) -> None:
    class Taken(_Mortal):
        def create(self, key: str, data: bytes) -> None:
            store.put(key, b"{}")
            store.create(key, data)

    with pytest.raises(ExchangeError, match="the result of round 5 was replaced 20 times"):
        _export(Taken(store, -1), 5)


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
