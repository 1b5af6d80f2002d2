"""No two processes are the same life of a rank."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

from diloco_cloud import keys
from diloco_cloud.replica.claim import claim_life
from diloco_cloud.replica.identity import Identity
from diloco_cloud.run.lives import read_lives
from diloco_cloud.store.memory import MemoryStore


def test_a_process_that_is_started_again_is_the_next_life() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    first = Identity(rank=1, attempt=0)
    assert claim_life(store, first) == first
    assert claim_life(store, first) == Identity(rank=1, attempt=1)
    assert claim_life(store, Identity(rank=1, attempt=1)) == Identity(rank=1, attempt=2)
    assert claim_life(store, Identity(rank=0, attempt=0)) == Identity(rank=0, attempt=0)


def test_processes_that_start_at_once_are_different_lives() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    with ThreadPoolExecutor(8) as pool:
        lives = list(pool.map(lambda _: claim_life(store, Identity(2, 3)), range(8)))
    assert sorted(life.attempt for life in lives) == list(range(3, 11))


def test_a_life_that_the_provider_started_is_found_by_the_handle_before_it() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    for key in (keys.intent(0, 0), keys.handle(0, 0), keys.claim(0, 0), keys.claim(0, 1)):
        store.put(key, b"{}")
    lives = read_lives(store)
    assert lives.newest(0) == 1
    assert lives.launched_as(0, 1) == 0
    store.put(keys.intent(0, 2), b"{}")  # a supervisor is about to start the next one
    assert read_lives(store).launched_as(0, 2) is None
