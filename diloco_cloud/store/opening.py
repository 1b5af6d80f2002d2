"""From a URI to a store."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, unquote, urlsplit

from diloco_cloud.errors import ConfigError, MissingDependencyError, StoreError, UnreachableError
from diloco_cloud.store.base import ObjectStore, check_key
from diloco_cloud.store.directory import DirectoryStore
from diloco_cloud.store.memory import MemoryStore
from diloco_cloud.store.redaction import redacted
from diloco_cloud.store.retry import RetryingStore, RetryPolicy
from diloco_cloud.store.uris import FAULTS_SCHEME, is_faulty, plain_uri, split_query

if TYPE_CHECKING:
    from diloco_cloud.store.faults import Faults

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
#: What becomes of a URI that loses a slash, as in ``Path("s3://bucket")``. One letter is a drive.
_ONE_SLASH: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_BUCKETS: Final = frozenset({"s3", "gs", "az"})
_ALIASES: Final = {"s3a": "s3", "gcs": "gs"}


def open_store(uri: str | os.PathLike[str], *, retry: RetryPolicy | None = None) -> ObjectStore:
    """Open the store at ``uri``. No request is sent, and nothing is created.

    Args:
        uri: a path or ``file://`` (a directory), ``memory://name``, ``s3://bucket/prefix``,
            ``gs://``, ``az://container/prefix``, ``hf://buckets/namespace/name/prefix``, or any
            scheme that fsspec knows. Credentials come from the environment, never from here.
            ``faults+URI?seed=1&throttled=0.1`` puts faults into any of them
            (:class:`~diloco_cloud.store.faults.Faults`).
        retry: of remote and of faulty stores; default :class:`RetryPolicy`. Directories and memory
            do not retry.

    Raises:
        ConfigError: not a URI of a store, or one that carries credentials.
        MissingDependencyError: the package for this scheme is not installed.
    """
    driver = open_driver(uri)
    if isinstance(driver, (DirectoryStore, MemoryStore)):
        return driver
    return RetryingStore(driver, retry)


def open_driver(uri: str | os.PathLike[str]) -> ObjectStore:
    """What :func:`open_store` opens, without the retries.

    Raises:
        ConfigError: not a URI of a store, or one that carries credentials.
        MissingDependencyError: the package for this scheme is not installed.
    """
    text = os.fspath(uri)
    if not text or "\0" in text:
        raise ConfigError("the store's URI is empty or holds a null character")
    if not is_uri(text):
        return DirectoryStore(text)
    if is_faulty(text):
        return _faulty(text)
    parts = _split(text)
    if parts.scheme == "file":
        return _directory(parts)
    prefix = _prefix(parts)
    if parts.scheme == "memory":
        memory = MemoryStore(_bucket(parts))
        return memory.child(prefix) if prefix else memory
    return _remote(text, parts, prefix)


def check_uri(uri: str) -> None:
    """Check that :func:`open_store` will know what to do with ``uri``; asks nobody.

    Raises:
        ConfigError: not a URI of a store, one that carries credentials, or the environment does
            not describe a client for it.
        MissingDependencyError: the package for this scheme is not installed.
        DeniedError: a profile is configured but holds no credentials.
    """
    text = plain_uri(uri)
    scheme = urlsplit(text).scheme if is_uri(text) else ""
    if scheme in ("", "file", "memory", "hf") or _ALIASES.get(scheme, scheme) in _BUCKETS:
        open_driver(uri)
        return
    if is_faulty(uri):
        _faults(uri)
    _prefix(_split(text))
    with _needing_fsspec(scheme):
        from fsspec import get_filesystem_class

        get_filesystem_class(scheme)


def is_uri(text: str) -> bool:
    """Whether ``text`` names a store by a URI rather than by a path.

    Raises:
        ConfigError: it is a URI that lacks a slash.
    """
    if damaged := _ONE_SLASH.match(text):
        scheme, rest = damaged[1], text[damaged.end() :]
        slashes = ":///" if scheme == "file" else "://"
        raise ConfigError(
            f"{redacted(text)!r} is neither a path nor a URI: a slash is missing",
            fix=f"Write {redacted(scheme + slashes + rest)}, or ./{scheme}:/… for a directory.",
        )
    return _SCHEME.match(text) is not None


def _faulty(text: str) -> ObjectStore:
    from diloco_cloud.store.faults import FaultyStore

    faults = _faults(text)
    return FaultyStore(open_driver(plain_uri(text)), faults)


def _faults(text: str) -> Faults:
    """The faults that a URI asks for."""
    from diloco_cloud.store.faults import Faults

    if is_faulty(plain_uri(text)):
        raise ConfigError(
            f"the store's URI begins with {FAULTS_SCHEME} twice", fix="Once is enough."
        )
    return Faults.parse(split_query(text)[1].removeprefix("?"))


def _split(text: str) -> SplitResult:
    """The parts of a URI, once it is known to carry no credentials."""
    try:
        parts = urlsplit(text)
        carries = bool(parts.query or parts.fragment or parts.password)
    except ValueError:
        raise ConfigError(
            "the store's URI is malformed", fix="Write scheme://bucket/prefix."
        ) from None
    scheme = _ALIASES.get(parts.scheme, parts.scheme)
    if carries or (parts.username and scheme in _BUCKETS):
        raise ConfigError(
            f"the {scheme}:// URI of the store carries credentials or a query",
            fix="Leave only scheme://bucket/prefix, and set credentials in the environment.",
        )
    return parts._replace(scheme=scheme)


def _directory(parts: SplitResult) -> DirectoryStore:
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ConfigError(
            f"{parts.geturl()} does not name a directory",
            fix="Write file:///path, with three slashes.",
        )
    return DirectoryStore(unquote(parts.path))


def _bucket(parts: SplitResult) -> str:
    if not parts.netloc:
        raise ConfigError(
            f"{parts.geturl()} names no bucket", fix=f"Write {parts.scheme}://bucket/prefix."
        )
    return parts.netloc


def _prefix(parts: SplitResult) -> str:
    prefix = parts.path.strip("/")
    try:
        return check_key(prefix) if prefix else ""
    except ValueError:
        raise ConfigError(
            f"{prefix!r} cannot be the prefix of a store",
            fix='Leave out empty, "." and ".." segments.',
        ) from None


def _remote(text: str, parts: SplitResult, prefix: str) -> ObjectStore:
    from diloco_cloud.store.cloud_clients import open_cloud_store

    if parts.scheme in _BUCKETS:
        return open_cloud_store(parts.scheme, _bucket(parts), prefix)
    if parts.scheme == "hf":
        return open_cloud_store("hf", *_hf_bucket(parts, prefix))
    return _filesystem(text, parts.scheme)


def _hf_bucket(parts: SplitResult, prefix: str) -> tuple[str, str]:
    """("namespace/name", prefix) of ``hf://buckets/namespace/name/prefix``."""
    namespace, _, rest = prefix.partition("/")
    name, _, below = rest.partition("/")
    if parts.netloc != "buckets" or not name:
        raise ConfigError(
            "a repository on the Hugging Face Hub cannot be a store: every object would be a git "
            "commit, tens of thousands a day, and none can be created exactly once",
            fix="Use a storage bucket: hf://buckets/NAMESPACE/NAME/PREFIX.",
        )
    return f"{namespace}/{name}", below


