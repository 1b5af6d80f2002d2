"""Object stores behind one small protocol.

    store = open_store("s3://bucket/experiments")
    probe_store(store)                  # can it carry a run?
    store.create("commit", b"...")      # exactly one writer of a key succeeds
    store.get("commit")

Importing this package imports no client library: a driver is loaded when a URI needs it.
"""

from __future__ import annotations

from diloco_cloud.store.base import Buffer, Data, ObjectInfo, ObjectStore
from diloco_cloud.store.filesystem import FilesystemStore
from diloco_cloud.store.opening import open_driver, open_store
from diloco_cloud.store.probe import probe_store
from diloco_cloud.store.retry import RetryingStore, RetryPolicy
from diloco_cloud.store.uris import parent_uri, run_name

__all__ = [
    "Buffer",
    "Data",
    "FilesystemStore",
    "ObjectInfo",
    "ObjectStore",
    "RetryPolicy",
    "RetryingStore",
    "open_driver",
    "open_store",
    "parent_uri",
    "probe_store",
    "run_name",
]
