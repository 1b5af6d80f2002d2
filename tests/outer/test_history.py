"""What a joiner makes of a run's history when parts of it go, lie or are still to come."""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from blake3 import blake3
from replicas import Job, build, inner_optimizer, inner_step
from safetensors.torch import load, save

from diloco_cloud.errors import CorruptError, DilocoError, DriftError, ExchangeError
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.outer import MockManager, OuterLoop, make_diloco_outer_loop
from diloco_cloud.outer.snapshot import Manifest, snapshots
from diloco_cloud.outer.state import FragmentState
from diloco_cloud.result import read_result
from diloco_cloud.store import open_store
from diloco_cloud.store.base import ObjectStore
from diloco_cloud.store.memory import MemoryStore

JOB = Job(sync_every=2)


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


def manager(name: str, rank: int, attempt: int = 0, **settings: Any) -> MockManager:
    door = ObjectStoreAllReduce(
        f"memory://{name}",
        rank,
        JOB.world_size,
        attempt=attempt,
        timeout_s=20.0,
        poll_interval_s=0.02,
        store=settings.pop("store", None),
    )
    return MockManager(door, **({"snapshot_every": 3} | settings))


def loop(mine: MockManager, seed: int = 0, job: Job = JOB) -> tuple[OuterLoop, Any, Any]:
    model, fragments = build(job, seed)
    optimizer = inner_optimizer(model)
    outer = make_diloco_outer_loop(
        mine, fragments, optimizer, sync_every=job.sync_every, model=model
    )
    return outer, model, optimizer


def train(mine: MockManager, until: int, job: Job = JOB) -> str:
    outer, model, optimizer = loop(mine, job=job)
    with outer:
        for t in range(outer.inner_steps_done, until):
            inner_step(job, model, optimizer, mine.rank, t)
    mine.shutdown()
    return str(mine.global_digest())


