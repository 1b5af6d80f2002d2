"""Folders that cost much to make: made once on a machine, by whichever process comes first."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

logger = logging.getLogger(__name__)

_PARTIAL = ".partial"


def folder_once(parent: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """``parent/name``, made by ``fill`` unless it is there.

    Others never see it half made: it is filled under another name, and renamed. A process that is
    killed in the midst leaves rubbish, which the next one clears away.

    Args:
        parent: made if need be.
        name: which says all that the content depends on.
        fill: writes into an empty folder; it may be called in several processes, one by one.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = parent / name
    if folder.exists():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with _alone(parent / f"{name}.lock") as is_alone:
        if folder.exists():  # made while this process waited
            return folder
        if is_alone:
            for rubbish in parent.glob(f"{name}.*{_PARTIAL}"):
                shutil.rmtree(rubbish, ignore_errors=True)
        partial = parent / f"{name}.{uuid4().hex}{_PARTIAL}"
        partial.mkdir()
        try:
            fill(partial)
            partial.rename(folder)
        except OSError:
            if not folder.exists():  # Else another was first, where there are no locks.
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Hold a lock, which ends with the process at the latest; False where there are no locks."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("%s cannot be locked (%s): work may be done twice", path, error)
            yield False
            return
        yield True
