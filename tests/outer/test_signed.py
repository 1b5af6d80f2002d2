"""A signed run, from its first snapshot to its last: only what has its key counts."""

from __future__ import annotations

import json
import random
import uuid
from dataclasses import replace
from typing import Any

import pytest
from fleet import Death, Fleet
from replicas import Job, build, inner_optimizer

from diloco_cloud import keys
from diloco_cloud.errors import CorruptError, DilocoError, ForeignObjectError
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.contribution import Header
from diloco_cloud.exchange.history import History
from diloco_cloud.exchange.signing import Signer
from diloco_cloud.outer import MockManager, make_diloco_outer_loop, snapshot, tensor_file
from diloco_cloud.store.memory import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

JOB = Job(sync_every=3, steps=18)
KEY, WRONG = b"k" * 32, b"w" * 32


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


def fleet(name: str, key: bytes | None = KEY, **settings: Any) -> Fleet:
    manager = {"checkpoint_inner": True}
    return Fleet(JOB, quorum=2, manager=manager, key=key, name=name, restart_s=0.01, **settings)


def join(name: str, key: bytes | None, rank: int = 1, attempt: int = 9) -> MockManager:
    door = ObjectStoreAllReduce(
        f"memory://{name}", rank, 2, attempt=attempt, timeout_s=2.0, key=key
    )
    manager = MockManager(door)
    model, fragments = build(JOB)
    make_diloco_outer_loop(
        manager, fragments, inner_optimizer(model), sync_every=JOB.sync_every, model=model
    )
    return manager


def test_a_signed_run_trains_as_any_other_and_survives_kills(name: str) -> None:
    signed, plain = fleet(name), fleet(uuid.uuid4().hex, key=None)
    (digest,) = {end.digest for end in signed.run().values()}
    assert {end.digest for end in plain.run().values()} == {digest}
    rng = random.Random(0)
    for _ in range(4):
        killed = fleet(uuid.uuid4().hex)
        deaths = {(r, 0): Death(rng.randint(1, signed.requests[r, 0])) for r in range(2)}
        assert {end.digest for end in killed.run(deaths).values()} == {digest}, deaths


def test_everything_that_decides_is_signed(name: str) -> None:
    run = fleet(name)
    run.run()
    signer, strange = Signer(KEY, name), Signer(WRONG, name)
    assert run.commits
    for key, data in run.commits.items():
        Commit.decode(data).check(signer, key)
        with pytest.raises(ForeignObjectError):
            Commit.decode(data).check(strange, key)
    assert snapshot.snapshots(MemoryStore(name), signer)
    with pytest.raises(CorruptError, match="not signed with this run's key"):
        snapshot.snapshots(MemoryStore(name), strange)


@pytest.mark.parametrize("key", [WRONG, None], ids=["another key", "no key"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_without_the_runs_key_ends_before_it_contributes(
    name: str, key: bytes | None, rank: int
) -> None:
    fleet(name).run()
    before = MemoryStore(name).list()
    with pytest.raises(CorruptError, match="signed") as caught:
        join(name, key, rank)
    assert caught.value.fix
    assert MemoryStore(name).list() == before


def test_a_forged_manifest_is_passed_over(name: str) -> None:
    """Of a state that would win by its number; its own bytes are all in order."""
    run = fleet(name)
    digest = run.run()[0].digest
    store = MemoryStore(name)
    forged = MemoryStore(uuid.uuid4().hex)
    (evil,) = _states(seed=9)
    snapshot.write(forged, [evil], step=50, history=History(round=50), writer="0001.0000")
    for info in forged.list():
        store.put(info.key, forged.get(info.key))
    assert join(name, KEY).global_digest() == digest


def _states(seed: int) -> list[Any]:
    manager = MockManager(ObjectStoreAllReduce(f"memory://{uuid.uuid4().hex}", 0, 2))
    model, fragments = build(JOB, seed)
    make_diloco_outer_loop(
        manager, fragments, inner_optimizer(model), sync_every=JOB.sync_every, model=model
    )
    return manager.fragments.states()


def test_a_run_that_begins_with_a_forged_snapshot_does_not_begin(name: str) -> None:
    states = _states(seed=9)
    snapshot.write(MemoryStore(name), states, step=0, history=History(), writer="0000.0000")
    for rank in range(2):
        with pytest.raises(CorruptError, match=r"manifest\.json: not signed with this run's key"):
            join(name, KEY, rank)


def test_a_genuine_snapshot_of_another_round_or_run_is_not_taken(name: str) -> None:
    """Neither one of this run under a later number, nor one of another run with the same key."""
    run = fleet(name)
    digest = run.run()[0].digest
    store = MemoryStore(name)
    oldest = snapshot.snapshots(store, Signer(KEY, name))[-1]
    store.put("state/00000099/manifest.json", oldest.encode())
    other = uuid.uuid4().hex
    fleet(other).run()
    newest = snapshot.snapshots(MemoryStore(other), Signer(KEY, other))[0]
    store.put("state/00000098/manifest.json", replace(newest, round=98).encode())
    assert join(name, KEY).global_digest() == digest


def test_a_forged_commit_stops_the_run_with_its_name_and_resumes_without_it(name: str) -> None:
    undisturbed = fleet(uuid.uuid4().hex)
    expected = undisturbed.run()[0].digest

    class Forger(MemoryStore):
        """Is faster than all replicas, once."""

        done = False

        def create(self, key: str, data: Any) -> None:
            if key == keys.commit(3, 0) and not Forger.done:
                Forger.done = True
                evil = replace(Commit.decode(bytes(data)), decision="discard", mac="0" * 64)
                super().create(key, evil.encode())
            super().create(key, data)

    stopped = fleet(name, store=Forger)
    with pytest.raises(ForeignObjectError, match=r"rounds/00000003\.0/commit: not signed") as error:
        stopped.run()
    assert "delete that object and resume" in str(error.value)
    with pytest.raises(DilocoError, match="not signed"):
        join(name, KEY)
    MemoryStore(name).delete(keys.commit(3, 0))
    resumed = fleet(name, first_attempt=10, commits=stopped.commits, processed=stopped.processed)
    assert {end.digest for end in resumed.run().values()} == {expected}


def test_a_forged_contribution_of_an_earlier_life_is_not_waited_for(name: str) -> None:
    """At worst it costs its rank a round, whose work goes into the next."""
    forged = Header(kind="contribution", run=name, round=0, fragment=0, rank=1, attempt=0)
    MemoryStore(name).put(keys.put(0, 0, 1, 0), forged.sign(Signer(WRONG, name)).encode())
    run = fleet(name, first_attempt=1)
    run.run()
    assert all(one.attempt == 1 for commit in run.history() for one in commit.contributors)
    tokens = [one.tokens for commit in run.history() for one in commit.contributors if one.rank]
    assert sum(tokens) == sum(n for (rank, _), n in run.processed.items() if rank == 1)


def test_a_forged_inner_checkpoint_is_ignored(name: str, caplog: pytest.LogCaptureFixture) -> None:
    class Forger(MemoryStore):
        """Replaces what goes by, with all digests in order."""

        def put(self, key: str, data: Any) -> None:
            super().put(key, data)
            if key.startswith(keys.INNER):
                tensors, text = tensor_file.decode(self.get(key), Signer(KEY, name), key)
                forged = tensor_file.encode(tensors, json.loads(text), Signer())
                super().put(key, forged)

    run = fleet(name, store=Forger)
    run.run({(1, 0): Death(method="create", key="00000002.0/put", after=True)})
    assert "inner/0001/00000002.0000.safetensors: not signed with this run's key" in caplog.text
