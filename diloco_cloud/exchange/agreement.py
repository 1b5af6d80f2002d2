"""Agreeing on a round through nothing but create-once.

Every replica watches the round's directory (one LIST a look). Whoever first sees everybody there
computes the decision and tries to create ``commit``; the store lets exactly one succeed, and the
rest read what it wrote.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diloco_cloud.errors import (
    AlreadyExistsError,
    CorruptContributionError,
    ExchangeError,
    NotFoundError,
    RoundTimeoutError,
)
from diloco_cloud.exchange import keys
from diloco_cloud.exchange.commit import Commit, decide
from diloco_cloud.exchange.contribution import Header, decode, digest, encoded_size, header_size
from diloco_cloud.store.base import ObjectInfo, ObjectStore


@dataclass(frozen=True)
class Clock:
    """Time as the exchange sees it; tests pass their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass
class Watch:
    """Paces the looks at a directory: a tenth of what has been waited, within bounds.

    A look is a billed request. Growing with the wait keeps the delay it adds under 10 % and the
    number of looks logarithmic in the wait until ``longest_s`` is reached. ``stopped`` lets
    another thread end the wait.
    """

    clock: Clock
    timeout_s: float
    longest_s: float
    shortest_s: float = 0.01
    stopped: Callable[[], bool] = lambda: False
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock.now()

    @property
    def waited_s(self) -> float:
        return self.clock.now() - self.started

    @property
    def expired(self) -> bool:
        return self.waited_s >= self.timeout_s

    def pause(self) -> None:
        longest = min(self.longest_s, max(self.timeout_s - self.waited_s, 0.0))
        self.clock.sleep(min(max(self.waited_s / 10, self.shortest_s), longest))
        if self.stopped():
            raise ExchangeError("the wait for other replicas was given up")


@dataclass
class Agreement:
    """One replica's view of one round's decision.

    Attributes:
        expected: ranks whose contribution, or leave, the decision waits for.
        finished: ranks that left in an earlier round.
        own: this replica's header, and its digest; spares reading it back.
        waiting_for: called with the ranks that are missing, whenever that changes.
    """

    store: ObjectStore
    run: str
    round: int
    fragment: int
    expected: Sequence[int]
    finished: Sequence[int]
    own: tuple[Header, str]
    reduction: str = "auto"
    weighting: str = "tokens"
    waiting_for: Callable[[list[int]], None] = lambda _missing: None
    #: By digest, the peers' headers this replica has read.
    headers: dict[str, Header] = field(default_factory=dict)

    def reach(self, watch: Watch) -> Commit:
        """Wait for the decision, and make it if nobody has.

        Raises:
            RoundTimeoutError: some of ``expected`` did not come within the watch's time.
        """
        missing: list[int] | None = None
        while True:
            listed = self.store.list(keys.directory(self.round, self.fragment))
            if any(info.key == keys.commit(self.round, self.fragment) for info in listed):
                return self._read()
            arrived = self._arrived(listed)
            absent = [rank for rank in self.expected if rank not in arrived]
            if not absent:
                return self._create(arrived)
            if absent != missing:
                missing = absent
                self.waiting_for(absent)
            if watch.expired:
                raise self._timeout(absent, watch)
            watch.pause()

    def _read(self) -> Commit:
        commit = Commit.decode(self.store.get(keys.commit(self.round, self.fragment)))
        if (commit.run, commit.round, commit.fragment) != (self.run, self.round, self.fragment):
            raise CorruptContributionError(
                f"the commit of round {self.round} belongs to another run or round"
            )
        return commit

    def _arrived(self, listed: Sequence[ObjectInfo]) -> dict[int, ObjectInfo]:
        """By rank, the newest attempt's contribution (keys come in order of attempt)."""
        found: dict[int, ObjectInfo] = {}
        for info in listed:
            place = keys.parse_put(info.key)
            if place is not None and place[0] in self.expected:
                found[place[0]] = info
        return found

    def _create(self, arrived: dict[int, ObjectInfo]) -> Commit:
        headers: dict[int, tuple[Header, str]] = {}
        corrupt: dict[int, tuple[int, str]] = {}
        for rank, info in arrived.items():
            _, attempt = keys.parse_put(info.key) or (rank, 0)
            try:
                headers[rank] = self._header(info, rank, attempt)
            except CorruptContributionError as error:
                corrupt[rank] = (attempt, error.message)
        commit = decide(
            headers,
            run=self.run,
            round_=self.round,
            fragment=self.fragment,
            finished=self.finished,
            corrupt=corrupt,
            reduction=self.reduction,
            weighting=self.weighting,
        )
        try:
            self.store.create(keys.commit(self.round, self.fragment), commit.encode())
        except AlreadyExistsError:
            return self._read()
        return commit

    def _header(self, info: ObjectInfo, rank: int, attempt: int) -> tuple[Header, str]:
        if (rank, attempt) == (self.own[0].rank, self.own[0].attempt):
            return self.own
        header, name = read_header(self.store, info, self.own[0].nbytes, self.own[0].chunk_bytes)
        place = (header.run, header.round, header.fragment, header.rank, header.attempt)
        if place != (self.run, self.round, self.fragment, rank, attempt):
            raise CorruptContributionError(f"{info.key}: written for another run, round or rank")
        self.headers[name] = header
        return header, name

    def _timeout(self, absent: list[int], watch: Watch) -> RoundTimeoutError:
        ranks = ", ".join(map(str, absent))
        return RoundTimeoutError(
            f"round {self.round}: replica {ranks} did not contribute within {watch.timeout_s:g} s",
            fix="See why with `diloco-cloud status`; `resume` restarts what has stopped.",
        )


def read_header(
    store: ObjectStore, info: ObjectInfo, nbytes: int, chunk_bytes: int
) -> tuple[Header, str]:
    """Header of a round's object, and its digest.

    One read where the payload is ``nbytes`` long in chunks of ``chunk_bytes``, as is usual.

    Raises:
        CorruptContributionError: not a contribution, or not as long as it says.
    """

    def read(size: int) -> bytes:
        if size > info.size:
            raise CorruptContributionError(f"{info.key}: {info.size} bytes are no contribution")
        try:
            return bytes(store.get_range(info.key, 0, size))
        except NotFoundError:
            raise CorruptContributionError(f"{info.key}: gone while it was read") from None

    data = read(min(info.size, header_size(nbytes, chunk_bytes)))
    if encoded_size(data) > len(data):
        data = read(encoded_size(data))
    header = decode(data, info.key)
    if header.size > len(data):
        data = read(header.size)
    if info.size != header.size + header.nbytes:
        raise CorruptContributionError(f"{info.key}: truncated, or longer than it says")
    return header, digest(data[: header.size])
