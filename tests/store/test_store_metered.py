"""Counting what passes through a store."""

from __future__ import annotations

import uuid

import pytest

from diloco_cloud.errors import AlreadyExistsError
from diloco_cloud.store import open_store
from diloco_cloud.store.base import ObjectStore
from diloco_cloud.store.metered import MeteredStore


def test_requests_and_bytes_are_counted_children_included() -> None:
    store = MeteredStore(open_store(f"memory://{uuid.uuid4().hex}"))
    assert isinstance(store, ObjectStore)
    store.create("a", [b"12", b"345"])
    before = store.usage
    with pytest.raises(AlreadyExistsError):
        store.create("a", b"again")
    store.child("dir").put("b", b"1234")
    assert store.get("a") == b"12345"
    assert store.get_range("dir/b", 1, 2) == b"23"
    assert [i.key for i in store.list()] == ["a", "dir/b"]
    used = store.usage - before
    assert used.requests == {"create": 1, "put": 1, "get": 1, "get_range": 1, "list": 1}
    assert (used.bytes_sent, used.bytes_received) == (4, 7)
