"""The faulty store: each request meets the weather, then the real driver, then its reply does."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn, TypeAlias

from diloco_cloud.errors import (
    ExpiredCredentialsError,
    StoreError,
    ThrottledError,
    UnreachableError,
)
from diloco_cloud.store.base import Data, ObjectInfo, ObjectStore, buffers, check_key
from diloco_cloud.store.faults.settings import Faults
from diloco_cloud.store.faults.weather import Dice, Weather
from diloco_cloud.store.uris import FAULTS_SCHEME

_Write: TypeAlias = Callable[[str, Data], None]


class FaultyStore:
    """An :class:`~diloco_cloud.store.ObjectStore` around a driver, with faults put in.

    It belongs between a driver and a :class:`~diloco_cloud.store.RetryingStore`. Children share
    its dice, counters, clock and partition.

    Args:
        inner: a driver, which does not retry (:func:`~diloco_cloud.store.open_driver`).
        faults: which, and how often.
        rank: whose weather it is; by default that of this process, from its environment.
        attempt: which life of the rank, likewise.
        clock: seconds since the epoch; the windows of ``faults`` begin now.
        sleep: waits so many seconds, for latency.
    """

    def __init__(
        self,
        inner: ObjectStore,
        faults: Faults,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner = inner
        self._weather = Weather(faults, rank=rank, attempt=attempt, clock=clock, sleep=sleep)
        #: Of a child, below the store whose dice it throws.
        self._prefix = ""

    def __repr__(self) -> str:
        return f"FaultyStore({self._inner!r}, {self.faults!r})"

    @property
    def faults(self) -> Faults:
        """What may happen."""
        return self._weather.faults

    @property
    def injected(self) -> Counter[str]:
        """How often each fault struck so far, by its name in :class:`Faults`; and "partition"."""
        return self._weather.injected

    def partition(self) -> None:
        """From now on nothing can be reached, from here or through a child."""
        self._weather.partition()

    def heal(self) -> None:
        """Undo :meth:`partition`; windows and the file of the settings stay in force."""
        self._weather.heal()

    @property
    def uri(self) -> str:
        query = self.faults.query()
        return f"{FAULTS_SCHEME}{self._inner.uri}{'?' if query else ''}{query}"

    def create(self, key: str, data: Data) -> None:
        self._write("create", self._inner.create, key, data)

    def put(self, key: str, data: Data) -> None:
        self._write("put", self._inner.put, key, data)

    def get(self, key: str) -> bytes:
        self._request("get", check_key(key))
        return self._inner.get(key)

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        self._request("get_range", check_key(key))
        return self._inner.get_range(key, start, length)

    def head(self, key: str) -> ObjectInfo:
        self._request("head", check_key(key))
        return self._skewed(self._inner.head(key))

    def list_dirs(self, prefix: str = "") -> builtins.list[str]:
        dice = self._request("list_dirs", prefix)
        names = self._inner.list_dirs(prefix)
        if not self._lists_stale(dice):
            return names
        known = self._without_latest(self._inner.list(prefix))
        paths = (info.key[len(prefix) :].partition("/") for info in known)
        return sorted({name for name, slash, _ in paths if slash})

    def list(self, prefix: str = "") -> builtins.list[ObjectInfo]:
        dice = self._request("list", prefix)
        infos = self._inner.list(prefix)
        if self._lists_stale(dice):
            infos = self._without_latest(infos)
        return [self._skewed(info) for info in infos]

    def delete(self, key: str) -> None:
        dice = self._request("delete", check_key(key))
        with self._reply(dice, key):
            self._inner.delete(key)

    def delete_many(self, keys: Iterable[str]) -> None:
        every = tuple(keys)
        first = every[0] if every else ""
        dice = self._request("delete_many", first)
        with self._reply(dice, first):
            self._inner.delete_many(every)

    def child(self, path: str) -> FaultyStore:
        child = copy.copy(self)
        child._inner = self._inner.child(path)
        child._prefix = f"{self._prefix}{path.rstrip('/')}/"
        return child

    def _request(self, method: str, key: str) -> Dice:
        """The way of a request to the store.

        Raises:
            StoreError: it does not get there, or is refused unread.
        """
        weather, subject = self._weather, self._name(key)
        if weather.partitioned():
            weather.count("partition")
            raise UnreachableError(f"{subject} cannot be reached (injected partition)")
        dice = weather.dice(method, self._prefix + key)
        weather.wait(dice)
        weather.deliver_late()
        if weather.expired():
            weather.count("expired")
            raise _expired(subject)
        if weather.strikes("expired", dice):
            raise _expired(subject)
        if weather.strikes("throttled", dice):
            raise ThrottledError(f"{subject}: the store asks to slow down (injected)")
        if weather.strikes("timeout", dice):
            raise UnreachableError(f"{subject} cannot be reached (injected timeout)")
        return dice

    def _write(self, method: str, write: _Write, key: str, data: Data) -> None:
        dice = self._request(method, check_key(key))
        if self._weather.strikes("torn", dice):
            self._tear(dice, write, key, data)
        with self._reply(dice, key):
            write(key, data)
            if self._weather.strikes("duplicate", dice):
                self._send_again(dice, write, key, data)

    @contextmanager
    def _reply(self, dice: Dice, key: str) -> Iterator[None]:
        """The way back of what the store says to the request inside, be it good or bad."""
        lost = self._weather.strikes("lost_reply", dice)
        try:
            yield
        except StoreError:
            if not lost:
                raise
        if lost:
            raise UnreachableError(f"{self._name(key)} cannot be reached (injected: lost reply)")

    def _tear(self, dice: Dice, write: _Write, key: str, data: Data) -> NoReturn:
        """Cut an upload off.

        Raises:
            UnreachableError: always.
        """
        size = sum(view.nbytes for view in buffers(data))
        sent = int(size * dice.uniform("torn.at"))
        if self.faults.torn_visible:
            with suppress(StoreError):
                write(key, b"".join(buffers(data))[:sent])
        raise UnreachableError(
            f"{self._name(key)}: the upload was cut off after {sent} of {size} bytes (injected)"
        )

    def _send_again(self, dice: Dice, write: _Write, key: str, data: Data) -> None:
        """Write once more, now or just before the next request; nobody hears the answer."""
        if dice.uniform("duplicate.late") < 0.5:
            # The caller may use its buffers for something else once the call returns.
            kept = b"".join(buffers(data))
            self._weather.send_late(lambda: write(key, kept))
        else:
            with suppress(StoreError):
                write(key, data)

    def _lists_stale(self, dice: Dice) -> bool:
        return dice.uniform("stale_list") < self.faults.stale_list

    def _without_latest(self, infos: Sequence[ObjectInfo]) -> builtins.list[ObjectInfo]:
        """``infos`` as a listing tells them that lags behind; in the same order."""
        horizon = self._weather.clock() - self.faults.stale_s
        newest_first = sorted(infos, key=lambda info: info.last_modified, reverse=True)
        hidden = {info.key for info in newest_first[: self.faults.stale_n]}
        if self.faults.stale_s:
            hidden |= {info.key for info in infos if info.last_modified > horizon}
        if hidden:
            self._weather.count("stale_list")
        return [info for info in infos if info.key not in hidden]

    def _skewed(self, info: ObjectInfo) -> ObjectInfo:
        skew = self._weather.skew_s
        return dataclasses.replace(info, last_modified=info.last_modified + skew) if skew else info

    def _name(self, key: str) -> str:
        return f"{self._inner.uri}/{key}".rstrip("/")


def _expired(subject: str) -> ExpiredCredentialsError:
    return ExpiredCredentialsError(f"the credentials for {subject} have expired (injected)")
