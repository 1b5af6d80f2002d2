"""What a replica's link to the store can carry, as its own transfers show it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final

#: What anybody may claim of a link: from 10 kB/s to 100 GB/s, and up to 10 s to an answer.
_SLOWEST: Final = 10_000
_FASTEST: Final = 100_000_000_000
_LONGEST_US: Final = 10_000_000
#: Requests smaller than this say how long an answer takes, larger ones how much the link carries.
SMALL_BYTES: Final = 64 * 1024


@dataclass(frozen=True, order=True)
class Link:
    """Rates and latency; whole numbers, so that everybody computes with the same ones.

    Attributes:
        up, down: bytes per second, both at once.
        latency_us: microseconds from a small request to its answer.
    """

    up: int
    down: int
    latency_us: int

    @property
    def latency(self) -> float:
        """Seconds from a small request to its answer."""
        return self.latency_us / 1_000_000

    @classmethod
    def of(cls, up: float, down: float, latency: float) -> Link:
        """The nearest link that may be claimed.

        Args:
            up: bytes per second.
            down: bytes per second.
            latency: seconds.
        """
        return cls(
            _within(up, _SLOWEST, _FASTEST),
            _within(down, _SLOWEST, _FASTEST),
            _within(latency * 1_000_000, 0, _LONGEST_US),
        )

    @classmethod
    def claimed(cls, up: float, down: float, latency: float) -> Link | None:
        """The link that a header tells of, by the same units; None if it tells of none."""
        return cls.of(up, down, latency) if up > 0 and down > 0 else None


def _within(value: float, lowest: int, highest: int) -> int:
    return round(min(max(value, lowest), highest))


#: Of a replica that has measured nothing yet: what LambdaML (SIGMOD 2021) found between a small
#: serverless function and S3. Cautious, and used for one round.
UNKNOWN: Final = Link.of(65e6, 65e6, 0.08)


@dataclass
class Span:
    """Work of one kind: bytes moved, and seconds in which any of it was under way."""

    nbytes: float = 0.0
    busy_s: float = 0.0
    active: int = 0
    since: float = 0.0

    def begin(self, now: float) -> None:
        """Note that a piece of it begins."""
        if self.active == 0:
            self.since = now
        self.active += 1

    def end(self, now: float, nbytes: int, latency: float) -> None:
        """Note that a piece of it ends.

        Args:
            now: seconds.
            nbytes: that it moved.
            latency: seconds at the start of a span in which nothing moves.
        """
        self.nbytes += nbytes
        self.active -= 1
        if self.active == 0:
            # Nothing moves until the first request of the span is answered. Counting that would
            # charge the latency twice, here and where a plan is costed. A span that is over before
            # the shortest answer so far came shows that none of those told the latency.
            elapsed = now - self.since
            self.busy_s += elapsed - latency if elapsed > latency else elapsed

    def rate(self) -> float | None:
        """Bytes per second; None where nothing was measured."""
        return self.nbytes / self.busy_s if self.busy_s > 0 and self.nbytes > 0 else None

    def fade(self, kept: float) -> None:
        """Let what was measured so far count for less."""
        self.nbytes *= kept
        self.busy_s *= kept


@dataclass
class Overlap:
    """Learns how far receiving and averaging go on at the same time. Any thread may report.

    They do where one waits for the link while the other has a processor; not where both want the
    same processor, as they do with a store in a directory, or many replicas on a machine.

    Attributes:
        now: seconds, monotonic.
    """

    now: Callable[[], float] = time.monotonic
    _receiving: Span = field(default_factory=Span, init=False)
    _averaging: Span = field(default_factory=Span, init=False)
    _either: Span = field(default_factory=Span, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Around a read."""
        with self._during(self._receiving):
            yield

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Around the checking and averaging of what was read."""
        with self._during(self._averaging):
            yield

    def fade(self, kept: float) -> None:
        """Let what was measured so far count for less."""
        with self._lock:
            for span in (self._receiving, self._averaging, self._either):
                span.fade(kept)

    @property
    def apart(self) -> float:
        """The part of the shorter of both in which the other stood still; 0 if nothing is known."""
        with self._lock:
            one, other = self._receiving.busy_s, self._averaging.busy_s
            either = self._either.busy_s
        if min(one, other) <= 0:
            return 0.0
        return min(max(1 - (one + other - either) / min(one, other), 0.0), 1.0)

    @contextmanager
    def _during(self, span: Span) -> Iterator[None]:
        with self._lock:
            now = self.now()
            span.begin(now)
            self._either.begin(now)
        try:
            yield
        finally:
            with self._lock:
                now = self.now()
                span.end(now, 0, 0.0)
                self._either.end(now, 0, 0.0)


@dataclass
class LinkMeter:
    """Learns a link from the transfers of an exchange, which overlap. Any thread may report.

    The rate is bytes over the time in which at least one transfer was under way (the union of
    their intervals): the waits between rounds, and for a peer's chunk, say nothing of the link.
    Older rounds count for less and less, and each by how much it moved. The latency is the shortest
    of this round and the one before: all others have queued behind the replica's own transfers.

    Attributes:
        now: seconds, monotonic.
        kept: what part of the older rounds' weight is left after another round.
        overlap: with averaging.
    """

    now: Callable[[], float] = time.monotonic
    kept: float = 0.5
    overlap: Overlap = field(init=False)
    _up: Span = field(default_factory=Span, init=False)
    _down: Span = field(default_factory=Span, init=False)
    _latency: float = field(default=math.inf, init=False)
    _latency_before: float = field(default=math.inf, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self.overlap = Overlap(self.now)

    @contextmanager
    def sending(self, nbytes: int) -> Iterator[None]:
        """Around a write; what raises counts as time in which nothing was moved."""
        with self._transfer(self._up, nbytes):
            yield

    @contextmanager
    def receiving(self, nbytes: int) -> Iterator[None]:
        """Around a read of so many bytes; 0: a question, such as what there is by now."""
        # Questions are asked while there is nothing to receive, and so nothing to average.
        overlap = self.overlap.receiving() if nbytes >= SMALL_BYTES else nullcontext()
        with overlap, self._transfer(self._down, nbytes):
            yield

    def answered(self, seconds: float) -> None:
        """Note how long a small request took: a HEAD, a listing, a write of a few bytes."""
        with self._lock:
            self._latency = min(self._latency, seconds)

    def end_round(self) -> None:
        """Let what was measured so far count for less."""
        self.overlap.fade(self.kept)
        with self._lock:
            self._up.fade(self.kept)
            self._down.fade(self.kept)
            if self._latency < math.inf:
                self._latency_before, self._latency = self._latency, math.inf

    @property
    def link(self) -> Link | None:
        """The estimate; None until both directions and an answer have been seen."""
        with self._lock:
            up, down, latency = self._up.rate(), self._down.rate(), self._shortest
        if up is None or down is None or latency == math.inf:
            return None
        return Link.of(up, down, latency)

    @property
    def _shortest(self) -> float:
        return min(self._latency, self._latency_before)

    @contextmanager
    def _transfer(self, way: Span, nbytes: int) -> Iterator[None]:
        if nbytes < SMALL_BYTES:
            asked = self.now()
            yield
            self.answered(self.now() - asked)
            return
        with self._lock:
            way.begin(self.now())
        moved = 0
        try:
            yield
            moved = nbytes
        finally:
            with self._lock:
                latency = self._shortest
                way.end(self.now(), moved, latency if latency < math.inf else 0.0)
