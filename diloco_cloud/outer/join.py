"""Starting from what the run has agreed on: joining, restarting and resuming are one thing.

A replica needs the store alone: the newest snapshot, and the rounds decided since. The very first
snapshot is replica 0's initial parameters, so that all begin equal by construction; a replica that
has the same bytes already (the same pretrained weights, say) does not fetch them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from diloco_cloud.errors import ExchangeError, LayoutMismatchError, NotFoundError, RoundTimeoutError
from diloco_cloud.exchange import keys
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.layout import TensorLayout
from diloco_cloud.outer import snapshot
from diloco_cloud.outer.state import restore

if TYPE_CHECKING:
    from diloco_cloud.outer.loop import OuterLoop
    from diloco_cloud.outer.manager import MockManager
    from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

#: A snapshot can be superseded while it is read; each try reads a newer one.
_TRIES = 10


def join(manager: MockManager, loop: OuterLoop) -> None:
    """Bring ``loop`` to the newest agreed state.

    Raises:
        RoundTimeoutError: replica 0 did not publish the initial parameters in time.
        LayoutMismatchError: the run trains another model than this replica built.
    """
    for _ in range(_TRIES):
        manifest = _first_or_newest(manager)
        try:
            _load(manager, loop, manifest)
            return
        except NotFoundError:
            logger.info("snapshot of round %d was superseded while reading it", manifest.round)
    raise ExchangeError("snapshots disappear faster than this replica can read them")


def _first_or_newest(manager: MockManager) -> snapshot.Manifest:
    store = manager.prefix
    watch = manager.watch()
    while True:
        manifest = snapshot.newest(store)
        if manifest is not None:
            return manifest
        if manager.rank == 0:
            snapshot.write(
                store, manager.capture(), round_=0, step=0, finished=(), writer=manager.writer
            )
            continue
        if watch.expired:
            raise RoundTimeoutError(
                f"replica 0 did not publish the initial parameters within {watch.timeout_s:g} s",
                fix="See why with `diloco-cloud status`; `resume` restarts what has stopped.",
            )
        manager.progress.waiting_for = [0]
        watch.pause()


def _load(manager: MockManager, loop: OuterLoop, manifest: snapshot.Manifest) -> None:
    store = manager.prefix
    own = manager.capture()
    if len(manifest.fragments) != len(own):
        raise LayoutMismatchError(
            f"the run has {len(manifest.fragments)} fragments and this replica {len(own)}",
            fix="Split the model in the same way on every replica.",
        )
    for state, stored in zip(own, manifest.fragments, strict=True):
        if manifest.step == 0 and state.digest == stored.parameters:
            continue
        fetched = snapshot.read_fragment(store, stored, state.key, state.names)
        restore(fetched, manager.state_fns(state.key))
    round_, step, finished = manifest.round, manifest.step, manifest.finished
    for commit in decided_since(store, round_):
        if commit.decision == "abort":
            raise LayoutMismatchError(
                f"the run was stopped in round {commit.round}: {commit.reason}"
            )
        if commit.decision == "commit":
            _replay(manager, loop, commit)
            step += 1
        round_, finished = commit.round + 1, commit.finished
    loop.restore_global_parameters()
    manager.resume_at(round_, step, finished, round_ * loop.interval)
    logger.info("joined after %d rounds, %d of them committed", round_, step)


def decided_since(store: ObjectStore, round_: int) -> list[Commit]:
    """Commits of ``round_`` and later, without gaps, in order."""
    places = sorted(filter(None, map(keys.parse_directory, store.list_dirs(keys.ROUNDS))))
    found: list[Commit] = []
    for number, fragment in places:
        if number < round_:
            continue
        if number != round_ + len(found):
            raise NotFoundError(f"round {round_ + len(found)} has been deleted")
        try:
            found.append(Commit.decode(store.get(keys.commit(number, fragment))))
        except NotFoundError:
            break  # Not decided yet.
    return found


def _replay(manager: MockManager, loop: OuterLoop, commit: Commit) -> None:
    parameters, names = loop.global_parameters(commit.fragment)
    layout = TensorLayout.of(parameters, names)
    loop.apply(commit.fragment, manager.replay(commit, layout))
