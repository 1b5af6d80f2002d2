"""An object store in this process's memory: for tests and for trying things out."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort
from collections.abc import Iterable

from diloco_cloud.errors import AlreadyExistsError, CorruptError, NotFoundError
from diloco_cloud.store.base import Data, ObjectInfo, buffers, check_key, check_range


class _Bucket:
    """Named objects (bytes, time of writing) behind one lock; the keys in order besides."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.keys: list[str] = []

    def write(self, key: str, value: bytes) -> None:
        if key not in self.objects:
            insort(self.keys, key)
        self.objects[key] = (value, time.time())

    def remove(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            del self.keys[bisect_left(self.keys, key)]

    def below(self, prefix: str) -> list[tuple[str, int, float]]:
        """Key, size and time of what begins with ``prefix``, in order."""
        last = prefix + "\U0010ffff"  # No key has it.
        with self.lock:
            keys = self.keys[bisect_left(self.keys, prefix) : bisect_left(self.keys, last)]
        # Outside of the lock, which a thread that is not scheduled for a while would keep from all
        # others. What is deleted meanwhile was there when the listing began, and is gone now.
        found = ((key, self.objects.get(key)) for key in keys)
        return [(key, len(one[0]), one[1]) for key, one in found if one is not None]


_buckets: dict[str, _Bucket] = {}
_buckets_lock = threading.Lock()


class MemoryStore:
    """An :class:`~diloco_cloud.store.ObjectStore` shared by all who open it under one name.

    Args:
        name: of the bucket; lives until the process ends.
        prefix: "" or a key prefix ending in "/".
    """

    def __init__(self, name: str, prefix: str = "") -> None:
        with _buckets_lock:
            self._bucket = _buckets.setdefault(name, _Bucket())
        self._name, self._prefix = name, prefix

    def __repr__(self) -> str:
        return f"MemoryStore({self.uri!r})"

    @property
    def uri(self) -> str:
        return f"memory://{self._name}/{self._prefix}".rstrip("/")

    def create(self, key: str, data: Data) -> None:
        full, value = self._full(key), b"".join(buffers(data))
        with self._bucket.lock:
            if full in self._bucket.objects:
                raise AlreadyExistsError(f"{self.uri}/{key} already exists")
            self._bucket.write(full, value)

    def put(self, key: str, data: Data) -> None:
        full, value = self._full(key), b"".join(buffers(data))
        with self._bucket.lock:
            self._bucket.write(full, value)

    def get(self, key: str) -> bytes:
        return self._read(key)[0]

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        check_range(start, length)
        data = self._read(key)[0]
        if len(data) < start + length:
            raise CorruptError(
                f"{self.uri}/{key} ends at byte {len(data)}, "
                f"{start + length - len(data)} short of the range asked for"
            )
        return memoryview(data)[start : start + length]

    def head(self, key: str) -> ObjectInfo:
        data, written = self._read(key)
        return ObjectInfo(key, len(data), written)

    def list_dirs(self, prefix: str = "") -> list[str]:
        names = (info.key[len(prefix) :].partition("/") for info in self.list(prefix))
        return sorted({name for name, slash, _ in names if slash})

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        start, cut = self._prefix + prefix, len(self._prefix)
        found = self._bucket.below(start)
        return [ObjectInfo(key[cut:], size, written) for key, size, written in found]

    def delete(self, key: str) -> None:
        full = self._full(key)
        with self._bucket.lock:
            self._bucket.remove(full)

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.delete(key)

    def child(self, path: str) -> MemoryStore:
        return MemoryStore(self._name, f"{self._full(path.rstrip('/'))}/")

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _read(self, key: str) -> tuple[bytes, float]:
        full = self._full(key)
        try:
            return self._bucket.objects[full]  # One step, so that no reader waits for another.
        except KeyError:
            raise NotFoundError(f"{self.uri}/{key} does not exist") from None
