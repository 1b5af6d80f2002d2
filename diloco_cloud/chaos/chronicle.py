"""Every decision of a run, written down while it goes on: old rounds are deleted before its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from diloco_cloud import keys
from diloco_cloud.errors import DilocoError, NotFoundError
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

#: Seconds between two looks at the rounds.
_LOOK_S: Final = 0.05


@dataclass(frozen=True)
class Entry:
    """A decision.

    Attributes:
        commit: what was decided.
        time: when, by the store's clock.
    """

    commit: Commit
    time: float


@dataclass
class Chronicle:
    """Follows a run's decisions in a thread of its own; a context manager.

    Attributes:
        store: the run's prefix, without any faults.
        entries: by round.
        changed: rounds whose decision was another one later, which must never be.
        failure: what ended the thread before its time.
    """

    store: ObjectStore
    entries: dict[int, Entry] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    failure: Exception | None = None
    _bytes: dict[str, bytes] = field(default_factory=dict, init=False)
    _news: threading.Condition = field(default_factory=threading.Condition, init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> Chronicle:
        self._thread = threading.Thread(target=self._follow, name="chronicle", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def in_order(self) -> list[Entry]:
        """The decisions so far, oldest first."""
        return [self.entries[round_] for round_ in sorted(self.entries.copy())]

    @property
    def last(self) -> int:
        """The newest round that was decided; -1 before the first."""
        return max(self.entries.copy(), default=-1)

    def await_(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``condition``, which is about the entries, holds; whether it does."""
        with self._news:
            return self._news.wait_for(lambda: condition() or self.failure, timeout_s) is True

    def is_back(self, rank: int, attempt: int) -> bool:
        """Whether a life of this rank after ``attempt`` has got into a committed round."""
        return any(
            one.rank == rank and one.attempt > attempt
            for entry in self.in_order()
            for one in entry.commit.contributors
        )

    def look(self) -> None:
        """Write down what has been decided since the last look."""
        for name in self.store.list_dirs(keys.ROUNDS):
            key = f"{keys.ROUNDS}{name}/commit"
            try:
                data = self.store.get(key)
                if self._bytes.get(key) == data:
                    continue
                time = self.store.head(key).last_modified
            except NotFoundError:  # not decided yet, or deleted since
                continue
            commit = Commit.decode(data)
            if commit.round in self.entries:
                self.changed.add(commit.round)
            else:
                self.entries[commit.round] = Entry(commit, time)
            self._bytes[key] = data
            with self._news:
                self._news.notify_all()

    def _follow(self) -> None:
        try:
            while not self._over.wait(_LOOK_S):
                self.look()
            self.look()
        except DilocoError as error:
            logger.exception("the run's decisions can be followed no longer")
            self.failure = error
            with self._news:
                self._news.notify_all()
