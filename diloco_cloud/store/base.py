"""The store protocol: all that a run asks of an object store.

Semantics every driver keeps (one contract suite in ``tests/store`` holds them to it):

* A key is a relative, ``/``-separated path without empty, ``.`` or ``..`` segments,
  without backslashes and control characters.
* An object is visible whole or not at all: a reader never sees a half-written one.
* ``create`` succeeds for exactly one of any number of concurrent writers of a key.
* After a write returns, every ``get``, ``head`` and ``list`` that starts later sees it.
* Only the errors of :mod:`diloco_cloud.errors` (the ``StoreError`` branch) are raised.
* All methods may be called from any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, runtime_checkable

Buffer: TypeAlias = bytes | bytearray | memoryview
#: One buffer, or several that are written one after the other without being joined first.
Data: TypeAlias = Buffer | Sequence[Buffer]

#: Backslash, control characters, and halves of surrogate pairs, which UTF-8 cannot hold.
_FORBIDDEN: Final = re.compile(r"[\\\x00-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing or a head tells about an object.

    Attributes:
        key: relative to the store's root.
        size: bytes.
        last_modified: seconds since the epoch **by the store's clock**; deadlines are measured
            between two of these, never against a local clock.
    """

    key: str
    size: int
    last_modified: float


@runtime_checkable
class ObjectStore(Protocol):
    """A prefix in an object store."""

    @property
    def uri(self) -> str:
        """Opens this prefix again; without credentials and without a trailing slash."""

    def create(self, key: str, data: Data) -> None:
        """Write ``key`` if and only if it does not exist; ``AlreadyExistsError`` otherwise."""

    def put(self, key: str, data: Data) -> None:
        """Write ``key``, replacing what is there atomically."""

    def get(self, key: str) -> bytes:
        """Read a whole object; ``NotFoundError`` if there is none."""

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        """Read ``length`` bytes from ``start``.

        Raises:
            NotFoundError: no such object.
            CorruptError: the object ends before ``start + length``.
        """

    def head(self, key: str) -> ObjectInfo:
        """Size and server time of an object; ``NotFoundError`` if there is none."""

    # Above `list`, whose name would otherwise hide the built-in type.
    def list_dirs(self, prefix: str = "") -> list[str]:
        """Immediate children of the directory ``prefix`` that hold objects, names only, sorted.

        ``prefix`` is "" or ends with "/". One delimited request; costs nothing per object below.
        Stores made of directories (SeaweedFS, a plain directory whose writer was killed) may name
        one for a while after its last object was deleted.
        """

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Objects whose key starts with ``prefix``, in key order.

        ``prefix`` is a plain string prefix of the key ("a/b" lists "a/b/c" and "a/bc").
        """

    def delete(self, key: str) -> None:
        """Remove an object; removing an absent one is a success."""

    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove objects, in as few requests as the store allows."""

    def child(self, path: str) -> ObjectStore:
        """The store rooted at ``path`` below this one, sharing its connections."""


def check_key(key: str) -> str:
    """Return ``key`` if it is one the protocol allows, else raise ``ValueError``."""
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or _FORBIDDEN.search(key):
        raise ValueError(f"not an object key: {key!r}")
    return key


def buffers(data: Data) -> list[memoryview]:
    """``data`` as flat byte views, without copying."""
    parts = [data] if isinstance(data, (bytes, bytearray, memoryview)) else data
    return [memoryview(part).cast("B") for part in parts]


def check_range(start: int, length: int) -> None:
    """Raise ``ValueError`` for a range that no object can have."""
    if start < 0 or length < 0:
        raise ValueError(f"not a byte range: {length} bytes from {start}")