def run_both(name: str, until: int, attempt: int = 0, job: Job = JOB) -> str:
    managers = [manager(name, rank, attempt) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        digests = list(pool.map(lambda m: train(m, until, job), managers))
    assert digests[0] == digests[1]
    for one in managers:
        one._snapshots.flush()
    return digests[0]


def join_as_1(name: str, **settings: Any) -> MockManager:
    mine = manager(name, 1, attempt=9, **settings)
    loop(mine, seed=5)
    return mine


@pytest.mark.parametrize("moment", ["commit", "put/", "manifest"])
def test_joiner_overtaken_by_garbage_collection_starts_over(name: str, moment: str) -> None:
    """While it reads, its peers train on and delete what it was about to read."""
    run_both(name, 14)

    class Overtaken(MemoryStore):
        done = False

        def _read(self, key: str) -> Any:
            if not Overtaken.done and moment in key:
                Overtaken.done = True
                run_both(name, 44, attempt=1)
            return super()._read(key)

    joined = join_as_1(name, store=Overtaken(name))
    assert Overtaken.done
    assert joined.current_round() == 22
    assert joined.global_digest() == run_both(name, 44, attempt=2)


def test_wrong_snapshot_is_passed_over_for_the_one_before(name: str) -> None:
    digest = run_both(name, 20)
    store = open_store(f"memory://{name}")
    newest = snapshots(store)[0]
    assert newest.round == 9
    # As a drifted writer would have left it: sound in itself, contradicted by what came after.
    _replace_snapshot(store, newest)
    assert join_as_1(name).global_digest() == digest


def _replace_snapshot(store: ObjectStore, manifest: Manifest) -> None:
    """Add 1 to every parameter of a snapshot, and make its digests agree."""
    (stored,) = manifest.fragments
    tensors = load(store.get(manifest.directory + stored.object))
    tensors = {n: t + 1 if n.startswith("parameter.") else t for n, t in tensors.items()}
    data = save(tensors)
    state = FragmentState.decode(
        data, "", [n.removeprefix("parameter.") for n in tensors if n.startswith("parameter.")]
    )
    forged = replace(stored, digest=blake3(data).hexdigest(), parameters=state.digest)
    store.put(manifest.directory + stored.object, data)
    changed = replace(manifest, fragments=(forged,))
    store.put(manifest.directory + "manifest.json", changed.encode())


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("steps", [10, 11, 12, 13])
def test_snapshots_among_the_final_syncs_hold_their_own_round(
    name: str, every: int, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(sync_every=6, fragments=3)
    managers = [manager(name, rank, snapshot_every=every) for rank in range(2)]

    def work(mine: MockManager) -> str:
        outer, model, optimizer = loop(mine, job=job)
        with outer:
            for t in range(steps):
                inner_step(job, model, optimizer, mine.rank, t)
        mine.shutdown(finished=True)
        return str(mine.global_digest())

    with ThreadPoolExecutor(2) as pool:
        digest, _ = pool.map(work, managers)
    mine = manager(name, 1, attempt=9)
    loop(mine, job=job)
    assert mine.global_digest() == digest
    assert "is of no use" not in caplog.text


def test_history_that_contradicts_every_snapshot_is_an_error(name: str) -> None:
    run_both(name, 4)
    store = open_store(f"memory://{name}")
    (only,) = snapshots(store)
    _replace_snapshot(store, only)
    with pytest.raises(DriftError, match="against other parameters"):
        join_as_1(name)


@pytest.mark.parametrize(
    "manifest",
    [b"[]", b"3", b"{}", b"[" * 100_000, b'{"round": 0}'],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_unreadable_manifest_is_one_error_and_no_endless_loop(
    name: str, manifest: bytes, rank: int
) -> None:
    open_store(f"memory://{name}").put("state/00000000/manifest.json", manifest)
    with pytest.raises(CorruptError, match=r"manifest\.json cannot be read"):
        loop(manager(name, rank))


def test_manifest_cannot_point_out_of_its_directory(name: str) -> None:
    run_both(name, 2)
    store = open_store(f"memory://{name}")
    manifest = json.loads(store.get("state/00000000/manifest.json"))
    manifest["fragments"][0]["object"] = "../x"
    store.put("state/00000000/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(CorruptError, match="not a name"):
        join_as_1(name)


def test_sound_snapshots_outlive_junk_beside_them(name: str) -> None:
    store = open_store(f"memory://{name}")
    run_both(name, 20)
    store.put("state/00000008/manifest.json", b"junk")
    store.put("state/junk/manifest.json", b"junk")
    store.put("state/00000003/0.0001.0000.safetensors", b"of a writer that died")
    digest = run_both(name, 40, attempt=1)
    assert join_as_1(name).global_digest() == digest
    assert store.list("state/00000003/") == store.list("state/00000008/") == []


@pytest.mark.parametrize("stray", ["rounds/00000001.7/x", "rounds/note", "state/x/y", "rounds/²"])
def test_other_objects_in_the_prefix_do_not_disturb_a_joiner(name: str, stray: str) -> None:
    digest = run_both(name, 8)
    open_store(f"memory://{name}").put(stray, b"junk")
    assert join_as_1(name).global_digest() == digest


def test_replica_that_left_may_come_back_but_trains_no_further(name: str) -> None:
    """One that died right after leaving is restarted, finds nothing to do, and ends well."""
    managers = [manager(name, rank) for rank in range(2)]

    def work(mine: MockManager) -> str:
        outer, model, optimizer = loop(mine)
        with outer:
            for t in range({0: 4, 1: 10}[mine.rank]):
                inner_step(JOB, model, optimizer, mine.rank, t)
        mine.shutdown(finished=True)
        return str(mine.global_digest())

    with ThreadPoolExecutor(2) as pool:
        digests = list(pool.map(work, managers))
    back = manager(name, 0, attempt=1)
    outer, model, optimizer = loop(back)
    assert outer.inner_steps_done >= 4
    back.shutdown(finished=True)
    assert back.global_digest() == digests[1]
    longer = manager(name, 0, attempt=2)
    outer, model, optimizer = loop(longer)
    outer.__enter__()
    inner_step(JOB, model, optimizer, 0, 0)
    with pytest.raises(ExchangeError, match="replica 0 had left the run before round 5"):
        inner_step(JOB, model, optimizer, 0, 1)


@pytest.mark.parametrize("job", [JOB, Job(sync_every=6, fragments=3)], ids=str)
@pytest.mark.parametrize("steps", [12, 11])
def test_inner_steps_are_neither_skipped_nor_repeated(name: str, job: Job, steps: int) -> None:
    """Also after the final syncs of several fragments, which are rounds without inner steps."""
    run_both(name, steps, job=job)
    mine = manager(name, 0, attempt=1)
    outer, _, _ = loop(mine, job=job)
    assert outer.inner_steps_done == steps
    assert mine.progress.inner_step == steps


def test_failing_observer_costs_no_outer_step(name: str) -> None:
    def observer(_report: object) -> None:
        raise OSError("the dashboard is away")

    managers = [manager(name, 0, on_round=observer), manager(name, 1)]
    with ThreadPoolExecutor(2) as pool:
        digests = list(pool.map(lambda m: train(m, 8), managers))
    assert digests[0] == digests[1]
    assert join_as_1(name).global_digest() == digests[0]


def test_after_an_error_in_a_sync_the_next_loop_joins_anew(name: str) -> None:
    """The process cannot know whether the round was decided; the store can."""
    first, second = manager(name, 0), manager(name, 1)
    outer, model, optimizer = loop(first)

    def interrupted(_missing: list[int]) -> None:
        first._exchange.interrupt()

    first._exchange.waiting_for = interrupted
    outer.__enter__()
    inner_step(JOB, model, optimizer, 0, 0)
    with pytest.raises(ExchangeError, match="given up") as caught:
        inner_step(JOB, model, optimizer, 0, 1)
    outer.__exit__(ExchangeError, caught.value, None)
    first._exchange.waiting_for = lambda _missing: None
    with ThreadPoolExecutor(2) as pool:
        digests = list(pool.map(lambda m: train(m, 8), [first, second]))
    assert digests[0] == digests[1]
    assert first.current_step() == 4


def test_a_failed_join_leaves_the_manager_usable(name: str) -> None:
    class Away(MemoryStore):
        away = True

        def list_dirs(self, prefix: str = "") -> list[str]:
            if self.away:
                raise DilocoError("the store is away")
            return super().list_dirs(prefix)

    store = Away(name)
    mine = manager(name, 0, store=store)
    with pytest.raises(DilocoError, match="away"):
        loop(mine)
    store.away = False
    loop(mine)


def test_every_replica_gets_its_turn_at_writing_snapshots(name: str) -> None:
    run_both(name, 50)
    kept = snapshots(open_store(f"memory://{name}"))
    assert [m.round for m in kept] == [24, 21]
    assert {m.fragments[0].object.split(".")[1] for m in kept} == {"0000", "0001"}


def test_a_life_that_slept_through_deleted_rounds_cannot_fork_the_run(name: str) -> None:
    """It wakes where everything is gone, alone; the state it would decide on is not the run's."""

    class Sleepy(MemoryStore):
        calls = 0
        asleep, woken = threading.Event(), threading.Event()

        def create(self, key: str, data: Any) -> None:
            if "/put/" in key:
                Sleepy.calls += 1
                if Sleepy.calls == 3:
                    self.asleep.set()
                    assert self.woken.wait(60)
            super().create(key, data)

    job = Job(sync_every=2, world_size=1)

    def live(attempt: int, store: ObjectStore) -> str:
        door = ObjectStoreAllReduce(f"memory://{name}", 0, 1, attempt=attempt, store=store)
        mine = MockManager(door, snapshot_every=1)
        outer, model, optimizer = loop(mine, job=job)
        with outer:
            for t in range(outer.inner_steps_done, 14):
                inner_step(job, model, optimizer, 0, t + 100 * attempt)
        mine.shutdown(finished=True)
        return str(mine.global_digest())

    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(live, 0, Sleepy(name))
        assert Sleepy.asleep.wait(60)
        digest = live(1, MemoryStore(name))
        Sleepy.woken.set()
        with pytest.raises((DriftError, ExchangeError)):
            old.result(timeout=60)
    result = read_result(open_store(f"memory://{name}"))
    assert result is not None
    assert result.manifest["digest"] == digest


def test_final_syncs_weigh_by_the_work_since_the_fragments_own_last_sync(name: str) -> None:
    job = Job(sync_every=6, fragments=3)
    weights: dict[int, list[float]] = {}
    managers = [manager(name, rank, snapshot_every=100) for rank in range(2)]

    def work(mine: MockManager) -> None:
        outer, model, optimizer = loop(mine, job=job)
        with outer:
            for t in range(8):
                mine.report(tokens={0: 100, 1: 1}[mine.rank])
                inner_step(job, model, optimizer, mine.rank, t)
        mine.shutdown()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, managers))
    store = open_store(f"memory://{name}")
    for info in store.list("rounds/"):
        if info.key.endswith("/commit"):
            commit = Commit.decode(store.get(info.key))
            weights[commit.round] = [one.tokens for one in commit.contributors]
    # Fragments 0, 1 and 2 after steps 2, 4, 6 and 8, then the tails of fragments 1 and 2.
    assert weights == {
        0: [200, 2],
        1: [400, 4],
        2: [600, 6],
        3: [600, 6],
        4: [400, 4],
        5: [200, 2],
    }


def test_an_error_that_a_trainer_swallows_does_not_look_like_success(name: str) -> None:
    mine = manager(name, 0)
    outer, model, optimizer = loop(mine)
    mine._exchange.waiting_for = lambda _missing: mine._exchange.interrupt()
    with contextlib.suppress(ExchangeError), outer:
        for t in range(2):
            inner_step(JOB, model, optimizer, 0, t)
    with pytest.raises(ExchangeError, match="the last sync failed"):
        mine.shutdown(finished=True)
    assert open_store(f"memory://{name}").list("result/") == []


def test_local_sgd_averages_parameters_and_keeps_few_rounds(name: str) -> None:
    from torchft.local_sgd import LocalSGD

    managers = [manager(name, rank) for rank in range(2)]
    models = [build(JOB, seed=rank)[0] for rank in range(2)]

    def work(mine: MockManager) -> list[torch.Tensor]:
        model = models[mine.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with LocalSGD(mine, model, optimizer, sync_every=2):
            for t in range(20):
                inner_step(JOB, model, optimizer, mine.rank, t)
        mine.shutdown(finished=True)
        return [p.detach() for p in model.parameters()]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, managers)
    assert all(map(torch.equal, first, second))
    assert [m.current_step() for m in managers] == [10, 10]
    assert len(open_store(f"memory://{name}").list_dirs("rounds/")) <= 3


def test_torchfts_own_diloco_with_unequal_steps(name: str) -> None:
    """Used directly it has no common start and no final sync, but nobody waits for who has left."""
    from torchft.local_sgd import DiLoCo

    managers = [manager(name, rank) for rank in range(2)]
    built = [build(Job(fragments=3)) for _ in range(2)]

    def work(mine: MockManager) -> int:
        model, parts = built[mine.rank]
        optimizer = inner_optimizer(model)
        outer = [torch.optim.SGD(part.parameters(), lr=0.7) for part in parts]
        with DiLoCo(mine, parts, optimizer, outer, sync_every=6):
            for t in range({0: 8, 1: 16}[mine.rank]):
                inner_step(JOB, model, optimizer, mine.rank, t)
        mine.shutdown(finished=True)
        return mine.current_step()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, managers)) == [4, 8]
