"""``s3://``, ``gs://``, ``az://`` and ``hf://buckets/`` through obstore (the Rust object_store)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Literal

import obstore
from obstore.exceptions import BaseError

from diloco_cloud.errors import CorruptError, StoreError
from diloco_cloud.store.base import Data, ObjectInfo, buffers, check_key, check_range
from diloco_cloud.store.cloud_errors import is_missing_bucket, store_error

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import AzureStore, GCSStore, S3Store

    Client = S3Store | GCSStore | AzureStore

#: The largest object one PUT may carry on S3; larger ones have no atomic conditional create.
MAX_OBJECT_BYTES: Final = 5 << 30
#: From this size on, in bytes, a write goes through the client whose timeout allows for it.
_BULK_BYTES: Final = 8 << 20
#: Keys per DeleteObjects request.
_DELETE_BATCH: Final = 1000


#: The process in which obstore's threads run, once they do.
_runtime_owner: int | None = None


class CloudStore:
    """An :class:`~diloco_cloud.store.ObjectStore` in a bucket. It does not retry.

    Every write is a single PUT, so it is atomic, and ``create`` carries ``If-None-Match: *`` (or
    the cloud's equivalent). Buffers are sent from where they lie: neither one nor several are
    copied, so they must not change until the call returns.

    obstore's threads do not survive ``fork``: a forked child that sends a request would hang, and
    hang its parent too, so it is refused. Processes that are spawned, or that fork and leave
    stores alone (as data loaders do), are fine.

    Args:
        client: for everything but large writes.
        bulk_client: for writes of 8 MiB and more; the same bucket, with a longer timeout.
        bucket_uri: names the bucket, without a trailing slash.
        prefix: "" or a key prefix ending in "/".
    """

    def __init__(
        self, client: Client, bulk_client: Client, bucket_uri: str, prefix: str = ""
    ) -> None:
        self._client, self._bulk_client = client, bulk_client
        self._bucket_uri, self._prefix = bucket_uri, prefix

    def __repr__(self) -> str:
        return f"CloudStore({self.uri!r})"

    @property
    def uri(self) -> str:
        return f"{self._bucket_uri}/{self._prefix}".rstrip("/")

    def create(self, key: str, data: Data) -> None:
        self._write(key, data, mode="create")

    def put(self, key: str, data: Data) -> None:
        self._write(key, data, mode="overwrite")

    def get(self, key: str) -> bytes:
        with self._translated(key):
            return obstore.get(self._client, self._full(key)).bytes().to_bytes()

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        check_range(start, length)
        if length == 0:  # HTTP has no empty range
            if self.head(key).size < start:
                raise CorruptError(f"{self._name(key)} ends before byte {start}")
            return memoryview(b"")
        with self._translated(key):
            data = memoryview(
                obstore.get_range(self._client, self._full(key), start=start, length=length)
            )
        if data.nbytes != length:
            raise CorruptError(
                f"{self._name(key)}: {data.nbytes} bytes from {start}, not the {length} asked for"
            )
        return data

    def head(self, key: str) -> ObjectInfo:
        with self._translated(key):
            return self._info(obstore.head(self._client, self._full(key)))

    def list_dirs(self, prefix: str = "") -> list[str]:
        start = self._prefix + prefix
        with self._translated(prefix):
            found = obstore.list_with_delimiter(self._client, start or None)
        return sorted(path.removeprefix(start).strip("/") for path in found["common_prefixes"])

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        # obstore matches whole path segments: list the directory, then compare the rest here.
        folder = (self._prefix + prefix).rpartition("/")[0]
        start, infos = self._prefix + prefix, []
        with self._translated(prefix):
            for page in obstore.list(self._client, folder or None, chunk_size=_DELETE_BATCH):
                infos += [self._info(meta) for meta in page if meta["path"].startswith(start)]
        return sorted(infos, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def delete_many(self, keys: Iterable[str]) -> None:
        paths = [self._full(key) for key in keys]
        for first in range(0, len(paths), _DELETE_BATCH):
            batch = paths[first : first + _DELETE_BATCH]
            with self._translated():
                try:
                    obstore.delete(self._client, batch)
                except FileNotFoundError as error:
                    if is_missing_bucket(error):
                        raise
                    # Google and Azure report absent objects, and may stop at the first.
                    self._delete_each(batch)

    def child(self, path: str) -> CloudStore:
        prefix = f"{self._full(path.rstrip('/'))}/"
        return CloudStore(self._client, self._bulk_client, self._bucket_uri, prefix)

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _name(self, key: str) -> str:
        return f"{self.uri}/{key}".rstrip("/")

    def _info(self, meta: ObjectMeta) -> ObjectInfo:
        key = meta["path"][len(self._prefix) :]
        return ObjectInfo(key, meta["size"], meta["last_modified"].timestamp())

    def _write(self, key: str, data: Data, *, mode: Literal["create", "overwrite"]) -> None:
        path, views = self._full(key), buffers(data)
        size = sum(view.nbytes for view in views)
        if size > MAX_OBJECT_BYTES:
            raise StoreError(
                f"{self._name(key)}: {size / 2**30:.2f} GiB is more than one PUT may carry (5 GiB)",
                fix="Use more fragments or a smaller codec, so that each object is smaller.",
            )
        client = self._bulk_client if size >= _BULK_BYTES else self._client
        body = views[0] if len(views) == 1 else views
        with self._translated(key):
            # Multipart would be begun for several buffers; its parts are not conditional.
            obstore.put(client, path, body, mode=mode, use_multipart=False)

    def _delete_each(self, paths: Iterable[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                obstore.delete(self._client, path)

    @contextmanager
    def _translated(self, key: str = "") -> Iterator[None]:
        _check_not_forked()
        try:
            yield
        except StoreError:
            raise
        except (BaseError, OSError) as error:
            raise store_error(error, self._name(key)) from error


def _check_not_forked() -> None:
    """Raise ``StoreError`` in a process that was forked from one that had sent requests."""
    global _runtime_owner
    if _runtime_owner is None:
        _runtime_owner = os.getpid()
    elif _runtime_owner != os.getpid():
        raise StoreError(
            "an object store cannot be used in a process forked from one that has used it",
            fix='Start the process with multiprocessing\'s "spawn" method, or as a program.',
        )
