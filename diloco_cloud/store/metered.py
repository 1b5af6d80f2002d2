"""A store that counts what passes through it: requests by kind, and bytes either way."""

from __future__ import annotations

import builtins
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

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


class MeteredStore:
    """Passes every call on to ``inner`` and counts it. Children share the count."""

    def __init__(self, inner: ObjectStore, meter: _Meter | None = None) -> None:
        self._inner = inner
        self._meter = _Meter() if meter is None else meter

    @property
    def uri(self) -> str:
        return self._inner.uri

    @property
    def usage(self) -> Usage:
        return self._meter.read()

    def create(self, key: str, data: Data) -> None:
        self._meter.request("create")
        self._inner.create(key, data)
        self._meter.moved(sent=_size(data))

    def put(self, key: str, data: Data) -> None:
        self._meter.request("put")
        self._inner.put(key, data)
        self._meter.moved(sent=_size(data))

    def get(self, key: str) -> bytes:
        self._meter.request("get")
        data = self._inner.get(key)
        self._meter.moved(received=len(data))
        return data

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        self._meter.request("get_range")
        data = self._inner.get_range(key, start, length)
        self._meter.moved(received=len(data))
        return data

    def head(self, key: str) -> ObjectInfo:
        self._meter.request("head")
        return self._inner.head(key)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        self._meter.request("list")
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
        return MeteredStore(self._inner.child(path), self._meter)


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
