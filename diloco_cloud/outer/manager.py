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
from typing import Any

import torch

from diloco_cloud import keys
from diloco_cloud.errors import ExchangeError
from diloco_cloud.exchange.agreement import Watch
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.layout import TensorLayout, digest_tensors
from diloco_cloud.exchange.rounds import RoundResult
from diloco_cloud.outer.fragments import Fragments
from diloco_cloud.outer.progress import Progress, RoundReport
from diloco_cloud.outer.result import add_files, export
from diloco_cloud.outer.snapshot import SnapshotWriter
from diloco_cloud.outer.start import declared_start
from diloco_cloud.outer.state import FragmentState, StateFns
from diloco_cloud.outer.sync import Sync
from diloco_cloud.outer.work import _ImmediateWork
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

#: Rounds in a row without a usable mean after which going on is pointless.
MAX_DISCARDS = 5


class MockManager:
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

    Attributes:
        store: as given.
        rank: of this replica.
        progress: where this replica is.
        fragments: what the outer loop has registered.
        position: inner steps of this rank's data behind it once the sync that begins next is
            merged; the outer loop keeps it.
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
    ) -> None:
        door = store if store is not None else allreduce
        if door is None:
            raise TypeError("MockManager needs an ObjectStoreAllReduce")
        self.store = door
        self.rank = door.rank
        self.progress = Progress()
        self.position = 0
        self.on_round = on_round
        self._init_from = init_from
        self._exchange = door.exchange
        self._exchange.waiting_for = self._waiting_for
        self._step = 0
        self._round = door.round_id
        self._discards = 0
        self._sync: Sync | None = None
        self._usage = door.usage
        self.fragments = Fragments()
        self._left = False
        self._snapshots = SnapshotWriter(
            door.prefix, rank=door.rank, writer=self.life, every=snapshot_every
        )

    # -- what torchft calls --------------------------------------------------------------------

    def num_participants(self) -> int:
        """Replicas the next round waits for."""
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

    def start_quorum(self) -> None:
        """Begin a sync."""
        if self._sync is not None:
            raise ExchangeError("a sync began before the last one ended")
        # At the end of training syncs follow one another without inner steps in between, and the
        # state that is due is that before this one.
        self._snapshots.write_due(self.fragments.capture)
        self.progress.phase = "syncing"

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
        if done.error is not None:
            raise done.error
        assert done.result is not None
        committed = done.result.tensors is not None
        self.progress.mark_round()
        report = self._report(done, done.result)
        self._round += 1
        if committed:
            self._step += 1
            self._discards = 0
        else:
            self._discards += 1
            logger.warning("round %d is discarded: %s", report.round, done.result.reason)
        if committed and len(self.fragments):
            self._snapshots.schedule(done.result.commit, self._step)
        elif committed and self.rank == done.result.commit.contributors[0].rank:
            # Without a state to snapshot nobody can join later, and old rounds serve nobody.
            self.store.discard(report.round - 1)
        self.progress.round, self.progress.step = self._round, self._step
        self.progress.excluded = done.result.commit.reason_for(self.rank)
        self._tell(report)
        if self._discards >= MAX_DISCARDS:
            raise ExchangeError(
                f"{MAX_DISCARDS} rounds in a row had nothing to average: {done.result.reason}",
                fix="If it is NaN, training has diverged: lower the learning rate, clip gradients.",
            )
        return committed

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

    # -- what the outer loop and the entrypoint call -------------------------------------------

    @property
    def prefix(self) -> ObjectStore:
        """The run's prefix, for what is not part of a round."""
        return self.store.prefix

    @property
    def life(self) -> str:
        """This life of this rank, as it appears in keys."""
        return keys.life(self.rank, self._exchange.attempt)

    def first_states(self) -> list[FragmentState]:
        """What a new run begins with."""
        if self._init_from is None:
            return self.fragments.capture()
        return declared_start(self._init_from, list(self.fragments))

    def global_digest(self) -> str | None:
        """Hex BLAKE3 over the global parameters of all fragments; None if there are none."""
        return self.fragments.digest()

    def watch(self) -> Watch:
        """A watch for the next wait on peers."""
        return self._exchange.watch()

    def replay(self, commit: Commit, layout: TensorLayout) -> list[torch.Tensor] | None:
        """The agreed means of an earlier round; None if there was nothing to apply."""
        return self._exchange.replay(commit, layout).tensors

    def await_decision(
        self, round_: int, fragment: int, key: str, finished: tuple[int, ...]
    ) -> Commit:
        """Wait for the decision of a round that this rank has contributed to under ``key``."""
        self._exchange.finished = finished
        self.progress.phase = "syncing"
        return self._exchange.await_decision(round_, fragment, key)

    def resume_at(self, round_: int, step: int, finished: tuple[int, ...], position: int) -> None:
        """Continue after ``round_`` decisions, ``step`` outer steps and ``position`` inner ones."""
        self._round, self._step = round_, step
        self._exchange.finished = finished
        self.position = position
        self.progress.resume(round_, step, position)

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
            if finished and not self._left:
                self._leave()
        finally:
            self._exchange.interrupt()

    # -- inside --------------------------------------------------------------------------------

    def _leave(self) -> None:
        if self.fragments.lost:
            raise ExchangeError(
                "the last sync failed, and training did not go on from it",
                fix="Let the error of a sync end the trainer, so that the replica can be resumed.",
            )
        self.progress.phase = "finishing"
        states = self.fragments.states()
        self._snapshots.write_due(lambda: states)
        self._snapshots.flush()
        self._left = True
        last = self._exchange.leave(self._round, self._step % self.fragments.turns)
        if last and states:
            export(self.prefix, states, round_=self._round, step=self._step)

    def _new_sync(self) -> Sync:
        """A sync of the fragment whose turn it is, as things stand in the training thread now."""
        round_, index, position = self._round, self._step % self.fragments.turns, self.position
        tokens, steps = self.progress.take_counts(index)
        self._usage = self.store.usage

        def exchange(tensors: list[torch.Tensor]) -> RoundResult:
            # Global parameters stand still from the start of a sync to its end.
            parameters, names = self.fragments.globals_of(index)
            return self._exchange.exchange(
                round_,
                index,
                tensors,
                names=names if len(names) == len(tensors) else None,
                base=digest_tensors(parameters) if parameters else "",
                tokens=tokens,
                inner_steps=steps,
                position=position,
            )

        return Sync(exchange)

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
