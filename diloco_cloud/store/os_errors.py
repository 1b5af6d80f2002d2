"""What the operating system says about files, in this package's errors."""

from __future__ import annotations

import errno
import socket
from typing import Final

from diloco_cloud.errors import (
    AlreadyExistsError,
    DeniedError,
    NotFoundError,
    StoreError,
    UnreachableError,
)

_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
#: A network filesystem that lost its server, or an interrupted or timed-out call.
_TRANSIENT: Final = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN, errno.ENOTCONN}
)


def store_error(error: OSError, subject: str) -> StoreError:
    """The ``StoreError`` that says what ``error`` means for ``subject`` (a path or a URI)."""
    if isinstance(error, StoreError):
        return error
    code, text = error.errno, error.strerror or type(error).__name__
    if isinstance(error, FileExistsError):
        return AlreadyExistsError(f"{subject} already exists")
    # ENOTDIR: a segment of the key is itself an object, so no object can be below it.
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
        return NotFoundError(f"{subject} does not exist")
    if isinstance(error, PermissionError) or code in _DENIED:
        fix = (
            "The file system is mounted read-only; choose another store."
            if code == errno.EROFS
            else "Give this user read and write permission there, or choose another store."
        )
        return DeniedError(f"no access to {subject}: {text}", fix=fix)
    if code in _FULL:
        return StoreError(
            f"no space left for {subject}: {text}", fix="Free space, or choose another store."
        )
    lost = (ConnectionError, TimeoutError, socket.gaierror)
    if isinstance(error, lost) or code in _TRANSIENT:
        return UnreachableError(f"{subject} cannot be reached: {text}")
    return StoreError(f"{subject}: {text}")
