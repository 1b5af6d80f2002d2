"""Objects that somebody without the run's key has written, or moved, are never averaged."""

from __future__ import annotations

import json
import logging
import pickle
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco_cloud import keys
from diloco_cloud.errors import AlreadyExistsError, ForeignObjectError
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.commit import Commit, Contributor
from diloco_cloud.exchange.contribution import Header, checksums, decode, digest
from diloco_cloud.exchange.layout import TensorLayout, byte_view
from diloco_cloud.exchange.membership import Membership
from diloco_cloud.exchange.rounds import RoundExchange
from diloco_cloud.exchange.signing import Signer
from diloco_cloud.exchange.work import RoundResult, Work
from diloco_cloud.store.memory import MemoryStore

KEY, WRONG = b"k" * 32, b"w" * 32
LAYOUT = TensorLayout.of([torch.zeros(100)])


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


def exchange(
    name: str, rank: int, world_size: int = 3, *, key: bytes | None = KEY, **settings: Any
) -> RoundExchange:
    """One replica's, which goes on without the missing after a short grace."""
    membership = Membership(
        world_size, quorum=settings.pop("quorum", 2), grace_s=0.1, heartbeat_s=0.1
    )
    door = ObjectStoreAllReduce(
        f"memory://{name}",
        rank,
        world_size,
        timeout_s=settings.pop("timeout_s", 20.0),
        join_timeout_s=0.2,
        poll_interval_s=0.02,
        membership=membership,
        key=key,
        **settings,
    )
    door.exchange.chunk_bytes, door.exchange.patience_s = 128, 0.05
    return door.exchange


def tensor(rank: int) -> torch.Tensor:
    return torch.full((100,), float(rank + 1))


def contribution(rank: int, signer: Signer, **changes: Any) -> list[Any]:
    """What a replica would put, or claims to be."""
    view = byte_view(changes.pop("tensor", tensor(rank)))
    header = Header(
        **{
            "kind": "contribution",
            "run": "",
            "round": 0,
            "fragment": 0,
            "rank": rank,
            "attempt": 0,
            "layout": LAYOUT.digest,
            "nbytes": len(view),
            "norm": 1.0,
            "chunk_bytes": 128,
            "checksums": checksums([view], 128, signer),
            **changes,
        }
    )
    return [header.sign(signer).encode(), view]


def rounds(
    name: str, ranks: list[int], number: int = 0, **settings: Any
) -> dict[int, RoundResult | Exception]:
    """What each rank's replica makes of a round."""

    def work(rank: int) -> RoundResult | Exception:
        own = exchange(name, rank, **settings)
        try:
            return own.exchange(number, 0, [tensor(rank)], Work())
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = {rank: pool.submit(work, rank) for rank in ranks}
        return {rank: future.result(timeout=60) for rank, future in futures.items()}


def mean_of(result: RoundResult | Exception) -> float:
    assert isinstance(result, RoundResult), result
    assert result.tensors is not None, result.reason
    return float(result.tensors[0][0])


# -- contributions ---------------------------------------------------------------------------------

FORGERIES: dict[str, Callable[[str], list[Any]]] = {
    "no mac": lambda name: contribution(2, Signer(), run=name),
    "another key": lambda name: contribution(2, Signer(WRONG, name), run=name),
    "another run's": lambda name: contribution(2, Signer(KEY, "other"), run="other"),
    "another run's, renamed": lambda name: contribution(2, Signer(KEY, "other"), run=name),
    "another round's": lambda name: contribution(2, Signer(KEY, name), run=name, round=7),
    "another fragment's": lambda name: contribution(2, Signer(KEY, name), run=name, fragment=1),
    "another rank's": lambda name: contribution(1, Signer(KEY, name), run=name),
    "another life's": lambda name: contribution(2, Signer(KEY, name), run=name, attempt=3),
}


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("reduction", ["all-gather", "sharded"])
def test_a_forged_or_moved_contribution_is_left_out(
    name: str, forgery: str, reduction: str
) -> None:
    MemoryStore(name).create(keys.put(0, 0, 2, 0), FORGERIES[forgery](name))
    found = rounds(name, [0, 1], reduction=reduction)
    assert {mean_of(one) for one in found.values()} == {1.5}
    commit = Commit.decode(MemoryStore(name).get(keys.commit(0, 0)))
    (excluded,) = commit.excluded
    assert (excluded.rank, excluded.kept) == (2, True)
    moved = forgery in ("another round's", "another fragment's", "another rank's", "another life's")
    expected = "written for another" if moved else "not signed with this run's key"
    assert expected in excluded.reason


