"""A store whose clock is the test's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from manual_clock import Clock

from diloco_cloud.store.base import Data, ObjectInfo, ObjectStore


class ClockedStore:
    """Passes everything on, and tells times of writing by a manual clock.

    Attributes:
        before_create: called with the key before an object is created.
        reads: keys that were read.
    """

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._written: dict[str, float] = {}
        self.before_create: Callable[[str], None] = lambda _key: None
        self.reads: list[str] = []

    def create(self, key: str, data: Data) -> None:
        self.before_create(key)
        self._store.create(key, data)
        self._written[key] = self._clock.now

    def put(self, key: str, data: Data) -> None:
        self._store.put(key, data)
        self._written[key] = self._clock.now

    def get(self, key: str) -> bytes:
        self.reads.append(key)
        return self._store.get(key)

    def head(self, key: str) -> ObjectInfo:
        return self._timed(self._store.head(key))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        return [self._timed(info) for info in self._store.list(prefix)]

    def _timed(self, info: ObjectInfo) -> ObjectInfo:
        at = self._written.get(info.key, info.last_modified)
        return dataclasses.replace(info, last_modified=at)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
