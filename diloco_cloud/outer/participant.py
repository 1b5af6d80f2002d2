"""A replica's place in its run: how it comes up to the others, where it is, and how it ends.

:class:`~diloco_cloud.outer.manager.MockManager` adds what torchft and trainers call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from diloco_cloud import keys
from diloco_cloud.errors import DilocoError, ExchangeError, NotFoundError
from diloco_cloud.exchange.agreement import read_commit
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.background import in_background
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.history import History
from diloco_cloud.exchange.layout import TensorLayout
from diloco_cloud.exchange.signing import Signer
from diloco_cloud.exchange.watch import Watch
from diloco_cloud.outer.accounts import Accounts
from diloco_cloud.outer.fragments import Fragments
from diloco_cloud.outer.hand_over import HandedOver
from diloco_cloud.outer.inner import Checkpoint, Decided, InnerCheckpoints
from diloco_cloud.outer.lookout import Lookout
from diloco_cloud.outer.progress import Mark, Progress
from diloco_cloud.outer.result import Exported, export, exported
from diloco_cloud.outer.snapshot import SnapshotWriter
from diloco_cloud.outer.start import declared_start
from diloco_cloud.outer.state import FragmentState
from diloco_cloud.outer.sync import Sync
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

#: Seconds that the end of a life gives its last word to the others.
_LAST_WORD_S = 3.0
#: Heartbeats that a replica which has finished gives the others to finish too.
_LAST_BEATS = 4.0


class Participant:
    """One life of one rank among the others.

    Args:
        door: the rank's door to the run.
        snapshot_every: rounds between two snapshots of the outer state.
        init_from: URI of the weights that a new run begins with, or None.
        checkpoint_inner: whether to store inner checkpoints.

    Attributes:
        store: the door.
        rank: of this replica.
        init_from: as given.
        progress: where this replica is.
        fragments: what the outer loop has registered.
        position: inner steps of this rank's data behind it once the sync that begins next is
            merged; the outer loop keeps it.
    """

    def __init__(
        self,
        door: ObjectStoreAllReduce,
        *,
        snapshot_every: int,
        init_from: str | None,
        checkpoint_inner: bool,
    ) -> None:
        self.store = door
        self.rank = door.rank
        self.progress = Progress()
        self.position = 0
        self.fragments = Fragments()
        self.init_from = init_from
        self._exchange = door.exchange
        self._exchange.gives_up = lambda: self._handing_over
        self._step = 0
        self._round = door.round_id
        self._sync: Sync | None = None
        self._marks: dict[int, Mark] = {}
        self._accounts = Accounts()
        self._lookout = Lookout(door.exchange)
        self._handing_over = self._left = False
        self._inner = InnerCheckpoints(door) if checkpoint_inner else None
        self._last: Decided | None = None
        self._snapshots = SnapshotWriter(
            door.prefix,
            rank=door.rank,
            writer=self.life,
            every=snapshot_every,
            signer=self.signer,
        )

    @property
    def prefix(self) -> ObjectStore:
        """The run's prefix, for what is not part of a round."""
        return self.store.prefix

    @property
    def signer(self) -> Signer:
        """Makes and checks the run's macs."""
        return self._exchange.signer

    @property
    def life(self) -> str:
        """This life of this rank, as it appears in keys."""
        return keys.life(self.rank, self._exchange.attempt)

    @property
    def _turn(self) -> int:
        return self._step % self.fragments.turns

    # -- coming up -----------------------------------------------------------------------------

    def first_states(self) -> list[FragmentState]:
        """What a new run begins with."""
        if self.init_from is None:
            return self.fragments.capture()
        return declared_start(self.init_from, list(self.fragments))

    def global_digest(self) -> str | None:
        """Hex BLAKE3 over the global parameters of all fragments; None if there are none."""
        return self.fragments.digest()

    def history(self) -> History:
        """The decisions so far."""
        return self._exchange.history

    def decision(self, round_: int, fragment: int) -> Commit:
        """The commit of a round; ``NotFoundError`` where there is none, or none any more."""
        return read_commit(self.prefix, self._exchange.run, round_, fragment, self.signer)

    def replay(self, commit: Commit, layout: TensorLayout) -> list[torch.Tensor] | None:
        """The agreed means of an earlier round; None if there was nothing to apply."""
        return self._exchange.replay(commit, layout).tensors

    def watch(self) -> Watch:
        """A watch for the next wait on peers."""
        return self._exchange.watch()

    def stands_in_for(self, rank: int, watch: Watch) -> bool:
        """Whether to do what is another rank's to do, as it is gone or has not come in time."""
        if self._exchange.membership.is_strict:
            return False
        return watch.waited_s >= self._exchange.join_timeout_s or (
            self._exchange.membership.is_gone(rank, watch.clock.now())
        )

    def await_decision(self, history: History, fragment: int, key: str) -> Commit:
        """Wait for the decision after ``history``, of a round that has ``key`` of this rank's."""
        self._exchange.begin(history)
        self.progress.enter("syncing")
        return self._exchange.await_decision(history.round, fragment, key)

    def settle_by_ledger(self, fragment: int) -> bool:
        """Settle this life's open contribution to a fragment if a decision has counted it.

        A process that was stopped in the middle of a round may find that the round went with its
        work, and is deleted; the ledger in the newest decision still tells.
        """
        mark = self._marks.get(fragment)
        entry = self._exchange.history.ledgers.get(fragment, {}).get(self.rank)
        if mark is None or entry is None or entry.attempt != self._exchange.attempt:
            return False
        return self._accounts.settle_if(fragment, mark, entry.life)

    def begin_anew(self) -> None:
        """Another outer loop of this life begins with the run's state: what it had done is gone."""
        now = self.progress.mark()
        for fragment in range(self.fragments.turns if now.steps else 0):
            self.settle_by_ledger(fragment)
            self._accounts.drop(fragment, now)

    def passed(self, step: int) -> None:
        """Note the outer steps, up to ``step``, that were taken without what this life has done."""
        turns, now = self.fragments.turns, self.progress.mark()
        for fragment in range(turns):
            missed = sum(one % turns == fragment for one in range(self._step, step))
            self._accounts.age(fragment, missed, now)

    def resume_at(
        self, history: History, step: int, position: int | None, *, last: Decided | None = None
    ) -> None:
        """Continue after the decisions in ``history`` and ``step`` outer steps.

        Args:
            history: what the decisions say.
            step: outer steps applied.
            position: inner steps of this rank's data that are behind it; None: as it was.
            last: the last of the decisions; None where it is not at hand.
        """
        self._round, self._step, self._last = history.round, step, last
        self._exchange.begin(history)
        if position is not None:
            self.position = position
        self.progress.resume(self._round, step, self.position)
        self._exchange.announce(self._round, step % self.fragments.turns)

    def inner_checkpoint(self) -> Checkpoint | None:
        """What an earlier life of this rank left for this one, which has just joined."""
        if self._inner is None or self._round == 0 or self._marks:
            return None  # The second outer loop of a life goes on with what the first one left.
        if self._last is None:  # It is in a snapshot, and those are of rounds that were applied.
            try:
                fragment = (self._step - 1) % self.fragments.turns
                self._last = Decided(self.decision(self._round - 1, fragment), applied=True)
            except NotFoundError:
                logger.info("round %d is deleted: the inner state is fresh", self._round - 1)
                return None
        return self._inner.find(self._last)

    def inherit(self, checkpoint: Checkpoint) -> None:
        """Go on with the work that an earlier life of this rank has not contributed."""
        self._accounts.inherit(checkpoint.accounts)
        self._exchange.contributing.residuals.inherit(checkpoint.owed)
        self.position = self.progress.inner_step = checkpoint.local.position

    # -- ending --------------------------------------------------------------------------------

    @property
    def is_handing_over(self) -> bool:
        """Whether this life is to end as soon as its work is in the store."""
        return self._handing_over

    def request_hand_over(self) -> None:
        """End this life without losing its work; only sets a flag, so anybody may call it.

        The training thread contributes what it has after its next inner step, or gives up the wait
        for a round that it has contributed to, and raises :class:`HandedOver`.
        """
        self._handing_over = True

    def hand_over(self) -> None:
        """Contribute the open sync, if there is one, without waiting for the decision.

        Raises:
            HandedOver: always.
        """
        self.progress.enter("handing over")
        if self._sync is not None:
            self._sync.contribute()
            self._sync = None
        raise HandedOver

    def abandon_sync(self) -> None:
        """Drop the open sync after an error, and end its waiting in the background."""
        self._sync = None
        self._snapshots.forget()
        self._exchange.interrupt()

    def shutdown(self, *, finished: bool = False) -> None:
        """Stop the background work; nothing is waited for unless the training is complete.

        Args:
            finished: the replica's training is complete: leave the run, so that nobody waits for
                this rank, and export the result if everybody else has left.
        """
        try:
            if self.progress.phase == "handing over":
                self._depart()
                if finished:  # The trainer has swallowed it, and there is more to be trained.
                    raise HandedOver
            elif finished and not self._left:
                self._leave()
            elif not self._left:
                self._depart()
        finally:
            self._lookout.close()
            self._exchange.interrupt()

    def _leave(self) -> None:
        if self.fragments.lost:
            raise ExchangeError(
                "the last sync failed, and training did not go on from it",
                fix="Let the error of a sync end the trainer, so that the replica can be resumed.",
            )
        self.progress.enter("finishing")
        states = self.fragments.states()
        self._snapshots.write_due(lambda: states)
        self._snapshots.flush()
        self._exchange.leave(self._round, self._turn)
        self._left = True
        if self._inner is not None:
            self._inner.clear()
        if states:
            self._export(states)

    def _export(self, states: Sequence[FragmentState]) -> None:
        """Write the result, if it is this replica's to write.

        It is the last one's. But that one may fail for good, so where others go on, the first of
        those who have finished leaves what there is, which the last one's then replaces.
        """
        if self._is_last():
            export(self.prefix, states, round_=self._round, step=self._step)
        elif self._is_first_to_finish():
            try:
                export(self.prefix, states, round_=self._round, step=self._step, final=False)
            except DilocoError as error:
                logger.warning("the result so far could not be written: %s", error)

    def _is_first_to_finish(self) -> bool:
        """Whether no replica of a lower rank has left, who has the same to write."""
        if self._exchange.membership.is_strict:  # A death ends such a run anyway.
            return False
        leaving = self._exchange.look(self._round, self._turn).leaving
        return self.rank == min({self.rank, *leaving, *self._exchange.history.finished})

    def _is_last(self) -> bool:
        """Whether nobody else is left who will write the result.

        One that dies while it finishes is noticed some heartbeats later, so that is waited for;
        who trains on for longer than that writes the result itself.
        """
        rules, clock = self._exchange.membership, self._exchange.clock
        until = clock.now() + (0.0 if rules.is_strict else _LAST_BEATS * rules.heartbeat_s)
        whole = Exported(self._round, final=True)
        while (found := exported(self.prefix)) is None or found < whole:
            if not self._exchange.still_going(self._round, self._turn) - {self.rank}:
                return True
            if clock.now() >= until:
                return False
            clock.sleep(min(self._exchange.poll_interval_s, rules.heartbeat_s))
        return False

    def _depart(self) -> None:
        """Tell the others not to wait; a store that cannot be reached does not hold up the end."""
        if self._exchange.membership.is_strict or self.progress.phase == "joining":
            return
        word = in_background(
            lambda: self._exchange.depart(self._round, self._turn), "diloco-depart"
        )
        try:
            word.result(timeout=_LAST_WORD_S)
        except (DilocoError, TimeoutError) as error:
            logger.warning("could not tell the others that this replica ends: %s", error)