def test_every_field_of_a_header_and_every_byte_is_under_the_mac(name: str) -> None:
    """A genuine contribution with more weight, or with other values and their plain checksums."""
    signer = Signer(KEY, name)
    genuine, view = contribution(2, signer, run=name, tokens=1)
    changed = replace(decode(genuine, "k"), tokens=10**6)
    store = MemoryStore(name)
    store.create(keys.put(0, 0, 2, 0), [changed.encode(), view])
    found = rounds(name, [0, 1])
    assert {mean_of(one) for one in found.values()} == {1.5}

    other = uuid.uuid4().hex
    genuine, view = contribution(2, Signer(KEY, other), run=other)
    poison = bytearray(view)
    poison[:4] = b"\x00\x00\x80\x7f"
    MemoryStore(other).create(keys.put(0, 0, 2, 0), [genuine, memoryview(poison)])
    found = rounds(other, [0, 1])
    assert {mean_of(one) for one in found.values()} == {1.5}
    commit = Commit.decode(MemoryStore(other).get(keys.commit(0, 0)))
    assert "chunk 0 is damaged" in commit.excluded[0].reason


def test_the_owner_of_a_forged_contribution_misses_the_round_and_keeps_its_work(
    name: str,
) -> None:
    store = MemoryStore(name)
    store.create(keys.put(0, 0, 2, 0), contribution(2, Signer(WRONG, name), run=name))
    found = rounds(name, [0, 1, 2], quorum=3)
    assert {mean_of(found[rank]) for rank in (0, 1)} == {1.5}
    assert "was decided without this replica" in str(found[2])
    assert "not signed with this run's key" in str(found[2])


# -- decisions and sums ----------------------------------------------------------------------------


def forged_commit(name: str, signer: Signer, **changes: Any) -> Commit:
    """Decides for an object of the forger's, and nobody else's."""
    header, _ = contribution(2, signer, run=name)
    only = Contributor(
        rank=2, attempt=0, header=digest(header), tokens=0, inner_steps=0, weight=1.0
    )
    commit = Commit(
        **{
            "run": name,
            "round": 0,
            "fragment": 0,
            "decision": "commit",
            "contributors": (only,),
            "layout": LAYOUT.digest,
            "nbytes": 400,
            "chunk_bytes": 128,
            **changes,
        }
    )
    return commit.sign(signer)


@pytest.mark.parametrize(
    ("signer", "changes"),
    [
        (lambda name: Signer(), {}),
        (lambda name: Signer(WRONG, name), {}),
        (lambda name: Signer(KEY, "other"), {}),
        (lambda name: Signer(KEY, name), {"round": 3}),
        (lambda name: Signer(KEY, name), {"run": "other"}),
    ],
    ids=["no mac", "another key", "another run's", "another round's", "moved"],
)
def test_a_forged_commit_is_refused_by_name(
    name: str, signer: Callable[[str], Signer], changes: dict[str, Any]
) -> None:
    commit = forged_commit(name, signer(name), **changes)
    MemoryStore(name).create(keys.commit(0, 0), commit.encode())
    for error in rounds(name, [0, 1, 2]).values():
        assert isinstance(error, Exception)
        assert "rounds/00000000.0/commit" in str(error)
        assert "not signed" in str(error) or "belongs to another" in str(error)


def test_a_signed_sum_in_another_shards_place_is_reduced_anew(name: str) -> None:
    """Whoever can write to the prefix can copy what is signed."""

    class Copier(MemoryStore):
        def create(self, key: str, data: Any) -> None:
            super().create(key, data)
            if "/sum/" in key and key.endswith("/000000"):
                super().put(key[:-1] + "1", super().get(key))

    def work(rank: int) -> list[float]:
        own = exchange(name, rank, quorum=2, reduction="sharded", store=Copier(name))
        result = own.exchange(0, 0, [torch.arange(64.0)], Work())
        assert result.tensors is not None
        return [float(value) for value in result.tensors[0]]

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(work, range(2)):
            assert found == [float(i) for i in range(64)]


