"""A directory as an object store, shared by processes of one machine or of a network file system.

How the protocol's promises are kept:

* **Whole or not at all.** Bytes go to a temporary file in ``.diloco-tmp/`` below the root and get
  their name in one step: ``link`` for ``create``, which fails if the name is taken, ``rename`` for
  ``put``, which replaces it. Listings skip that folder, so a writer killed half-way leaves nothing
  a reader can see; what it leaves is removed a day later.
* **Power loss.** The file's data is flushed (``fsync``) before it gets its name, so no name ever
  leads to torn bytes. Directories are not flushed: after a power cut the last seconds of *names*
  may be missing. Journalling file systems keep their order, so what remains is the prefix as it
  stood a moment earlier, which every reader can handle; and whoever had seen more was running on
  the machine that lost its power. (An NFS server makes names durable before it answers.)
* **Directories are not objects.** They are made when needed and removed when empty; ``create``
  retries when a concurrent ``delete`` removes the directory it was about to use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from diloco_cloud.errors import (
    AlreadyExistsError,
    CorruptError,
    NotFoundError,
    StoreError,
    UnsupportedStoreError,
)
from diloco_cloud.store.base import Data, ObjectInfo, buffers, check_key, check_range
from diloco_cloud.store.os_errors import store_error

_SCRATCH: Final = ".diloco-tmp"
#: Age, in seconds, at which a temporary file can no longer belong to a live writer.
_STALE_AFTER: Final = 86_400.0
#: Linux transfers at most 2 GiB - 4 KiB per call.
_MAX_IO: Final = 1 << 30
#: Deletes may remove a directory between mkdir and link this often before it is called an error.
_PLACE_ATTEMPTS: Final = 1000
#: What ``link`` answers where a file system has no hard links.
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


class DirectoryStore:
    """An :class:`~diloco_cloud.store.ObjectStore` in a directory.

    Args:
        root: need not exist; it is made by the first write.
        fsync: flush the data of each object to the disk before it gets its name.
    """

    def __init__(self, root: str | os.PathLike[str], *, fsync: bool = True) -> None:
        self._root = Path(root).expanduser().absolute()
        self._fsync = fsync
        #: Up to here empty directories are removed; a child's own root is one of them.
        self._top = self._root
        self._scratch = self._root / _SCRATCH
        self._scratch_ready = False

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self._root)!r})"

    @property
    def uri(self) -> str:
        return self._root.as_uri()

    def require(self) -> None:
        """Raise ``NotFoundError`` unless the directory is there already."""
        if not self._root.is_dir():
            raise NotFoundError(
                f"there is no directory {self._root}", fix="Check the name; a launch would make it."
            )

    def create(self, key: str, data: Data) -> None:
        target = self._path(key)
        with _translated(target):
            if target.is_file():  # spare the write; link decides
                raise AlreadyExistsError(f"{target} already exists")
            with self._temporary(data) as temporary:
                self._place(temporary, target, _link)

    def put(self, key: str, data: Data) -> None:
        target = self._path(key)
        with _translated(target), self._temporary(data) as temporary:
            self._place(temporary, target, os.replace)

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with _translated(path):
            return path.read_bytes()

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        check_range(start, length)
        path = self._path(key)
        with _translated(path), _opened(path, os.O_RDONLY) as descriptor:
            _check_regular(os.fstat(descriptor), path)
            data, done = memoryview(bytearray(length)), 0
            while done < length:
                count = os.preadv(descriptor, [data[done : done + _MAX_IO]], start + done)
                if count == 0:
                    break
                done += count
            size = os.fstat(descriptor).st_size
        if size < start + length:
            raise CorruptError(
                f"{path} ends at byte {size}, {start + length - size} short of the range asked for"
            )
        return data

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with _translated(path):
            status = os.stat(path)
            _check_regular(status, path)
        return ObjectInfo(key, status.st_size, status.st_mtime)

    def list_dirs(self, prefix: str = "") -> list[str]:
        """Names of the directories directly below ``prefix``: one ``scandir``.

        A directory that a killed writer made and never filled is listed too.
        """
        with _translated(self._root / prefix):
            return sorted(e.name for e in self._scan(prefix) if e.is_dir(follow_symlinks=False))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        folder, _, start = prefix.rpartition("/")
        folder = f"{folder}/" if folder else ""
        with _translated(self._root / folder):
            return sorted(self._walk(folder, start), key=lambda info: info.key)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _translated(path):
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            except (IsADirectoryError, PermissionError):  # POSIX lets unlink(dir) say EPERM
                if path.is_dir():
                    return
                raise
        self._prune(path.parent)

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.delete(key)

    def child(self, path: str) -> DirectoryStore:
        child = DirectoryStore(self._path(path.rstrip("/")), fsync=self._fsync)
        child._top, child._scratch = self._top, self._scratch
        child._scratch_ready = self._scratch_ready
        return child

    def _path(self, key: str) -> Path:
        if _SCRATCH in check_key(key).split("/"):
            raise ValueError(f"not an object key: {key!r} ({_SCRATCH} is reserved)")
        return self._root / key

    @contextlib.contextmanager
    def _temporary(self, data: Data) -> Iterator[Path]:
        """A flushed file with ``data`` and no object's name, removed afterwards if still there."""
        if not self._scratch_ready:
            try:
                self._scratch.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise StoreError(
                    f"{self._scratch.parent} is not a directory",
                    fix="Name a directory, or a path that does not exist yet.",
                ) from None
            _sweep(self._scratch, older_than=time.time() - _STALE_AFTER)
            self._scratch_ready = True
        path = self._scratch / uuid.uuid4().hex
        try:
            with self._opened_scratch(path) as descriptor:
                for view in buffers(data):
                    while view:
                        view = view[os.write(descriptor, view[:_MAX_IO]) :]
                if self._fsync:
                    os.fsync(descriptor)
            yield path
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _opened_scratch(self, path: Path) -> Iterator[int]:
        descriptor = _create_file(path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _place(self, temporary: Path, target: Path, step: Callable[[Path, Path], None]) -> None:
        """Give ``temporary`` its name, making the directory for it as often as it is removed."""
        for _ in range(_PLACE_ATTEMPTS):
            try:
                return step(temporary, target)
            except FileNotFoundError:
                with contextlib.suppress(FileNotFoundError):
                    _make_parents(target)
            except (IsADirectoryError, NotADirectoryError):
                raise _nested(target) from None
        raise StoreError(f"{target} could not be written: its directory keeps disappearing")

    def _scan(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """Entries of ``folder`` ("" or ending in "/"); none where it does not exist."""
        try:
            with os.scandir(self._root / folder) as entries:
                yield from (entry for entry in entries if entry.name != _SCRATCH)
        except (FileNotFoundError, NotADirectoryError):
            return

    def _walk(self, folder: str, start: str) -> Iterator[ObjectInfo]:
        """Objects below ``folder`` whose first segment there starts with ``start``."""
        for entry in self._scan(folder):
            if not entry.name.startswith(start):
                continue
            key = folder + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(f"{key}/", "")
                continue
            with contextlib.suppress(FileNotFoundError):  # deleted since the scan
                status = entry.stat()
                if stat.S_ISREG(status.st_mode):
                    yield ObjectInfo(key, status.st_size, status.st_mtime)

    def _prune(self, folder: Path) -> None:
        """Remove ``folder`` and the directories above it, up to the top, that are empty."""
        while folder != self._top:
            try:
                _remove_empty(folder)
            except FileNotFoundError:
                pass  # a concurrent delete was faster; go on upwards
            except OSError:
                return
            folder = folder.parent


def _create_file(path: Path) -> int:
    """Open a new file for writing, making its directory as often as it is removed."""
    for _ in range(_PLACE_ATTEMPTS):
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileNotFoundError:  # cleaned up by hand, or by whoever emptied the store
            with contextlib.suppress(FileNotFoundError):
                path.parent.mkdir(parents=True, exist_ok=True)
    raise StoreError(f"{path} could not be written: its directory keeps disappearing")


def _remove_empty(folder: Path) -> None:
    """Remove a directory that holds nothing, or the unused scratch folder of a store opened there.

    Raises:
        OSError: it holds something else.
    """
    with contextlib.suppress(FileNotFoundError):
        if os.listdir(folder) == [_SCRATCH]:
            (folder / _SCRATCH).rmdir()
    folder.rmdir()


def _link(source: Path, target: Path) -> None:
    """``os.link`` with an answer that can be trusted over NFS and a plain one where there is none.

    An NFS client may repeat a request whose reply was lost, and meet its own link: the number of
    links tells.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        if os.stat(source).st_nlink > 1:
            return
        if target.is_dir():
            raise _nested(target) from None
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise UnsupportedStoreError(
            f"the file system of {target.parent} has no hard links, so it cannot create "
            "an object exactly once",
            fix="Use a directory on a local disk or on NFS, or an object store such as s3://.",
        ) from error


def _make_parents(target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except NotADirectoryError:
        raise _nested(target) from None
    except FileExistsError:
        # Also what mkdir says when the directory existed and went before it looked again.
        if any(parent.is_file() for parent in target.parents):
            raise _nested(target) from None


def _nested(target: Path) -> StoreError:
    return StoreError(
        f"{target} cannot be written: in a directory store one key cannot be the prefix of another"
    )


def _check_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotFoundError(f"{path} does not exist")


def _sweep(folder: Path, *, older_than: float) -> None:
    """Remove temporary files that a killed writer left."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.stat().st_mtime < older_than:
                    os.unlink(entry.path)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise store_error(error, str(path)) from error