def _filesystem(text: str, scheme: str) -> ObjectStore:
    with _needing_fsspec(scheme):
        from fsspec.core import url_to_fs

        from diloco_cloud.store.filesystem import FilesystemStore

        try:
            fs, root = url_to_fs(text, skip_instance_cache=True)
        except (ImportError, ValueError, StoreError):
            raise
        except Exception as error:  # some connect at once, and raise whatever their client raises
            line = redacted(str(error).split("\n", 1)[0])[:300]
            raise UnreachableError(
                f"{redacted(text)} cannot be reached ({type(error).__name__}: {line})",
                fix="Check the address, the network, and what this filesystem needs.",
            ) from error
    return FilesystemStore(fs, root)


@contextlib.contextmanager
def _needing_fsspec(scheme: str) -> Iterator[None]:
    """Turn what fsspec says of a scheme into errors of ours."""
    try:
        yield
    except StoreError:
        raise
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "fsspec":
            raise MissingDependencyError(
                f"{scheme}:// needs the package fsspec", fix="pip install 'diloco-cloud[fsspec]'"
            ) from error
        raise MissingDependencyError(
            f"{scheme}:// needs a package that is not installed",
            fix=f"pip install 'diloco-cloud[fsspec]'; then: {error}",
        ) from error
    except ValueError:
        raise ConfigError(
            f"no store knows the scheme {scheme}://",
            fix="Use a directory, s3://, gs://, az:// or hf://buckets/.",
        ) from None
