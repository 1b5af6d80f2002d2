"""Agreeing on a round through nothing but create-once.

Every replica watches the round's directory (one LIST a look). Whoever first sees everybody there
computes the decision and tries to create ``commit``; the store lets exactly one succeed, and the
rest read what it wrote.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from diloco_cloud import keys
from diloco_cloud.errors import (
    AlreadyExistsError,
    CorruptContributionError,
    ExchangeError,
    NotFoundError,
    RoundTimeoutError,
)
from diloco_cloud.exchange.commit import Commit, decide
from diloco_cloud.exchange.contribution import Header, decode, digest, encoded_size, header_size
from diloco_cloud.store.base import ObjectInfo, ObjectStore

#: Requests under way at once, per replica.
PARALLEL_READS = 8
#: What a header may make a reader allocate, whatever it says of itself.
_LONGEST_HEADER = 64 * 2**20


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


@dataclass(frozen=True)
class _Arrival:
    """What a rank's newest life has put into a round."""

    rank: int
    attempt: int
    info: ObjectInfo
    leaving: bool


@dataclass
class Agreement:
    """One replica's view of one round's decision.

    Attributes:
        expected: ranks whose contribution, or leave, the decision waits for.
        finished: ranks that left in an earlier round.
        own: this replica's header, and its digest; spares reading it back.
        timeout_s: how long to wait for ranks that have begun; the watch bounds all waiting.
        begun: whether all of these ranks are known to have begun.
        waiting_for: called with the ranks that are missing, whenever that changes.
    """

    store: ObjectStore
    run: str
    round: int
    fragment: int
    expected: Sequence[int]
    finished: Sequence[int]
    own: tuple[Header, str]
    timeout_s: float = math.inf
    reduction: str = "auto"
    weighting: str = "tokens"
    begun: Callable[[list[int]], bool] = lambda _ranks: False
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
            # Who has begun is waited for as in any round; who has not may be queueing somewhere.
            if watch.expired or (watch.waited_s >= self.timeout_s and self.begun(absent)):
                raise self._timeout(absent, watch)
            watch.pause()

    def _read(self) -> Commit:
        commit = Commit.decode(self.store.get(keys.commit(self.round, self.fragment)))
        if (commit.run, commit.round, commit.fragment) != (self.run, self.round, self.fragment):
            raise CorruptContributionError(
                f"the commit of round {self.round} belongs to another run or round"
            )
        return commit

    def _arrived(self, listed: Sequence[ObjectInfo]) -> dict[int, _Arrival]:
        """By rank, what its newest life has put here (keys come in order of attempt)."""
        directory = keys.directory(self.round, self.fragment)
        found: dict[int, _Arrival] = {}
        for info in listed:
            part = keys.parse_part(info.key, directory)
            if part is None or part[1] not in self.expected:
                continue
            kind, rank, attempt = part
            if rank not in found or found[rank].attempt <= attempt:
                found[rank] = _Arrival(rank, attempt, info, leaving=kind == "leave")
        return found

    def _create(self, arrived: Mapping[int, _Arrival]) -> Commit:
        headers: dict[int, tuple[Header, str]] = {}
        corrupt: dict[int, tuple[int, str]] = {}
        here = [arrival for arrival in arrived.values() if not arrival.leaving]
        with ThreadPoolExecutor(PARALLEL_READS, "diloco-headers") as pool:
            for arrival, header in zip(here, pool.map(self._header, here), strict=True):
                if isinstance(header, CorruptContributionError):
                    corrupt[arrival.rank] = (arrival.attempt, header.message)
                else:
                    headers[arrival.rank] = header
        commit = decide(
            headers,
            run=self.run,
            round_=self.round,
            fragment=self.fragment,
            finished=self.finished,
            leaving=[rank for rank, arrival in arrived.items() if arrival.leaving],
            corrupt=corrupt,
            reduction=self.reduction,
            weighting=self.weighting,
        )
        try:
            self.store.create(keys.commit(self.round, self.fragment), commit.encode())
        except AlreadyExistsError:
            return self._read()
        return commit

    def _header(self, arrival: _Arrival) -> tuple[Header, str] | CorruptContributionError:
        """An arrival's header and digest, or why it cannot be used."""
        if (arrival.rank, arrival.attempt) == (self.own[0].rank, self.own[0].attempt):
            return self.own
        key = arrival.info.key
        try:
            header, name = read_header(
                self.store, arrival.info, self.own[0].nbytes, self.own[0].chunk_bytes
            )
        except CorruptContributionError as error:
            return error
        except NotFoundError:
            return CorruptContributionError(f"{key}: gone while it was read")
        place = (header.run, header.round, header.fragment, header.rank, header.attempt)
        if place != (self.run, self.round, self.fragment, arrival.rank, arrival.attempt):
            return CorruptContributionError(f"{key}: written for another run, round or rank")
        self.headers[name] = header
        return header, name

    def _timeout(self, absent: list[int], watch: Watch) -> RoundTimeoutError:
        ranks = ", ".join(map(str, absent))
        return RoundTimeoutError(
            f"round {self.round}: replica {ranks} did not contribute within {watch.waited_s:.0f} s",
            fix="See why with `diloco-cloud status`; `resume` restarts what has stopped.",
        )


def read_header(
    store: ObjectStore, info: ObjectInfo, nbytes: int, chunk_bytes: int
) -> tuple[Header, str]:
    """Header of a round's object, and its digest.

    One read where the payload is ``nbytes`` long in chunks of ``chunk_bytes``, as is usual.

    Raises:
        CorruptContributionError: not a contribution, or not as long as it says.
        NotFoundError: gone since ``info`` was listed.
    """

    def read(size: int) -> bytes:
        if size > min(info.size, _LONGEST_HEADER):
            raise CorruptContributionError(f"{info.key}: {info.size} bytes are no contribution")
        return bytes(store.get_range(info.key, 0, size))

    data = read(min(info.size, header_size(nbytes, chunk_bytes)))
    if encoded_size(data) > len(data):
        data = read(encoded_size(data))
    header = decode(data, info.key)
    if header.size > len(data):
        data = read(header.size)
    if info.size != header.size + header.nbytes:
        raise CorruptContributionError(f"{info.key}: truncated, or longer than it says")
    return header, digest(data[: header.size])
