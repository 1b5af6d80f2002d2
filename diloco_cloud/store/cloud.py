"""``s3://``, ``gs://``, ``az://`` and ``hf://buckets/`` through obstore (the Rust object_store)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Literal

import obstore
from obstore.exceptions import BaseError

from diloco_cloud.errors import CorruptError, ExpiredCredentialsError, StoreError
from diloco_cloud.store.base import Data, ObjectInfo, buffers, check_key, check_range
from diloco_cloud.store.cloud_clients import Client, Clients, Connection
from diloco_cloud.store.cloud_errors import is_missing_bucket, store_error

if TYPE_CHECKING:
    from obstore import ObjectMeta

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

    When the store calls its credentials expired, it gets new ones for the next request.

    Every write is a single PUT, so it is atomic, and ``create`` carries ``If-None-Match: *`` (or
    the cloud's equivalent). Buffers are sent from where they lie: neither one nor several are
    copied, so they must not change until the call returns.

    obstore's threads do not survive ``fork``: a forked child that sends a request would hang, and
    hang its parent too, so it is refused. Processes that are spawned, or that fork and leave
    stores alone (as data loaders do), are fine.

    Args:
        connection: to the bucket; its ``bulk`` client is for writes of 8 MiB and more.
        bucket_uri: names the bucket, without a trailing slash.
        prefix: "" or a key prefix ending in "/".
    """

    def __init__(self, connection: Connection, bucket_uri: str, prefix: str = "") -> None:
        self._connection = connection
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
        with self._request(key) as clients:
            return obstore.get(clients.small, self._full(key)).bytes().to_bytes()

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        check_range(start, length)
        if length == 0:  # HTTP has no empty range
            if self.head(key).size < start:
                raise CorruptError(f"{self._name(key)} ends before byte {start}")
            return memoryview(b"")
        with self._request(key) as clients:
            data = memoryview(
                obstore.get_range(clients.small, self._full(key), start=start, length=length)
            )
        if data.nbytes != length:
            raise CorruptError(
                f"{self._name(key)}: {data.nbytes} bytes from {start}, not the {length} asked for"
            )
        return data

    def head(self, key: str) -> ObjectInfo:
        try:
            with self._request(key) as clients:
                return self._info(obstore.head(clients.small, self._full(key)))
        except StoreError as error:
            # The answer to HEAD has no body to say what is wrong; expired credentials are a bare
            # "400". The answer to GET does.
            if type(error) is StoreError:
                with suppress(CorruptError):
                    self.get_range(key, 0, 1)
            raise

    def list_dirs(self, prefix: str = "") -> list[str]:
        start = self._prefix + prefix
        with self._request(prefix) as clients:
            found = obstore.list_with_delimiter(clients.small, start or None)
        return sorted(path.removeprefix(start).strip("/") for path in found["common_prefixes"])

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        # obstore matches whole path segments: list the directory, then compare the rest here.
        folder = (self._prefix + prefix).rpartition("/")[0]
        start, infos = self._prefix + prefix, []
        with self._request(prefix) as clients:
            for page in obstore.list(clients.small, folder or None, chunk_size=_DELETE_BATCH):
                infos += [self._info(meta) for meta in page if meta["path"].startswith(start)]
        return sorted(infos, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def delete_many(self, keys: Iterable[str]) -> None:
        paths = [self._full(key) for key in keys]
        for first in range(0, len(paths), _DELETE_BATCH):
            batch = paths[first : first + _DELETE_BATCH]
            with self._request() as clients:
                try:
                    obstore.delete(clients.small, batch)
                except FileNotFoundError as error:
                    if is_missing_bucket(error):
                        raise
                    # Google and Azure report absent objects, and may stop at the first.
                    _delete_each(clients.small, batch)

    def child(self, path: str) -> CloudStore:
        prefix = f"{self._full(path.rstrip('/'))}/"
        return CloudStore(self._connection, self._bucket_uri, prefix)

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
        body = views[0] if len(views) == 1 else views
        with self._request(key) as clients:
            client = clients.bulk if size >= _BULK_BYTES else clients.small
            # Multipart would be begun for several buffers; its parts are not conditional.
            obstore.put(client, path, body, mode=mode, use_multipart=False)

    @contextmanager
    def _request(self, key: str = "") -> Iterator[Clients]:
        """The clients for one request; its errors leave as this package's."""
        _check_not_forked()
        clients = self._connection.clients
        try:
            yield clients
        except StoreError:
            raise
        except (BaseError, OSError) as error:
            meaning = store_error(error, self._name(key))
            if isinstance(meaning, ExpiredCredentialsError):
                self._connection.renew(clients)
            raise meaning from error


def _delete_each(client: Client, paths: Iterable[str]) -> None:
    for path in paths:
        with suppress(FileNotFoundError):
            obstore.delete(client, path)


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
