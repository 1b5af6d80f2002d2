"""Retries, in the one place where they happen.

The drivers' clients do not retry by themselves: they cannot tell a lost reply from a lost request,
and a ``create`` that is repeated after a lost reply meets its own object.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from diloco_cloud.errors import (
    AlreadyExistsError,
    ExpiredCredentialsError,
    NotFoundError,
    StoreError,
    ThrottledError,
    UnreachableError,
)
from diloco_cloud.store.base import Data, ObjectInfo, ObjectStore, buffers

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Read back and compared at once, in bytes.
_COMPARE_CHUNK: Final = 16 << 20
#: The operating system's generator: the training's seeds stay untouched, and forks differ.
_RANDOM: Final = random.SystemRandom()


@dataclass(frozen=True)
class RetryPolicy:
    """Bounded exponential back-off with full jitter.

    The n-th wait is uniform between 0 and ``min(cap_s, base_s * 2**n)`` seconds.

    Attributes:
        attempts: at most this many, the first included.
        base_s: upper bound of the first wait.
        cap_s: upper bound of any wait.
        deadline_s: no new attempt starts later than this after the first one started.
        jitter: a number drawn between its two arguments.
        sleep: waits so many seconds.
        clock: seconds, monotonic.
    """

    attempts: int = 8
    base_s: float = 0.25
    cap_s: float = 15.0
    deadline_s: float = 120.0
    jitter: Callable[[float, float], float] = _RANDOM.uniform
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; at least 1")

    def call(self, operation: Callable[[], T]) -> T:
        """The result of ``operation``, repeated while the store is throttled or unreachable.

        Expired credentials too: a driver fetches new ones for the next attempt, and whoever
        renews them may be a moment late.

        Raises:
            StoreError: the last one, when attempts or time have run out; any other at once.
        """
        started = self.clock()
        for attempt in range(self.attempts):
            try:
                return operation()
            except (ThrottledError, UnreachableError, ExpiredCredentialsError) as error:
                wait = self.jitter(0.0, min(self.cap_s, self.base_s * 2**attempt))
                elapsed = self.clock() - started
                if attempt + 1 == self.attempts or elapsed + wait > self.deadline_s:
                    raise _exhausted(error, attempt + 1, elapsed) from error
                logger.warning(
                    "%s; retrying in %.1f s (attempt %d of %d)",
                    error.message.split("\n")[0],
                    wait,
                    attempt + 2,
                    self.attempts,
                )
                self.sleep(wait)
        raise AssertionError("unreachable: the last attempt returns or raises")


def _exhausted(error: StoreError, attempts: int, elapsed: float) -> StoreError:
    if attempts == 1:
        return error
    return type(error)(
        f"{error.message} (gave up after {attempts} attempts in {elapsed:.0f} s)", fix=error.fix
    )


class RetryingStore:
    """An :class:`~diloco_cloud.store.ObjectStore` that repeats what may be repeated.

    Every operation is idempotent. ``create`` needs care: when an attempt was cut off, its object
    may be there all the same, so a later "already exists" is compared with what was to be written,
    and is a success if it is the same. Writers of one key who must know which of them won
    therefore write different bytes (their rank, or a nonce).

    Args:
        inner: the driver; it does not retry.
        policy: how often and how long.
    """

    def __init__(self, inner: ObjectStore, policy: RetryPolicy | None = None) -> None:
        self._inner = inner
        self._policy = policy or RetryPolicy()

    def __repr__(self) -> str:
        return f"RetryingStore({self._inner!r})"

    @property
    def uri(self) -> str:
        return self._inner.uri

    def create(self, key: str, data: Data) -> None:
        cut_off = False

        def attempt() -> None:
            nonlocal cut_off
            try:
                self._inner.create(key, data)
            except UnreachableError:
                cut_off = True
                raise

        try:
            self._policy.call(attempt)
        except AlreadyExistsError:
            if not (cut_off and self._holds(key, data)):
                raise

    def put(self, key: str, data: Data) -> None:
        self._policy.call(lambda: self._inner.put(key, data))

    def get(self, key: str) -> bytes:
        return self._policy.call(lambda: self._inner.get(key))

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        return self._policy.call(lambda: self._inner.get_range(key, start, length))

    def head(self, key: str) -> ObjectInfo:
        return self._policy.call(lambda: self._inner.head(key))

    def list_dirs(self, prefix: str = "") -> list[str]:
        return self._policy.call(lambda: self._inner.list_dirs(prefix))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        return self._policy.call(lambda: self._inner.list(prefix))

    def delete(self, key: str) -> None:
        self._policy.call(lambda: self._inner.delete(key))

    def delete_many(self, keys: Iterable[str]) -> None:
        every = tuple(keys)
        self._policy.call(lambda: self._inner.delete_many(every))

    def child(self, path: str) -> RetryingStore:
        return RetryingStore(self._inner.child(path), self._policy)

    def _holds(self, key: str, data: Data) -> bool:
        """Whether ``key`` holds exactly ``data``.

        Each read is retried by itself: a large object takes many, and in bad weather hardly ever
        would all succeed in a row.
        """
        views = buffers(data)
        try:
            if self.head(key).size != sum(view.nbytes for view in views):
                return False
            offset = 0
            for view in views:
                for start in range(0, view.nbytes, _COMPARE_CHUNK):
                    piece = view[start : start + _COMPARE_CHUNK]
                    if self.get_range(key, offset, piece.nbytes) != piece:
                        return False
                    offset += piece.nbytes
        except NotFoundError:  # deleted since: it existed, and it was not ours to keep
            return False
        return True
