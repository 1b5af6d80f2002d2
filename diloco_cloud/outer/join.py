"""Starting from what the run has agreed on: joining, restarting and resuming are one thing.

A replica needs the store alone: a snapshot, and the rounds decided since. The very first snapshot
is what replica 0 begins with, so that all begin equal by construction; a replica that has the same
bytes already (the same pretrained weights, say) does not fetch them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from diloco_cloud import keys
from diloco_cloud.errors import (
    CorruptError,
    DriftError,
    ExchangeError,
    LayoutMismatchError,
    NotFoundError,
    RoundTimeoutError,
)
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.layout import TensorLayout
from diloco_cloud.outer import snapshot
from diloco_cloud.outer.snapshot import Manifest

if TYPE_CHECKING:
    from diloco_cloud.outer.manager import MockManager

logger = logging.getLogger(__name__)

#: Snapshots can be superseded while one is read; each try reads newer ones.
_TRIES = 10


class OuterSteps(Protocol):
    """What a joiner needs of the outer loop that it brings up to date."""

    @property
    def interval(self) -> int:
        """Inner steps between two rounds."""

    def apply(self, fragment: int, means: Sequence[torch.Tensor]) -> None:
        """Take the outer step of a round that was decided without this replica."""


def join(manager: MockManager, loop: OuterSteps) -> None:
    """Bring ``loop`` to the newest agreed state.

    Raises:
        RoundTimeoutError: replica 0 did not publish the initial parameters in time.
        LayoutMismatchError: the run trains another model than this replica built.
        DriftError: the run's snapshots and rounds contradict one another.
    """
    moved: NotFoundError | None = None
    for _ in range(_TRIES):
        try:
            _Joiner(manager, loop).join(_snapshots(manager))
            return
        except NotFoundError as error:
            logger.info("the run's state moved on while it was read: %s", error.message)
            moved = error
    raise ExchangeError(f"the run's state cannot be read: {moved}") from moved


def _snapshots(manager: MockManager) -> list[Manifest]:
    """The run's snapshots, newest first; replica 0 makes the first, the others wait for it."""
    watch = manager.watch()
    while True:
        found = snapshot.snapshots(manager.prefix)
        if found:
            return found
        if manager.rank == 0:
            states = manager.first_states()
            snapshot.write(manager.prefix, states, round_=0, step=0, writer=manager.life)
        elif watch.expired:
            raise RoundTimeoutError(
                f"replica 0 did not publish the initial parameters within {watch.timeout_s:g} s",
                fix="See why with `diloco-cloud status`; `resume` restarts what has stopped.",
            )
        else:
            manager.progress.waiting_for = [0]
            watch.pause()


class _Joiner:
    """One attempt at joining: where in the run's history it has got to."""

    def __init__(self, manager: MockManager, loop: OuterSteps) -> None:
        self._manager = manager
        self._loop = loop
        self._round = self._step = 0
        self._finished: tuple[int, ...] = ()
        self._positions: dict[int, int] = {}

    def join(self, manifests: Sequence[Manifest]) -> None:
        """Load the newest snapshot that the rounds after it bear out, and replay those."""
        for i, manifest in enumerate(manifests):
            try:
                self._load(manifest)
                self._replay_decided()
                break
            except (CorruptError, DriftError) as error:
                logger.warning("the snapshot of round %d is of no use: %s", manifest.round, error)
                if i + 1 == len(manifests):
                    raise
        self._settle_own_part()
        # A deleted commit looks like one that is not made yet, but its snapshot came before.
        newest = snapshot.snapshots(self._manager.prefix)[0].round
        if newest > self._round:
            raise NotFoundError(f"round {self._round} has been deleted")
        self._begin()

    def _begin(self) -> None:
        position = self._positions.get(self._manager.rank, self._round * self._loop.interval)
        self._manager.resume_at(self._round, self._step, self._finished, position)
        logger.info("joined after %d rounds, %d of them committed", self._round, self._step)

    def _load(self, manifest: Manifest) -> None:
        fragments = self._manager.fragments
        if len(manifest.fragments) != len(fragments):
            raise LayoutMismatchError(
                f"the run has {len(manifest.fragments)} fragments, this replica {len(fragments)}",
                fix="Split the model in the same way on every replica.",
            )
        for i, fragment in enumerate(fragments):
            if manifest.step == 0 and fragment.digest() == manifest.fragments[i].parameters:
                continue
            fragment.restore(
                snapshot.read_fragment(
                    self._manager.prefix, manifest, i, fragment.key, fragment.names
                )
            )
        self._round, self._step = manifest.round, manifest.step
        self._finished, self._positions = manifest.finished, dict(manifest.positions)

    def _replay_decided(self) -> None:
        while True:
            key = keys.commit(self._round, self._turn)
            try:
                commit = Commit.decode(self._manager.prefix.get(key))
            except NotFoundError:
                return
            self._replay(commit)

    @property
    def _turn(self) -> int:
        """The fragment whose round comes next."""
        return self._step % len(self._manager.fragments)

    def _replay(self, commit: Commit) -> None:
        if commit.decision == "abort":
            raise LayoutMismatchError(
                f"the run was stopped in round {commit.round}: {commit.reason}",
                fix="Launch it anew, with the same model on every replica.",
            )
        fragment = self._manager.fragments[commit.fragment]
        if commit.base and commit.base != fragment.digest():
            raise DriftError(f"round {commit.round} was taken against other parameters")
        layout = TensorLayout.of(fragment.parameters, fragment.names)
        means = self._manager.replay(commit, layout)
        if means is not None:
            self._loop.apply(commit.fragment, means)
            self._step += 1
        self._round, self._finished = commit.round + 1, commit.finished
        self._positions |= dict(commit.positions)

    def _settle_own_part(self) -> None:
        """Wait for the open round if an earlier life of this rank has contributed to it.

        Its work is in that round already: doing it again would count it twice, and a peer that
        goes by the earlier contribution would not see this life in the round at all.
        """
        directory = keys.directory(self._round, self._turn)
        own: list[str] = []
        for info in self._manager.prefix.list(directory):
            part = keys.parse_part(info.key, directory)
            if part is not None and part[:2] == ("put", self._manager.rank):
                own.append(info.key)
        if own:
            commit = self._manager.await_decision(self._round, self._turn, own[-1], self._finished)
            self._replay(commit)
            self._replay_decided()
