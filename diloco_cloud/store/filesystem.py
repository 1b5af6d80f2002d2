"""Any fsspec filesystem as an object store: a scheme without a driver, or one a user brings."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final

from diloco_cloud.errors import (
    CorruptError,
    DeniedError,
    NotFoundError,
    StoreError,
    UnreachableError,
    UnsupportedStoreError,
)
from diloco_cloud.store import os_errors
from diloco_cloud.store.base import Data, ObjectInfo, buffers, check_key, check_range
from diloco_cloud.store.cloud_errors import from_response
from diloco_cloud.store.redaction import redacted

#: Where filesystems put the time of an object in what ``info`` returns.
_TIMES: Final = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")


class FilesystemStore:
    """An :class:`~diloco_cloud.store.ObjectStore` in a directory of an fsspec filesystem.

    ``create`` works where the server itself decides who was first (s3fs, gcsfs and others whose
    ``pipe_file`` has ``mode="create"`` of their own). fsspec's fallback looks and then writes,
    which two writers can do at once, so it raises ``UnsupportedStoreError`` instead.

    Several buffers are joined before they are sent, and a filesystem that retries on its own may
    report its own write as ``AlreadyExistsError``: read the object back to tell.

    Args:
        fs: its listing cache is turned off, since it hides what peers write.
        root: directory within it, with or without protocol.
    """

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = str(fs._strip_protocol(root)).strip("/")
        cache: Any = getattr(fs, "dircache", object())
        if hasattr(cache, "use_listings_cache"):
            cache.use_listings_cache = False
            cache.clear()

    def __repr__(self) -> str:
        return f"FilesystemStore({self.uri!r})"

    @property
    def uri(self) -> str:
        return redacted(str(self._fs.unstrip_protocol(self._root))).rstrip("/")

    def create(self, key: str, data: Data) -> None:
        path = self._path(key)
        if not _creates_exclusively(self._fs):
            raise UnsupportedStoreError(
                f"{type(self._fs).__name__} cannot create an object exactly once",
                fix="Use a plain directory, s3://, gs:// or az://.",
            )
        with self._translated(key):
            self._fs.pipe_file(path, _joined(data), mode="create")

    def put(self, key: str, data: Data) -> None:
        path = self._path(key)
        with self._translated(key):
            self._fs.pipe_file(path, _joined(data))

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with self._translated(key):
            return bytes(self._fs.cat_file(path))

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        check_range(start, length)
        path = self._path(key)
        data = b""
        if length:
            with self._translated(key):
                data = self._fs.cat_file(path, start=start, end=start + length)
        if len(data) != length or not length:
            size = self.head(key).size
            if size < start + length:
                raise CorruptError(
                    f"{self._name(key)} ends at byte {size}, "
                    f"{start + length - size} short of the range asked for"
                )
        return memoryview(data)

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._translated(key):
            self._fs.invalidate_cache(self._fs._parent(path))
            info = self._fs.info(path)
        if info["type"] != "file":
            raise NotFoundError(f"{self._name(key)} does not exist")
        return ObjectInfo(key, int(info["size"]), _modified(info))

    def list_dirs(self, prefix: str = "") -> list[str]:
        folder = f"{self._root}/{prefix}".strip("/")
        with self._translated(prefix):
            self._fs.invalidate_cache(folder)
            try:
                found = self._fs.ls(folder, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        names = (info["name"].rstrip("/").rpartition("/")[2] for info in found if _is_dir(info))
        return sorted(names)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        folder = f"{self._root}/{prefix}".rpartition("/")[0].strip("/")
        with self._translated(prefix):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(folder, detail=True)
            except FileNotFoundError:
                return []
        infos = (
            ObjectInfo(self._key(path), int(info["size"]), _modified(info))
            for path, info in found.items()
            if info["type"] == "file" and self._key(path).startswith(prefix)
        )
        return sorted(infos, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._translated(key), suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def delete_many(self, keys: Iterable[str]) -> None:
        # fsspec's own bulk removal expands wildcards and looks each path up first.
        for key in keys:
            self.delete(key)

    def child(self, path: str) -> FilesystemStore:
        return FilesystemStore(self._fs, self._path(path.rstrip("/")))

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}".lstrip("/")

    def _key(self, path: str) -> str:
        return path.strip("/").removeprefix(self._root).lstrip("/")

    def _name(self, key: str) -> str:
        return f"{self.uri}/{key}".rstrip("/")

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # clients below fsspec raise classes of their own
            raise _store_error(error, self._name(key)) from error


def _creates_exclusively(fs: Any) -> bool:
    """Whether ``pipe_file(mode="create")`` is a conditional request rather than look-then-write.

    Only remote filesystems (fsspec calls them async) hand the decision to a server.
    """
    method = getattr(type(fs), "_pipe_file", None)
    if method is None or not getattr(fs, "async_impl", False):
        return False
    return "mode" in inspect.signature(method).parameters


def _joined(data: Data) -> bytes:
    if isinstance(data, bytes):
        return data
    return b"".join(buffers(data))


def _is_dir(info: Mapping[str, Any]) -> bool:
    return bool(info["type"] == "directory")


def _modified(info: Mapping[str, Any]) -> float:
    """Seconds since the epoch by the server's clock.

    Raises:
        UnsupportedStoreError: the filesystem tells no times; deadlines need them.
    """
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            aware = value if value.tzinfo else value.replace(tzinfo=UTC)
            return aware.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    raise UnsupportedStoreError(
        "this filesystem does not tell when an object was written",
        fix="Use a plain directory, s3://, gs:// or az://.",
    )


def _http_answer(error: BaseException | None) -> tuple[int, str]:
    """The HTTP status and the server's own code behind an exception; (0, "") if there is none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, Mapping):  # botocore, below s3fs
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return status, response.get("Error", {}).get("Code", "")
        for name in ("status_code", "status", "code"):  # azure, aiohttp, gcsfs
            status = getattr(error, name, None)
            if isinstance(status, int) and 300 <= status < 600:
                return status, ""
        error = error.__cause__
    return 0, ""


def _store_error(error: Exception, subject: str) -> StoreError:
    """The meaning of an exception from a filesystem or from the client below it."""
    name = type(error).__name__
    if "Credential" in name:
        return DeniedError(
            f"no credentials for {subject}", fix="Set the filesystem's own variables or files."
        )
    status, code = _http_answer(error)
    if status:
        return from_response(status, code, subject)
    if isinstance(error, OSError):
        return os_errors.store_error(error, subject)
    if any(word in name for word in ("Timeout", "Connect", "Disconnected", "Endpoint")):
        return UnreachableError(f"{subject} cannot be reached ({name})")
    return StoreError(f"{subject}: {name}: {redacted(str(error).split(chr(10), 1)[0])[:300]}")
