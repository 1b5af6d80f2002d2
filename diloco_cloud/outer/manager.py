"""The Manager that torchft's DiLoCo talks to, with a bucket behind it instead of a lighthouse.

    store = ObjectStoreAllReduce("s3://bucket/run", rank=0, world_size=4)
    manager = MockManager(store)
    with make_diloco_outer_loop(manager, [model], optimizer, sync_every=100):
        ...

It keeps torchft's semantics: the step advances on commit only, a discarded round sends everybody
back to the fragment's last global parameters and is tried again, and ``should_commit`` is the
decision all replicas agreed on. It is a manager for DiLoCo and LocalSGD, not for other uses of
torchft.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from diloco_cloud.errors import (
    DriftError,
    ExchangeError,
    MissedRoundError,
)
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.layout import digest_tensors
from diloco_cloud.exchange.residuals import Owed
from diloco_cloud.exchange.work import RoundResult, Work
from diloco_cloud.outer.accounts import at_usual_length
from diloco_cloud.outer.hand_over import HandedOver
from diloco_cloud.outer.inner import HasLocalState
from diloco_cloud.outer.participant import Participant
from diloco_cloud.outer.progress import Mark, RoundReport
from diloco_cloud.outer.result import add_files
from diloco_cloud.outer.state import StateFns
from diloco_cloud.outer.sync import Sync
from diloco_cloud.outer.work import _ImmediateWork

logger = logging.getLogger(__name__)

#: Rounds in a row without a usable mean after which going on is pointless.
MAX_DISCARDS = 5


class CatchesUp(HasLocalState, Protocol):
    """What the manager needs of the outer loop: its own state, and that it can be brought up."""

    def catch_up(self, fragment: int, *, keep: bool) -> None:
        """Take over the run's newest state, with the local progress since the last sync or not."""


