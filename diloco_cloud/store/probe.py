"""Finding out what a store can do, by doing it."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable
from contextlib import suppress

from diloco_cloud.errors import (
    AlreadyExistsError,
    CorruptError,
    DeniedError,
    NotFoundError,
    StoreError,
    UnsupportedStoreError,
)
from diloco_cloud.store.base import ObjectStore

_PREFIX = ".diloco-probe/"
#: The probe's own object or folder, of which nobody but this module knows.
_PROBE_NAME = re.compile(r"/\.diloco-(?:probe|tmp)(?:/[0-9a-f]*)?")


def probe_store(store: ObjectStore) -> None:
    """Prove that ``store`` can carry a run; leaves nothing behind.

    Conditional create must be tried, not assumed: some servers that speak S3 accept its header and
    ignore it, and every replica would then believe that it alone decided a round.

    Raises:
        UnsupportedStoreError: it cannot do what a run needs, such as create exactly once.
        DeniedError: the credentials do not allow something a run does.
        NotFoundError: the bucket does not exist.
        UnreachableError: no answer.
    """
    key = f"{_PREFIX}{uuid.uuid4().hex}"
    data = os.urandom(32)
    try:
        _attempt("create an object in", store, lambda: store.create(key, data))
        _check_exclusive(store, key)
        _attempt("read from", store, lambda: _check_reads(store, key, data))
        _attempt("list", store, lambda: _check_listed(store, key))
        _attempt("overwrite in", store, lambda: store.put(key, data[:16]))
        _attempt("delete from", store, lambda: _check_deleted(store, key))
    except StoreError:
        with suppress(StoreError):
            store.delete(key)
        raise


def _attempt(what: str, store: ObjectStore, step: Callable[[], None]) -> None:
    """Run ``step``; say which of the things a run does was not possible."""
    try:
        step()
    except AlreadyExistsError:
        raise
    except StoreError as error:
        message, fix = _PROBE_NAME.sub("", error.message), error.fix
        if isinstance(error, (DeniedError, NotFoundError)):
            message = f"cannot {what} {store.uri}: {message}"
        if isinstance(error, NotFoundError):
            fix = fix or "Create the bucket or the directory first, or correct the URI."
        raise type(error)(message, fix=fix) from error


def _check_exclusive(store: ObjectStore, key: str) -> None:
    try:
        _attempt("create an object in", store, lambda: store.create(key, os.urandom(32)))
    except AlreadyExistsError:
        return
    raise UnsupportedStoreError(
        f"{store.uri} lets two writers create the same object: the server ignores "
        "If-None-Match, so replicas could not agree",
        fix="Use a store with conditional writes: Amazon S3, Google Cloud Storage, Azure, "
        "Cloudflare R2, MinIO, SeaweedFS, or a plain directory.",
    )


def _check_reads(store: ObjectStore, key: str, data: bytes) -> None:
    whole, part = store.get(key), bytes(store.get_range(key, 5, 7))
    if whole != data or part != data[5:12] or store.head(key).size != len(data):
        raise CorruptError(f"{store.uri} returned other bytes than were written")


def _check_listed(store: ObjectStore, key: str) -> None:
    if key not in [info.key for info in store.list(_PREFIX)]:
        raise UnsupportedStoreError(
            f"{store.uri} does not list an object that was just written",
            fix="Use a store with consistent listings, and no caching mount.",
        )


def _check_deleted(store: ObjectStore, key: str) -> None:
    store.delete(key)
    if key in [info.key for info in store.list(_PREFIX)]:
        raise UnsupportedStoreError(f"{store.uri} lists an object that was just deleted")
