"""The Manager that torchft's DiLoCo talks to, with a bucket behind it instead of a lighthouse.

    store = ObjectStoreAllReduce("s3://bucket/run", rank=0, world_size=4)
    manager = MockManager(store)
    with make_diloco_outer_loop(manager, [model], optimizer, sync_every=100):
        ...

It keeps torchft's semantics: the step advances on commit only, a discarded round sends everybody
back to the last global parameters and is tried again, and ``should_commit`` is the decision all
replicas agreed on. It is a manager for DiLoCo and LocalSGD, not for other uses of torchft.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from diloco_cloud.errors import ExchangeError, LayoutMismatchError
from diloco_cloud.exchange.agreement import Watch
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.layout import TensorLayout, digest_tensors
from diloco_cloud.exchange.rounds import RoundResult
from diloco_cloud.outer.progress import Progress, RoundReport
from diloco_cloud.outer.result import export, global_digest
from diloco_cloud.outer.snapshot import SnapshotWriter
from diloco_cloud.outer.state import FragmentState, StateFns, capture, restore
from diloco_cloud.outer.sync import Sync
from diloco_cloud.outer.work import _ImmediateWork
from diloco_cloud.store.base import ObjectStore

logger = logging.getLogger(__name__)

#: Prefix of the keys under which torchft's DiLoCo registers its fragments, before their index.
FRAGMENT_KEY = "StreamingDiLoCoFragment_"
#: Rounds in a row without a usable contribution after which training has diverged for good.
MAX_DISCARDS = 5


class MockManager:
    """A torchft Manager over an :class:`ObjectStoreAllReduce`.

    All ``allreduce`` calls of one sync become one object and one round. The exchange runs in a
    background thread from the first ``wait()``, or from the next inner step when the outer loop
    delays the sync; that thread touches host memory only.

    Args:
        store: the rank's door to the run. ``allreduce=`` is accepted as its older name.
        snapshot_every: rounds between two snapshots of the outer state.
        on_round: called with a :class:`RoundReport` after every decision.

    Attributes:
        rank: of this replica.
        progress: where this replica is.
    """

    #: torchft's DiLoCo refuses a manager whose quorum is asynchronous.
    _use_async_quorum = False

    def __init__(
        self,
        store: ObjectStoreAllReduce | None = None,
        *,
        allreduce: ObjectStoreAllReduce | None = None,
        snapshot_every: int = 5,
        on_round: Callable[[RoundReport], None] | None = None,
    ) -> None:
        door = store if store is not None else allreduce
        if door is None:
            raise TypeError("MockManager needs an ObjectStoreAllReduce")
        self.store = door
        self.rank = door.rank
        self.progress = Progress()
        self.on_round = on_round
        self._exchange = door.exchange
        self._exchange.waiting_for = self._waiting_for
        self._step = 0
        self._round = door.round_id
        self._discards = 0
        self._open: Sync | None = None
        self._state_dict_fns: dict[str, StateFns] = {}
        self._detached: dict[str, FragmentState] = {}
        self._results: dict[str, bytes] = {}
        self._names: dict[str, list[str]] = {}
        self._left = False
        self._thread = ThreadPoolExecutor(1, "diloco-exchange")
        self._usage = door.store.usage
        self._snapshots = SnapshotWriter(
            door.prefix, rank=door.rank, attempt=door.exchange.attempt, every=snapshot_every
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
        assert key not in self._state_dict_fns, f"{key} is registered already"
        self._state_dict_fns[key] = (load_fn, save_fn)

    def disallow_state_dict_read(self) -> None:
        """Called before every inner step: sends off a delayed sync, and a snapshot that is due."""
        if self._open is not None:
            self._open.send()
        self._snapshots.write_due(self.capture)

    def allow_state_dict_read(self) -> None:
        """Called after every inner step; outer state is read in the training thread only."""

    def start_quorum(self) -> None:
        """Begin a sync."""
        if self._open is not None:
            raise ExchangeError("a sync began before the last one ended")
        self.progress.phase = "syncing"

    def wait_quorum(self) -> None:
        """Membership is decided by each round's commit; there is nothing to wait for here."""

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> _ImmediateWork:
        """Add ``tensor`` to the open sync; ``wait()`` of the returned work fills in the mean.

        Args:
            tensor: floating point, any device; replaced in place by the agreed mean.
            should_quantize: must be False: how contributions are encoded is a setting of the run.
        """
        if should_quantize:
            raise ValueError("should_quantize is not supported: encoding is a setting of the run")
        if self._open is None or self._open.sent:
            self._open = self._new_sync()
        return self._open.add(tensor)

    def should_commit(self) -> bool:
        """The agreed decision on the open sync.

        torchft has put the last global parameters back by the time it asks, so an error raised
        here leaves the model in a state all replicas share.

        Raises:
            ExchangeError: the round failed, or too many rounds in a row were discarded.
            StoreError: the store failed beyond retrying.
        """
        done = self._open
        if done is None:
            raise ExchangeError("should_commit was asked without an allreduce before it")
        done.deliver()
        self._open = None
        if done.error is not None:
            raise done.error
        assert done.result is not None
        commit = done.result.commit
        self.progress.mark_round()
        report = self._report(done)
        self._round += 1
        committed = commit.decision == "commit"
        if committed:
            self._step += 1
            self._discards = 0
            self._snapshots.schedule(commit, self._step)
        else:
            self._discards += 1
            logger.warning("round %d was discarded: %s", commit.round, commit.reason)
        excluded = [e.reason for e in commit.excluded if e.rank == self.rank]
        self.progress.excluded = excluded[0] if excluded else None
        self.progress.round, self.progress.step = self._round, self._step
        if self.on_round is not None:
            self.on_round(report)
        if self._discards >= MAX_DISCARDS:
            raise ExchangeError(
                f"{MAX_DISCARDS} rounds in a row had nothing to average: {commit.reason}",
                fix="Training has diverged; lower the learning rate or clip gradients.",
            )
        return committed

    # -- what trainers call --------------------------------------------------------------------

    def report(self, *, tokens: int = 0, loss: float | None = None, **metrics: float) -> None:
        """Count one inner step.

        Args:
            tokens: processed in it; the replica's weight in the next mean.
            loss: of the step.
            metrics: further figures; the last value of each goes into the round's metrics.
        """
        self.progress.report(tokens, loss, metrics)

    def save_result(self, files: Mapping[str, bytes]) -> None:
        """Files to be stored beside the final parameters, by name; the last replica writes them."""
        self._results.update(files)

    # -- what the outer loop and the entrypoint call -------------------------------------------

    @property
    def fragments(self) -> int:
        """Fragments that are synchronised in turn."""
        return max(1, len(self._state_dict_fns))

    def capture(self) -> list[FragmentState]:
        """Copies of the outer state of all fragments, in order."""
        return [
            capture(key, save_fn(), self._names.get(key))
            for key, (_, save_fn) in self._state_dict_fns.items()
        ]

    def states(self) -> list[FragmentState]:
        """The outer state, also after the loop has been detached."""
        return self.capture() or list(self._detached.values())

    def global_digest(self) -> str | None:
        """Hex BLAKE3 over the global parameters of all fragments; None if there are none."""
        states = self.states()
        return global_digest(states) if states else None

    @property
    def prefix(self) -> ObjectStore:
        """The run's prefix, for what is not part of a round."""
        return self.store.prefix

    @property
    def writer(self) -> str:
        """This life of this rank, as it appears in keys."""
        return f"{self.rank:04d}.{self._exchange.attempt:04d}"

    def watch(self) -> Watch:
        """A watch for the next wait on peers."""
        return self._exchange.watch()

    def state_fns(self, key: str) -> StateFns:
        """How to write and read a fragment's outer state."""
        return self._state_dict_fns[key]

    def name_tensors(self, key: str, names: Sequence[str]) -> None:
        """Tell the names of a fragment's tensors, in its order."""
        self._names[key] = list(names)

    def replay(self, commit: Commit, layout: TensorLayout) -> list[torch.Tensor]:
        """The agreed means of an earlier round."""
        return self._exchange.replay(commit, layout)

    def resume_at(self, round_: int, step: int, finished: tuple[int, ...], inner: int) -> None:
        """Continue after ``round_`` decisions and ``step`` outer steps."""
        self._round, self._step = round_, step
        self._exchange.finished = finished
        self.progress.round, self.progress.step = round_, step
        self.progress.inner_step = inner
        self.progress.mark_round()

    def reattach(self) -> bool:
        """Give a new outer loop the state its predecessor in this process left, if there is one.

        Raises:
            LayoutMismatchError: the new loop's fragments are not the old ones'.
        """
        states, self._detached = self._detached, {}
        if not states:
            return False
        if states.keys() != self._state_dict_fns.keys():
            raise LayoutMismatchError("the second outer loop has other fragments than the first")
        for key, state in states.items():
            restore(state, self._state_dict_fns[key])
        return True

    def abandon_round(self) -> None:
        """Drop the open sync after an error; the exchange itself may still be running."""
        self._open = None

    def detach(self) -> None:
        """Forget the registered fragments but keep their state, for a next outer loop."""
        self._detached = {state.key: state for state in self.states()}
        self._state_dict_fns.clear()

    def shutdown(self, *, finished: bool = False) -> None:
        """Stop the background work.

        Args:
            finished: the replica's training is complete: leave the run, so that nobody waits for
                this rank, and export the result if everybody else has left.
        """
        try:
            if finished and not self._left:
                self._leave()
        finally:
            self._exchange.stop()
            self._snapshots.close()
            self._thread.shutdown(cancel_futures=True)

    # -- inside --------------------------------------------------------------------------------

    def _leave(self) -> None:
        self.progress.phase = "finishing"
        states = self.states()
        self._snapshots.write_due(lambda: states)
        self._snapshots.flush()
        self._left = True
        if self._exchange.leave(self._round, self._step % max(1, len(states))):
            export(self.prefix, states, self._results, round_=self._round, step=self._step)

    def _new_sync(self) -> Sync:
        """A sync of the fragment whose turn it is, as things stand in the training thread now."""
        round_, fragment = self._round, self._step % self.fragments
        tokens, steps = self.progress.take_counts()
        key = f"{FRAGMENT_KEY}{fragment}"
        save = self._state_dict_fns[key][1] if key in self._state_dict_fns else None
        self._usage = self.store.store.usage

        def exchange(tensors: list[torch.Tensor]) -> RoundResult:
            # Global parameters stand still from the start of a sync to its end.
            saved = save()["original_parameters"] if save is not None else {}
            names = self._names.get(key) or list(saved)
            return self._exchange.exchange(
                round_,
                fragment,
                tensors,
                names=names if len(names) == len(tensors) else None,
                base=digest_tensors(list(saved.values())) if saved else "",
                tokens=tokens,
                inner_steps=steps,
            )

        return Sync(exchange, self._thread)

    def _report(self, done: Sync) -> RoundReport:
        assert done.result is not None
        commit = done.result.commit
        return RoundReport(
            round=commit.round,
            step=self._step,
            fragment=commit.fragment,
            decision=commit.decision,
            participants=len(commit.contributors),
            seconds_blocked=done.seconds_blocked,
            seconds_exchange=done.seconds_exchange,
            usage=self.store.store.usage - self._usage,
            base=commit.base,
            progress=self.progress.snapshot(),
            metrics=dict(self.progress.metrics),
        )

    def _waiting_for(self, missing: list[int]) -> None:
        self.progress.waiting_for = missing
