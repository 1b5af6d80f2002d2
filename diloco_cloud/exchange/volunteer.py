"""A volunteer: averages the chunks of whatever round is open, and owns nothing.

It needs no accelerator and no model, only a fast way to the bucket. With volunteers a replica moves
S up and S down, whatever the number of replicas. Nothing depends on one: what volunteers do not
deliver, replicas average themselves.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from diloco_cloud import keys
from diloco_cloud.errors import (
    CorruptContributionError,
    DilocoError,
    ExchangeError,
    NotFoundError,
)
from diloco_cloud.exchange import wire
from diloco_cloud.exchange.agreement import read_commit
from diloco_cloud.exchange.buffers import ChunkedBytes
from diloco_cloud.exchange.commit import Commit, Contributor
from diloco_cloud.exchange.contribution import Header, header_size
from diloco_cloud.exchange.gathering import Gathering
from diloco_cloud.exchange.layout import TensorLayout
from diloco_cloud.exchange.means import ChunkMeans
from diloco_cloud.exchange.payloads import PARALLEL_READS, Payloads, read_header
from diloco_cloud.exchange.signing import UNSIGNED, Signer
from diloco_cloud.exchange.sums import NoMeanError, Sums
from diloco_cloud.exchange.watch import Clock, Watch
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

#: Seconds between two looks at whether a round went another way than expected.
_DOUBT_S = 2.0


def encode_outline(commit: Commit, layout: TensorLayout) -> bytes:
    """What a volunteer has to know: the expected decision, and the tensors' shapes."""
    return f'{{"commit":{commit.encode().decode()},"layout":{layout.to_json()}}}'.encode()


def decode_outline(data: bytes, key: str) -> tuple[Commit, TensorLayout]:
    """Read an outline, trusting nothing.

    Raises:
        CorruptContributionError: it is none, or its parts contradict one another.
    """
    found = wire.parse(data, key, lambda value: (value["commit"], value["layout"]))
    layout = wire.parse(json.dumps(found[1]), key, TensorLayout.from_rows)
    commit = Commit.decode(json.dumps(found[0], separators=(",", ":")).encode())
    if commit.layout != layout.digest or commit.nbytes != layout.nbytes:
        raise CorruptContributionError(f"{key}: other tensors than its commit's")
    if commit.decision != "commit" or commit.plan != "sharded":
        raise CorruptContributionError(f"{key}: nothing to be averaged by volunteers")
    return commit, layout


class _Volunteering(Gathering):
    """Averages a shard's chunks, then what is left of the others', and keeps none."""

    def volunteer_for(self, place: int) -> None:
        """Do the chunks of shard ``place``."""
        self._place = place
        self._mine = self._group(place)
        self._offset = place

    def _begin_reading(self, reads: ThreadPoolExecutor) -> None:
        self._todo -= self._there.keys()
        for chunk in self._parts.keys() & self._there.keys():
            del self._parts[chunk]


class _Nowhere(ChunkedBytes):
    """Has so many chunks, and no memory."""

    def __init__(self, chunks: int) -> None:
        super().__init__([], 1)
        self._chunks = chunks

    def __len__(self) -> int:
        return self._chunks

    def write(self, chunk: int, data: object) -> None:
        """Forget it."""


@dataclass
class Volunteer:
    """One of a run's volunteers.

    Attributes:
        store: the run's prefix.
        run: the run's id.
        index: 0-based, of this volunteer.
        signer: of the run.
        poll_interval_s: the longest pause between two looks for an open round.
    """

    store: ObjectStore
    run: str
    index: int
    signer: Signer = UNSIGNED
    poll_interval_s: float = 1.0
    clock: Clock = field(default_factory=Clock)
    rounds: int = field(default=0, init=False)
    _done: set[str] = field(default_factory=set, init=False)

    def work(self, over: Callable[[], bool]) -> int:
        """Serve the run's rounds until ``over``; returns how many.

        Errors of single rounds are logged: a volunteer that cannot serve is one that is not there.
        """
        watch = self._watch()
        while not over():
            outline = None
            try:
                outline = self._find()
                if outline is not None:
                    self._serve(outline, over)
                    self.rounds += 1
            except (DilocoError, NoMeanError) as error:
                logger.info("%s: %s", outline or "looking for an open round", error)
            if outline is None:
                watch.pause()
            else:
                watch = self._watch()
        return self.rounds

    def _watch(self) -> Watch:
        return Watch(self.clock, float("inf"), self.poll_interval_s)

    def _find(self) -> str | None:
        """The newest outline that was not served yet."""
        streams = [n for n in self.store.list_dirs(keys.ROUNDS) if keys.is_stream(n)]
        for name in reversed(streams[-2:]):
            for info in self.store.list(keys.outlines_in(name)):
                if info.key not in self._done:
                    self._done.add(info.key)
                    return info.key
        return None

    def _serve(self, key: str, over: Callable[[], bool]) -> None:
        commit, layout = decode_outline(self.store.get(key), key)
        commit.check(self.signer, key)
        if commit.run != self.run:
            raise CorruptContributionError(f"{key}: another run's")
        payloads = self._opened(commit)
        gathering: _Volunteering
        asked_at = self.clock.now()

        def given_up() -> bool:
            nonlocal asked_at
            now = self.clock.now()
            if gathering.ahead and now - asked_at >= _DOUBT_S:
                asked_at = now
                gathering.ahead = not self._is_decided(commit)
            return over()

        gathering = _Volunteering(
            commit=commit,
            payloads=payloads,
            sums=Sums(self.store, commit, ChunkMeans(commit, layout), self.signer),
            into=_Nowhere(-(-commit.nbytes // commit.chunk_bytes)),
            new_watch=self._watch,
            ahead=True,
            given_up=given_up,
        )
        gathering.volunteer_for(self.index % commit.shards)
        gathering.run()

    def _opened(self, commit: Commit) -> Payloads:
        """The contributions, by the headers that went ahead of them."""
        payloads = Payloads(self.store, signer=self.signer)
        guess = header_size(commit.nbytes, commit.chunk_bytes)

        def read(one: Contributor) -> tuple[Header, str]:
            key = keys.opening(commit.round, commit.fragment, one.rank, one.attempt)
            found = read_header(self.store, key, guess, signer=self.signer)
            size = found[0].nbytes, found[0].chunk_bytes
            if found[1] != one.header or size != (commit.nbytes, commit.chunk_bytes):
                raise CorruptContributionError(f"{key}: not the header that is expected")
            return found

        with ThreadPoolExecutor(PARALLEL_READS, "diloco-headers") as pool:
            for header, name in pool.map(read, commit.contributors):
                payloads.headers[name] = header
        return payloads

    def _is_decided(self, commit: Commit) -> bool:
        """Whether the round went as expected; raises ``ExchangeError`` if it went another way."""
        try:
            found = read_commit(self.store, self.run, commit.round, commit.fragment, self.signer)
        except NotFoundError:
            if not self.store.list(keys.openings(commit.round, commit.fragment)):
                raise ExchangeError(f"round {commit.round} is over") from None
            return False
        if found.digest != commit.digest:
            raise ExchangeError(f"round {commit.round} went another way than expected")
        return True
