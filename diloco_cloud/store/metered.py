"""A store that counts what passes through it: requests by kind, and bytes either way."""

from __future__ import annotations

import builtins
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from diloco_cloud.store.base import Data, ObjectInfo, ObjectStore, buffers


@dataclass(frozen=True)
class Usage:
    """Totals since the store was opened; subtract two to get what lies between them.

    Attributes:
        requests: calls of the protocol by method name, failed ones included. One call is one
            request to the store, but for retries, listings over a page and deletions over a batch.
        bytes_sent, bytes_received: of object bodies, of calls that succeeded.
    """

    requests: Counter[str] = field(default_factory=Counter)
    bytes_sent: int = 0
    bytes_received: int = 0

    def __sub__(self, earlier: Usage) -> Usage:
        return Usage(
            self.requests - earlier.requests,
            self.bytes_sent - earlier.bytes_sent,
            self.bytes_received - earlier.bytes_received,
        )


class Gauge(Protocol):
    """Told of transfers while they are under way, by whichever thread makes them."""

    def sending(self, nbytes: int) -> AbstractContextManager[None]:
        """Around a write of so many bytes."""

    def receiving(self, nbytes: int) -> AbstractContextManager[None]:
        """Around a read of so many bytes; 0 where that is not known before."""


class MeteredStore:
    """Passes every call on to ``inner`` and counts it. Children share the count.

    Args:
        inner: the store.
        gauge: told of every transfer and small request.
        meter: counts; by default one of its own.
    """

    def __init__(
        self, inner: ObjectStore, gauge: Gauge | None = None, *, meter: _Meter | None = None
    ) -> None:
        self._inner = inner
        self._gauge = _NoGauge() if gauge is None else gauge
        self._meter = _Meter() if meter is None else meter

    @property
    def uri(self) -> str:
        return self._inner.uri

    @property
    def usage(self) -> Usage:
        return self._meter.read()

    def create(self, key: str, data: Data) -> None:
        self._meter.request("create")
        size = _size(data)
        with self._gauge.sending(size):
            self._inner.create(key, data)
        self._meter.moved(sent=size)

    def put(self, key: str, data: Data) -> None:
        self._meter.request("put")
        size = _size(data)
        with self._gauge.sending(size):
            self._inner.put(key, data)
        self._meter.moved(sent=size)

    def get(self, key: str) -> bytes:
        self._meter.request("get")
        with self._gauge.receiving(0):
            data = self._inner.get(key)
        self._meter.moved(received=len(data))
        return data

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        self._meter.request("get_range")
        with self._gauge.receiving(length):
            data = self._inner.get_range(key, start, length)
        self._meter.moved(received=len(data))
        return data

    def head(self, key: str) -> ObjectInfo:
        self._meter.request("head")
        with self._gauge.receiving(0):
            return self._inner.head(key)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        self._meter.request("list")
        with self._gauge.receiving(0):
            return self._inner.list(prefix)

    def list_dirs(self, prefix: str = "") -> builtins.list[str]:
        self._meter.request("list_dirs")
        return self._inner.list_dirs(prefix)

    def delete(self, key: str) -> None:
        self._meter.request("delete")
        self._inner.delete(key)

    def delete_many(self, keys: Iterable[str]) -> None:
        self._meter.request("delete_many")
        self._inner.delete_many(keys)

    def child(self, path: str) -> MeteredStore:
        return MeteredStore(self._inner.child(path), self._gauge, meter=self._meter)


class _NoGauge:
    """Nobody wants to know."""

    def sending(self, _nbytes: int) -> AbstractContextManager[None]:
        return nullcontext()

    receiving = sending


class _Meter:
    """Counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._sent = self._received = 0

    def request(self, method: str) -> None:
        with self._lock:
            self._requests[method] += 1

    def moved(self, *, sent: int = 0, received: int = 0) -> None:
        with self._lock:
            self._sent += sent
            self._received += received

    def read(self) -> Usage:
        with self._lock:
            return Usage(self._requests.copy(), self._sent, self._received)


def _size(data: Data) -> int:
    return sum(len(part) for part in buffers(data))