@pytest.mark.parametrize("kind", ["sum", "void"])
def test_a_forged_sum_is_replaced_by_ones_own(name: str, kind: str) -> None:
    """It names the right commit, as anybody can who reads it, and comes before its owner's."""

    class Forger(MemoryStore):
        def create(self, key: str, data: Any) -> None:
            if "/sum/" in key:
                honest = decode(data[0], key)
                view = byte_view(torch.full((honest.nbytes // 4,), 1e9))
                header = replace(
                    honest,
                    kind=kind,
                    nbytes=len(view) if kind == "sum" else 0,
                    note="" if kind == "sum" else "because I say so",
                    checksums=checksums([view], 128) if kind == "sum" else "",
                    mac="",
                )
                body = [header.encode(), view] if kind == "sum" else [header.encode()]
                with suppress(AlreadyExistsError):
                    super().create(key, body)
            super().create(key, data)

    found = rounds(name, [0, 1, 2], quorum=3, reduction="sharded", store=Forger(name))
    assert {mean_of(one) for one in found.values()} == {2.0}
    # Without a key there is no telling.
    open_name = uuid.uuid4().hex
    name = open_name
    found = rounds(name, [0, 1, 2], quorum=3, reduction="sharded", store=Forger(name), key=None)
    honest = all(
        isinstance(one, RoundResult) and one.tensors is not None and mean_of(one) == 2.0
        for one in found.values()
    )
    assert not honest


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, 1, 2])
@pytest.mark.parametrize(
    ("theirs", "others"),
    [(WRONG, KEY), (None, KEY), (KEY, None)],
    ids=["another key", "no key", "a key in a run without"],
)
def test_a_replica_with_another_key_is_left_out_and_the_others_go_on(
    name: str, wrong: int, theirs: bytes | None, others: bytes | None
) -> None:
    def work(rank: int) -> RoundResult | Exception:
        own = exchange(name, rank, quorum=3, key=theirs if rank == wrong else others)
        try:
            return own.exchange(0, 0, [tensor(rank)], Work())
        except Exception as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        found = dict(enumerate(pool.map(work, range(3))))
    odd = found.pop(wrong)
    right = [rank for rank in range(3) if rank != wrong]
    assert {mean_of(one) for one in found.values()} == {sum(r + 1 for r in right) / 2}
    assert isinstance(odd, ForeignObjectError)
    reasons = {
        WRONG: "not signed with this run's key",
        None: "signed, and this replica has no key",
    }
    assert f"commit: {reasons.get(theirs, reasons[WRONG])}" in str(odd)
    (excluded,) = Commit.decode(MemoryStore(name).get(keys.commit(0, 0))).excluded
    assert excluded.rank == wrong
    assert reasons[None if others is None else WRONG] in excluded.reason


def test_a_replica_that_is_alone_with_its_key_decides_nothing(name: str) -> None:
    MemoryStore(name).create(keys.put(0, 0, 1, 0), contribution(1, Signer(WRONG, name), run=name))
    (error,) = rounds(name, [0], world_size=2, timeout_s=0.5).values()
    assert "no other replica contributed what is signed with this replica's key" in str(error)
    assert MemoryStore(name).list(keys.commit(0, 0)) == []


def test_signed_and_unsigned_rounds_give_the_same_bits(name: str) -> None:
    for reduction in ("all-gather", "sharded"):
        for key in (KEY, None):
            found = rounds(uuid.uuid4().hex, [0, 1, 2], quorum=3, key=key, reduction=reduction)
            assert {mean_of(one) for one in found.values()} == {2.0}


def test_the_key_is_nowhere_to_be_read(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = b"correct horse battery staple 0123"
    own = exchange(name, 0, key=secret)
    MemoryStore(name).create(keys.put(0, 0, 2, 0), contribution(2, Signer(), run=name))
    found = rounds(name, [0, 1], key=secret)
    texts = [repr(own), repr(own.signer), str(own.signer), repr(found), caplog.text]
    texts += [
        MemoryStore(name).get(info.key).decode("latin-1") for info in MemoryStore(name).list()
    ]
    derived = [key.hex() for key in (own.signer._keys or {}).values()]
    for text in texts:
        assert secret.decode() not in text
        assert "".join(f"\\x{byte:02x}" for byte in secret) not in text
        assert not any(key in text for key in derived)
    with pytest.raises(TypeError):
        json.dumps(own.signer)
    with pytest.raises(TypeError):
        pickle.dumps(own.signer)


def test_each_use_and_each_run_has_a_key_of_its_own() -> None:
    one, other = Signer(KEY, "a"), Signer(KEY, "b")
    macs = {
        signer.mac(use, [b"data"])
        for signer in (one, other, Signer(WRONG, "a"))
        for use in ("header", "commit", "manifest", "inner")
    }
    assert len(macs) == 12
    assert Signer(b"b" + KEY, "a").mac("header", [b"x"]) != Signer(KEY, "ab").mac("header", [b"x"])
    assert Signer(None, "a").mac("header", [b"data"]) == ""


@pytest.mark.parametrize("mac", ["", "0" * 64, "é", "0" * 10**5])
def test_a_wrong_mac_is_one_error(mac: str) -> None:
    with pytest.raises(ForeignObjectError, match="not signed with this run's key"):
        Signer(KEY, "a").check("header", mac, [b"data"], "put/0", own=False)
