"""Averaging before the decision, in the expectation of what it will be.

A decision is made when the last contribution is complete. Most of the work can be done by then:
the headers that go ahead of the contributions say all that the decision depends on, so that as a
rule it is known what it will be, to the last byte. What is averaged for a decision that was not to
be is never read: means are stored under the digest of the commit that they belong to.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from diloco_cloud import keys
from diloco_cloud.errors import AlreadyExistsError, CorruptContributionError
from diloco_cloud.exchange.background import in_background
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.contribution import Header, digest
from diloco_cloud.exchange.gathering import Gathering
from diloco_cloud.exchange.layout import TensorLayout
from diloco_cloud.exchange.payloads import Payloads, read_header
from diloco_cloud.exchange.volunteer import encode_outline
from diloco_cloud.exchange.watch import Watch
from diloco_cloud.store.base import ObjectInfo

logger = logging.getLogger(__name__)

Headers = Mapping[int, tuple[Header, str]]


@dataclass
class Speculation:
    """Gathers the means of a round ahead of its decision, in the background.

    Attributes:
        payloads: this replica's contribution, and whatever is read of the others'.
        layout: of its tensors.
        expected: ranks that the round waits for.
        decide: the decision that follows from headers and their digests, by rank.
        gather: makes what gathers the means of an expected decision.
        new_watch: makes the watch that paces the wait for the others' headers.
    """

    payloads: Payloads
    layout: TensorLayout
    expected: frozenset[int]
    decide: Callable[[Headers], Commit]
    gather: Callable[[Commit, Callable[[], bool]], Gathering]
    new_watch: Callable[[], Watch]
    _over: threading.Event = field(default_factory=threading.Event, init=False)
    _gathering: Gathering | None = field(default=None, init=False)
    _work: Future[bool] | None = field(default=None, init=False)

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._work = in_background(self._run, "diloco-ahead")

    def stop(self) -> None:
        """End it, and wait until nothing is written to memory any more."""
        self._over.set()
        if self._work is not None:
            self._work.exception()
        # An error's traceback would keep this object, and with it the whole contribution.
        self._work = self._gathering = None

    def comes_true(self, commit: Commit) -> bool:
        """Whether the means of this decision have been gathered; if so, waits for the last ones."""
        gathering = self._gathering
        if self._work is None or gathering is None or gathering.commit.digest != commit.digest:
            self.stop()
            return False
        gathering.ahead = False
        error = self._work.exception()
        if error is not None:
            logger.info("round %d is averaged again: %s", commit.round, error)
        return error is None and self._work.result()

    def _run(self) -> bool:
        headers = self._await_headers()
        commit = self.decide(headers)
        included = [(one.rank, one.attempt, one.header) for one in commit.contributors]
        assert self.payloads.own is not None
        own = self.payloads.own.header
        if (own.rank, own.attempt, digest(own.encode())) not in included:
            return False
        groups = commit.shards or 1  # Everybody reads the one group of an all-gather.
        if any(header.spread != groups for header, _ in headers.values()):
            return False
        if commit.reducers:
            self._publish(commit)
        self._gathering = self.gather(commit, self._over.is_set)
        self._gathering.run()
        return True

    def _await_headers(self) -> Headers:
        assert self.payloads.own is not None
        own, watch = self.payloads.own.header, self.new_watch()
        here = keys.opening(own.round, own.fragment, own.rank, own.attempt)
        known = {here: (own, digest(own.encode()))}
        while True:
            newest: dict[int, ObjectInfo] = {}
            for info in self.payloads.store.list(keys.openings(own.round, own.fragment)):
                life = keys.opened_by(info.key)
                # In key order, so by attempts. An earlier life of this rank's was not to be.
                if life is not None and (life[0] != own.rank or info.key == here):
                    newest[life[0]] = info
            # Its own too: what is expected must have this replica's chunks in it, as the means
            # take the place of those.
            if self.expected | {own.rank} <= newest.keys():
                new = [info for info in newest.values() if info.key not in known]
                with ThreadPoolExecutor(self.payloads.parallel, "diloco-headers") as pool:
                    read = zip(new, pool.map(self._header, new), strict=True)
                    known |= {info.key: header for info, header in read}
                return {rank: known[info.key] for rank, info in sorted(newest.items())}
            watch.pause()
            if self._over.is_set():
                raise CorruptContributionError("the round was decided before all had begun it")

    def _header(self, info: ObjectInfo) -> tuple[Header, str]:
        life = keys.opened_by(info.key)
        assert life is not None
        with self.payloads.reading(life):
            if life not in self.payloads.opened:
                self.payloads.opened[life] = self._read_header(info)
            return self.payloads.opened[life]

    def _read_header(self, info: ObjectInfo) -> tuple[Header, str]:
        payloads = self.payloads
        assert payloads.own is not None
        own = payloads.own.header
        header, name = read_header(
            payloads.store, info.key, own.size, size=info.size, signer=payloads.signer
        )
        place = (own.run, own.round, own.fragment)
        if header.place[:3] != place or info.key != keys.opening(
            own.round, own.fragment, header.rank, header.attempt
        ):
            raise CorruptContributionError(f"{info.key}: written for another run, round or rank")
        payloads.headers[name] = header
        return header, name

    def _publish(self, commit: Commit) -> None:
        """Tell volunteers what to average."""
        key = keys.outline(commit.round, commit.fragment, commit.digest[:16])
        with suppress(AlreadyExistsError):
            self.payloads.store.create(key, encode_outline(commit, self.layout))