class MockManager(Participant):
    """A torchft Manager over an :class:`ObjectStoreAllReduce`.

    All ``allreduce`` calls of one sync become one object and one round. The exchange runs in a
    background thread from the first ``wait()``, or from the next inner step when the outer loop
    delays the sync; that thread touches host memory only.

    Args:
        store: the rank's door to the run. ``allreduce=`` is accepted as its older name.
        snapshot_every: rounds between two snapshots of the outer state.
        init_from: URI of a safetensors file that a new run begins with; by default a new run
            begins with replica 0's parameters.
        on_round: called with a :class:`RoundReport` after every decision; its failure is logged.
        checkpoint_inner: whether to store, with each contribution, what a new life of this rank
            needs to go on as if nothing had happened: the inner optimizer's state (twice the
            model for AdamW), and with several fragments or a delayed merge the model itself.

    Attributes:
        store: as given.
        rank: of this replica.
        init_from: as given.
        progress: where this replica is.
        fragments: what the outer loop has registered.
        position: inner steps of this rank's data behind it once the sync that begins next is
            merged; the outer loop keeps it.
        policy_version: outer steps in the oldest policy that rollouts since the last sync came
            from; a trainer that rolls out keeps it, and contributions record it.
    """

    #: torchft's DiLoCo refuses a manager whose quorum is asynchronous.
    _use_async_quorum = False

    def __init__(
        self,
        store: ObjectStoreAllReduce | None = None,
        *,
        allreduce: ObjectStoreAllReduce | None = None,
        snapshot_every: int = 5,
        init_from: str | None = None,
        on_round: Callable[[RoundReport], None] | None = None,
        checkpoint_inner: bool = False,
    ) -> None:
        door = store if store is not None else allreduce
        if door is None:
            raise TypeError("MockManager needs an ObjectStoreAllReduce")
        super().__init__(
            door,
            snapshot_every=snapshot_every,
            init_from=init_from,
            checkpoint_inner=checkpoint_inner,
        )
        self.on_round = on_round
        self.loop: CatchesUp | None = None
        self.policy_version = 0
        self._exchange.waiting_for = self._waiting_for
        self._discards = 0
        self._usual_steps = 0
        self._usage = door.usage

    # -- what torchft calls --------------------------------------------------------------------

    def num_participants(self) -> int:
        """Replicas the next round waits for, as far as is known before it."""
        return len(self._exchange.expected)

    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def current_step(self) -> int:
        """Outer steps applied, which is the number of committed rounds."""
        return self._step

    def current_round(self) -> int:
        """Decisions seen, committed and discarded."""
        return self._round

    def register_state_dict_fn(
        self,
        key: str,
        load_fn: Callable[[dict[str, Any]], None],
        save_fn: Callable[[], dict[str, Any]],
    ) -> None:
        """Remember how to read and write one fragment's outer state.

        Raises:
            AssertionError: the key is registered already (as torchft's Manager does).
        """
        self.fragments.register(key, (load_fn, save_fn))

    @property
    def _state_dict_fns(self) -> dict[str, StateFns]:
        return self.fragments.fns

    def disallow_state_dict_read(self) -> None:
        """Called before every inner step: sends off a delayed sync, and a snapshot that is due."""
        if self._sync is not None:
            self._sync.send()
        self._snapshots.write_due(self.fragments.capture)

    def allow_state_dict_read(self) -> None:
        """Called after every inner step; outer state is read in the training thread only."""
        self.progress.touch()  # A trainer need not report its steps.

    def start_quorum(self) -> None:
        """Begin a sync."""
        if self._sync is not None:
            raise ExchangeError("a sync began before the last one ended")
        # At the end of training syncs follow one another without inner steps in between, and the
        # state that is due is that before this one.
        self._snapshots.write_due(self.fragments.capture)
        self._lookout.rest()
        self.progress.enter("syncing")

    def wait_quorum(self) -> None:
        """Membership is decided by each round's commit; there is nothing to wait for here."""

    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, **_unused: Any
    ) -> _ImmediateWork:
        """Add ``tensor`` to the open sync; ``wait()`` of the returned work fills in the mean.

        Args:
            tensor: floating point, any device; replaced in place by the agreed mean.
            should_quantize: must be False: how contributions are encoded is a setting of the run.
            **_unused: what newer torchfts may pass is accepted.
        """
        if should_quantize:
            raise ValueError("should_quantize is not supported: encoding is a setting of the run")
        if self._sync is None or self._sync.sent:
            self._sync = self._new_sync()
        return self._sync.add(tensor)

    def should_commit(self) -> bool:
        """The agreed decision on the open sync.

        torchft has put the last global parameters back by the time it asks, so an error raised
        here leaves the model in a state all replicas share.

        Raises:
            ExchangeError: the round failed, or too many rounds in a row were discarded.
            StoreError: the store failed beyond retrying.
        """
        done = self._sync
        if done is None:
            raise ExchangeError("should_commit was asked without an allreduce before it")
        done.deliver()
        self._sync = None
        fragment = self._turn
        if done.error is not None:
            self._recover(done.error, fragment)
            self.progress.enter("training")
            return False
        assert done.result is not None
        result, commit = done.result, done.result.commit
        committed = result.tensors is not None
        self._accounts.settle(fragment, self._marks[fragment])
        self.progress.mark_round()
        report = self._report(done, result)
        self._round += 1
        if committed:
            self._step += 1
            self._discards = 0
        else:
            self._discards += 1
            logger.warning("round %d is discarded: %s", report.round, result.reason)
        if committed and len(self.fragments):
            self._snapshots.schedule(commit, self._step, self._exchange.history)
        elif committed and self.rank == commit.contributors[0].rank:
            # Without a state to snapshot nobody can join later, and old rounds serve nobody.
            self.store.discard(report.round - 1)
        self.progress.round, self.progress.step = self._round, self._step
        exclusion = commit.exclusion_of(self.rank)
        self.progress.excluded = None if exclusion is None else exclusion.reason
        self._tell(report)
        self.progress.enter("training")
        if self._discards >= MAX_DISCARDS:
            raise ExchangeError(
                f"{MAX_DISCARDS} rounds in a row had nothing to average: {result.reason}",
                fix="If it is NaN, training has diverged: lower the learning rate, clip gradients.",
            )
        return committed

    def _recover(self, error: Exception, fragment: int) -> None:
        """Go on after a round that went without this replica, or raise ``error``."""
        if self._handing_over:
            self.progress.enter("handing over")
            raise HandedOver from error
        if self.loop is None or self._exchange.membership.is_strict:
            raise error
        if isinstance(error, MissedRoundError):
            logger.warning("%s; its work goes into a later one", error.message)
            self.progress.missed += 1
            self.progress.excluded = "missed the round"
            self.loop.catch_up(fragment, keep=True)
        elif isinstance(error, DriftError):
            logger.warning("%s; fetching the agreed state from the store", error.message)
            self.progress.excluded = error.message
            self.loop.catch_up(fragment, keep=False)
            if not self.settle_by_ledger(fragment):
                self._accounts.drop(fragment, self._marks[fragment])
        else:
            raise error

    # -- what trainers call --------------------------------------------------------------------

    def report(self, *, tokens: int = 0, loss: float | None = None, **metrics: float) -> None:
        """Count one inner step; called before the optimizer takes it, as that may begin a sync.

        Args:
            tokens: processed in it; the replica's weight in the next mean.
            loss: of the step.
            metrics: further figures; the last value of each goes into the round's metrics.
        """
        self.progress.report(tokens, loss, metrics)

    def save_result(self, files: Mapping[str, bytes]) -> None:
        """Store files beside the final parameters, by name: a config, a tokenizer.

        Raises:
            ValueError: a name is no relative path, or is taken by the result itself.
        """
        add_files(self.prefix, files)

    # -- what the outer loop calls -------------------------------------------------------------

    def pace(self, *, steps: int, overlap: int) -> None:
        """Say how many inner steps a fragment's contribution has, and an exchange runs beside."""
        self._usual_steps, self._lookout.overlap_steps = steps, overlap

    def closing(self, steps_left: int) -> bool:
        """Whether to contribute now, ``steps_left`` inner steps early; asked after every step."""
        return self._lookout.step(self._round, self._turn, steps_left)

    # -- inside --------------------------------------------------------------------------------

    def _new_sync(self) -> Sync:
        """A sync of the fragment whose turn it is, as things stand in the training thread now."""
        round_, index = self._round, self._turn
        self._marks[index] = now = self.progress.mark()
        account = self._accounts.of(index, now)
        position, decided = self.position, self._lookout.decided == round_
        policy = self.policy_version
        self._usage = self.store.usage
        write_inner = self._capture_inner(round_, index, now)

        def prepare(tensors: list[torch.Tensor]) -> tuple[Work, dict[str, Any]]:
            # Global parameters stand still from the start of a sync to its end.
            parameters, names = self.fragments.globals_of(index)
            base = digest_tensors(parameters) if parameters else ""
            work = Work(base=base, position=position, policy_version=policy, **account)
            known = {"names": names, "averaged_plainly": self.fragments.embeddings_of(index)}
            return work, {key: of for key, of in known.items() if len(of) == len(tensors)}

        def exchange(tensors: list[torch.Tensor]) -> RoundResult:
            if decided:  # What is contributed now nobody would read.
                raise MissedRoundError(f"round {round_} was decided without this replica")
            work, described = prepare(tensors)
            if write_inner is not None:  # Once it is known what the contribution leaves unsent.
                described["before_sending"] = partial(write_inner, work.base)
            tensors = at_usual_length(tensors, work, self._usual_steps)
            return self._exchange.exchange(round_, index, tensors, work, in_place=True, **described)

        def contribute(tensors: list[torch.Tensor]) -> None:
            work, described = prepare(tensors)
            if write_inner is not None:  # Last: a process that is to end may not get so far.
                described["after_sending"] = partial(write_inner, work.base)
            tensors = at_usual_length(tensors, work, self._usual_steps)
            self._exchange.contribute(round_, index, tensors, work, **described)

        return Sync(
            exchange,
            contribute=contribute,
            is_contributed=lambda: self._exchange.contributed == round_,
            # Again, where it is delayed: there have been inner steps since it began.
            on_wait=lambda: self.progress.enter("syncing"),
        )

    def _capture_inner(
        self, round_: int, fragment: int, now: Mark
    ) -> Callable[[str, Owed], None] | None:
        """Copy what goes into an inner checkpoint; what writes it, if there is to be one."""
        if self._inner is None or self.loop is None or not len(self.fragments):
            return None
        accounts = self._accounts.pending(self.fragments.turns, fragment, now)
        return self._inner.capture(self.loop, round_, fragment, accounts)

    def _report(self, done: Sync, result: RoundResult) -> RoundReport:
        commit = result.commit
        return RoundReport(
            round=commit.round,
            step=self._step,
            fragment=commit.fragment,
            decision=commit.decision if result.tensors is not None else "discard",
            participants=len(commit.contributors),
            seconds_blocked=done.seconds_blocked,
            seconds_exchange=done.seconds_exchange,
            usage=self.store.usage - self._usage,
            base=commit.base,
            progress=self.progress.snapshot(),
            metrics=dict(self.progress.metrics),
        )

    def _tell(self, report: RoundReport) -> None:
        """An observer's failure must not cost the outer step that is about to be taken."""
        if self.on_round is not None:
            try:
                self.on_round(report)
            except Exception:
                logger.exception("on_round failed after round %d", report.round)

    def _waiting_for(self, missing: list[int]) -> None:
        self.progress.waiting_for = missing
