"""Starting from what the run has agreed on: joining, restarting and resuming are one thing.

A replica needs the store alone: a snapshot, and the rounds decided since. The very first snapshot
is what replica 0 begins with, so that all begin equal by construction; a replica that has the same
bytes already (the same pretrained weights, say) does not fetch them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from diloco_cloud import keys
from diloco_cloud.errors import (
    CorruptContributionError,
    CorruptError,
    DriftError,
    ExchangeError,
    LayoutMismatchError,
    MissedRoundError,
    NotFoundError,
    RoundTimeoutError,
)
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.history import History
from diloco_cloud.exchange.layout import TensorLayout
from diloco_cloud.outer import snapshot
from diloco_cloud.outer.inner import Decided
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
    _until_it_stands_still(lambda: _Joiner(manager, loop).join(_snapshots(manager)))


def follow(manager: MockManager, loop: OuterSteps) -> None:
    """Bring ``loop``, which has the agreed state of an earlier round, to the newest one.

    Raises:
        DriftError: the run's snapshots and rounds contradict one another.
    """
    joiner = _Joiner(manager, loop, rejoin=True)
    try:
        joiner.follow()
    except NotFoundError:  # It slept for longer than rounds are kept.
        _until_it_stands_still(
            lambda: _Joiner(manager, loop, rejoin=True).join(_snapshots(manager))
        )


def rejoin(manager: MockManager, loop: OuterSteps) -> None:
    """Bring ``loop``, whose state is not to be trusted, to the newest agreed state."""
    _until_it_stands_still(lambda: _Joiner(manager, loop, rejoin=True).join(_snapshots(manager)))


def _until_it_stands_still(attempt: Callable[[], None]) -> None:
    moved: NotFoundError | None = None
    for _ in range(_TRIES):
        try:
            attempt()
            return
        except NotFoundError as error:
            logger.info("the run's state moved on while it was read: %s", error.message)
            moved = error
    raise ExchangeError(f"the run's state cannot be read: {moved}") from moved


def _snapshots(manager: MockManager) -> list[Manifest]:
    """The run's snapshots, newest first; replica 0 makes the first, the others wait for it.

    Where replica 0 is gone, or does not come, any other does: what is created first stands.
    """
    watch = manager.watch()
    while True:
        found = snapshot.snapshots(manager.prefix, manager.signer)
        if found:
            return found
        if manager.rank == 0 or manager.stands_in_for(0, watch):
            states = manager.first_states()
            snapshot.write(
                manager.prefix,
                states,
                step=0,
                history=History(),
                writer=manager.life,
                signer=manager.signer,
            )
        elif watch.expired:
            raise RoundTimeoutError(
                f"replica 0 did not publish the initial parameters within {watch.timeout_s:g} s",
                fix="See why with `diloco-cloud status`; `resume` restarts what has stopped.",
            )
        else:
            manager.progress.waiting_for = [0]
            watch.pause()


class _Joiner:
    """One attempt at joining: where in the run's history it has got to.

    Args:
        manager: of the replica.
        loop: its outer loop.
        rejoin: this life has been in the run; where it is in its data is for it to know.
    """

    def __init__(self, manager: MockManager, loop: OuterSteps, *, rejoin: bool = False) -> None:
        self._manager = manager
        self._loop = loop
        self._rejoin = rejoin
        self._step = manager.current_step()
        self._history = manager.history().copy()
        #: The decision before the open round; None where it is in the snapshot.
        self._last: Decided | None = None

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
        self._arrive()

    def follow(self) -> None:
        """Replay what was decided since the state that is there.

        Raises:
            NotFoundError: some of it has been deleted.
        """
        self._replay_decided()
        self._arrive()

    def _arrive(self) -> None:
        self._settle_own_part()
        # A deleted commit looks like one that is not made yet, but its snapshot came before.
        newest = snapshot.snapshots(self._manager.prefix, self._manager.signer)[0].round
        if newest > self._history.round:
            raise NotFoundError(f"round {self._history.round} has been deleted")
        if self._rejoin:
            self._manager.passed(self._step)
        self._manager.resume_at(self._history, self._step, self._position(), last=self._last)
        logger.info("joined after %d rounds, %d of them committed", self._history.round, self._step)

    def _position(self) -> int | None:
        if self._rejoin:
            return None
        standing = self._history.standings.get(self._manager.rank)
        if standing is None:
            return self._history.round * self._loop.interval
        return standing.position

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
        self._step, self._history = manifest.step, manifest.history.copy()
        self._last = None

    def _replay_decided(self) -> None:
        while True:
            try:
                commit = self._manager.decision(self._history.round, self._turn)
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
        self._history.note(commit, applied=means is not None)
        self._last = Decided(commit, applied=means is not None)

    def _settle_own_part(self) -> None:
        """Wait for the open round if an earlier life of this rank has contributed to it.

        Its work is in that round already: doing it again would count it twice, and a peer that
        goes by the earlier contribution would not see this life in the round at all.
        """
        round_ = self._history.round
        directory = keys.directory(round_, self._turn)
        own: list[str] = []
        for info in self._manager.prefix.list(directory):
            part = keys.parse_part(info.key, directory)
            if part is not None and part[:2] == ("put", self._manager.rank):
                own.append(info.key)
        if own:
            try:
                commit = self._manager.await_decision(self._history, self._turn, own[-1])
            except MissedRoundError as error:
                raise NotFoundError(error.message) from None
            except CorruptContributionError as error:
                logger.warning("an earlier life's contribution is lost: %s", error.message)
                return
            self._replay(commit)
            self._replay_decided()
