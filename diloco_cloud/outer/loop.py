"""torchft's DiLoCo, with a beginning all replicas agree on and an end nothing is lost at."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from diloco_cloud.errors import CorruptError, ExchangeError
from diloco_cloud.outer.embeddings import are_embeddings
from diloco_cloud.outer.inner import Checkpoint
from diloco_cloud.outer.join import follow, join, rejoin
from diloco_cloud.outer.local_state import LocalState
from diloco_cloud.outer.manager import MockManager
from diloco_cloud.outer.own import OwnParts

logger = logging.getLogger(__name__)

#: Final syncs per fragment before a replica that misses them all gives up.
_FINAL_TRIES = 20


class TrainableView(nn.Module):
    """The trainable parameters of a module, and nothing else.

    torchft's DiLoCo takes every parameter of the module it is given: a frozen base model would be
    backed up, sent and averaged.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.names: list[str] = []
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.embeddings = are_embeddings([module], trained)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self.names.append(name)
                # Parameter names cannot contain dots; the index keeps them distinct.
                self.register_parameter(f"p{len(self.names) - 1}", parameter)


class OuterLoop(DiLoCo):  # type: ignore[misc]  # torchft ships no types
    """A torchft DiLoCo; use it as a context manager around the inner loop.

    Entering registers step hooks on the inner optimizer. Leaving without an exception synchronises
    what is not synchronised yet, so that the model holds the global parameters. Built by
    :func:`diloco_cloud.outer.make_diloco_outer_loop`, which checks its arguments.
    """

    def __init__(
        self,
        manager: MockManager,
        fragments: Sequence[TrainableView],
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizers: Sequence[torch.optim.Optimizer],
        *,
        modules: Sequence[nn.Module] = (),
        **settings: Any,
    ) -> None:
        try:
            super().__init__(
                manager, list(fragments), inner_optimizer, list(outer_optimizers), **settings
            )
            for fragment in self._fragments:
                # TORCHFT_USE_BUCKETIZATION overrides the argument, and bucketization drops tensors.
                fragment.use_bucketization = False
            self._own = self._own_parts(fragments, modules)
            self._attach()
        except BaseException:
            manager.fragments.clear(keep=False)
            raise

    def _own_parts(
        self, fragments: Sequence[TrainableView], modules: Sequence[nn.Module]
    ) -> OwnParts:
        delay, alpha = self._fragment_sync_delay, self._fragments[0]._fragment_update_alpha
        return OwnParts(
            self._local_optimizer,
            [dict(zip(view.names, view.parameters(), strict=True)) for view in fragments],
            modules,
            schedule=[len(fragments), self._sync_every, delay, alpha],
            keeps_own=delay > 0 or alpha > 0,
        )

    @property
    def interval(self) -> int:
        """Inner steps between two rounds (sync_every divided by the number of fragments)."""
        return int(self._sync_every)

    def _attach(self) -> None:
        """Describe the registered fragments to the manager, and begin with the agreed state."""
        for key, fragment in zip(self._manager.fragments.fns, self._fragments, strict=True):
            self._manager.fragments.describe(
                key,
                fragment._model_fragment.names,
                list(fragment.original_parameters.values()),
                fragment._outer_optimizer,
                embeddings=fragment._model_fragment.embeddings,
            )
        #: Whether the state came from the store, rather than from an earlier loop in this process.
        self.joined: bool = not self._manager.fragments.take_over()
        self._manager.loop = self
        self._manager.pace(
            steps=self.interval * len(self._fragments), overlap=self._fragment_sync_delay
        )
        if self.joined:
            join(self._manager, self)
            self._manager.begin_anew()
        self._restore_parameters()
        #: Inner steps whose work is in the global parameters this loop began with.
        self.inner_steps_done: int = self._manager.position
        self._inner_steps = 0
        self._synced_at = [0] * len(self._fragments)
        self._local_step = 0
        self._missed = False
        #: A round whose outer step was taken in joining, and whose merge is still to come.
        self._unmerged: Checkpoint | None = None
        self._random: LocalState | None = None
        found = self._manager.inner_checkpoint() if self.joined else None
        if found is not None:
            self._take_up(found)
        self._attached = self._sound = True

    # -- the inner loop ------------------------------------------------------------------------

    def __enter__(self) -> OuterLoop:
        if not self._attached:
            self._register_state_dict_fn()
            self._attach()
        super().__enter__()
        if self._random is not None:
            # Here rather than in joining, after which a trainer may still be setting things up.
            self._own.restore_random(self._random)
            self._random = None
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        super().__exit__(exc_type, exc_value, traceback)
        try:
            if exc_type is None:
                self.finish()
            elif self._fragments[fragment := self._current_fragment()]._allreduce_work:
                self._return_to_global(fragment)
        finally:
            self._manager.fragments.clear(keep=self._sound)
            self._attached = False
        return False

    def _step_post_hook(self, *args: Any) -> None:
        self._inner_steps += 1
        if self._unmerged is not None:
            self._local_step += 1
            if self._local_step == self._sync_every or self._manager.is_handing_over:
                self._merge(self._unmerged)
            if not self._manager.is_handing_over:
                return
        fragment = self._current_fragment()
        if self._manager.is_handing_over:
            self._hand_over(fragment)
        steps_left = self._steps_to_send
        if steps_left > 1 and self._manager.closing(steps_left - 1):
            self._local_step = self._sync_every - self._fragment_sync_delay - 1
        if self._steps_to_send == 1:
            self._manager.position = self._steps_taken + self._fragment_sync_delay
        try:
            super()._step_post_hook(*args)
        except BaseException:
            self._return_to_global(fragment)
            raise
        if self._local_step == 0:
            self._note_sync(fragment)

    @property
    def _steps_to_send(self) -> int:
        """Inner steps from before the one just taken to the next contribution; 0 or less after."""
        return int(self._sync_every - self._fragment_sync_delay - self._local_step)

    @property
    def _steps_taken(self) -> int:
        """Inner steps of this rank's data so far, in this life and those before it."""
        return self.inner_steps_done + self._inner_steps

    @property
    def schedule_step(self) -> int:
        """Where the run is, in inner steps: the intervals that all have behind them, and this one.

        The same as this replica's own steps unless it is faster or slower than the others, or was
        away. Learning rates, and the end of the training, go by it.
        """
        steps = self._manager.current_step()
        if self._unmerged is not None and self._unmerged.applied:
            steps -= 1
        return int(steps * self._sync_every + self._local_step)

    def _hand_over(self, fragment: int) -> None:
        """Contribute what there is, wait for nothing, and end."""
        syncing = bool(self._fragments[fragment]._allreduce_work)
        if not syncing and self._synced_at[fragment] != self._inner_steps:
            self._manager.position = self._steps_taken
            self._manager.start_quorum()
            self._fragments[fragment].prepare_sync()
        self._manager.hand_over()

    def finish(self) -> None:
        """Synchronise every fragment that trained since its last sync.

        The replicas' last steps would otherwise be lost, and they would end with parameters of
        their own.
        """
        if self._unmerged is not None:
            self._merge(self._unmerged)
        fragment = self._current_fragment()
        if self._fragments[fragment]._allreduce_work:
            self._sync(fragment, prepare=False)
        for _ in range(_FINAL_TRIES * len(self._fragments)):
            fragment = self._current_fragment()
            if self._synced_at[fragment] == self._inner_steps:
                break
            self._sync(fragment, prepare=True)
        else:
            raise ExchangeError(
                "the last rounds were decided without this replica, again and again",
                fix="Its link to the store is too slow for the others: give a longer --grace.",
            )
        self._restore_parameters()
        self._local_step = 0
        self._manager.position = self._steps_taken

    def _sync(self, fragment: int, *, prepare: bool) -> None:
        try:
            if prepare:
                self._manager.position = self._steps_taken
                self._manager.start_quorum()
                self._fragments[fragment].prepare_sync()
            self._fragments[fragment].perform_sync()
        except BaseException:
            self._return_to_global(fragment)
            raise
        self._note_sync(fragment)

    def _note_sync(self, fragment: int) -> None:
        """A sync has ended: its fragment's work is in the global parameters, unless it missed."""
        if not self._missed:
            self._synced_at[fragment] = self._inner_steps
        self._missed = False

    def catch_up(self, fragment: int, *, keep: bool) -> None:
        """Take over the run's newest state in the middle of a sync that went without this replica.

        The local progress, which is what training has changed since the last sync, is kept: it is
        added to the new global parameters, and goes into the next contribution. Not so that of the
        fragment in hand where the round went with this replica's work after all.

        Args:
            fragment: whose sync it is.
            keep: False to drop the fragment's progress, and to trust no state that is here.
        """
        progress = [self._local_progress(i, syncing=fragment) for i in range(len(self._fragments))]
        (follow if keep else rejoin)(self._manager, self)
        self._restore_parameters()
        self._missed = keep and not self._manager.settle_by_ledger(fragment)
        with torch.no_grad():
            for index, changes in enumerate(progress):
                if index != fragment or self._missed:
                    for parameter, change in changes.items():
                        parameter.add_(change.to(parameter.device))

    def _local_progress(
        self, index: int, *, syncing: int
    ) -> dict[torch.nn.Parameter, torch.Tensor]:
        """By parameter of a fragment: how far training has taken it from the global one; on CPU."""
        fragment = self._fragments[index]
        found: dict[torch.nn.Parameter, torch.Tensor] = {}
        for name, parameter in fragment._model_fragment.named_parameters():
            # torchft has put the global parameters back into the fragment that it syncs.
            local = fragment._local_parameters[name] if index == syncing else parameter.detach()
            found[parameter] = local.cpu() - fragment.original_parameters[name]
        return found

    def _return_to_global(self, fragment: int) -> None:
        """Undo a sync that an error cut short.

        The model then holds the last global parameters, as after a discarded round. Whether they
        are the run's newest is not known here, so that going on means joining anew.
        """
        failed = self._fragments[fragment]
        failed._allreduce_work = []
        failed._grads.clear()
        failed._clear_local_parameters()
        failed._outer_optimizer.zero_grad()
        self._restore_parameters()
        self._manager.abandon_sync()
        self._local_step = 0
        self._sound = False

    # -- from one life to the next -------------------------------------------------------------

    def local_state(self, fragment: int) -> LocalState:
        """A copy of what this replica has for itself, while it contributes ``fragment``.

        Raises:
            TypeError: there is something that cannot be stored.
        """
        return self._own.capture(
            fragment,
            position=self._steps_taken,
            # The manager's position counts the steps that a delayed merge overlaps.
            unmerged=self._manager.position - self._steps_taken,
            unsynced=tuple(self._inner_steps - synced_at for synced_at in self._synced_at),
        )

    def _take_up(self, found: Checkpoint) -> None:
        """Go on where an earlier life of this rank was when it contributed to the last round.

        The outer step of that round has been taken. What is left of it is to merge its fragment:
        at once, or after the inner steps that the merge is delayed by, which are done again.
        """
        local = found.local
        try:
            self._own.restore(local, found.fragment)
        except CorruptError as error:
            logger.warning("an inner checkpoint is of no use: %s", error.message)
            return
        self._manager.inherit(found)
        self.inner_steps_done = local.position
        self._synced_at = [-steps for steps in local.unsynced]
        self._local_step = self._sync_every - local.unmerged
        self._unmerged, self._random = found, local
        if local.unmerged == 0:
            self._merge(found)
        logger.info("going on with the inner state of round %d's contribution", found.round)

    def _merge(self, found: Checkpoint) -> None:
        """Do with the last round's fragment what the earlier life would have done."""
        self._unmerged = None
        fragment = self._fragments[found.fragment]
        fragment._save_local_parameters()
        fragment.restore_parameters()
        if found.applied:
            fragment._merge_parameters()
        fragment._clear_local_parameters()
        self._local_step = 0
        self._note_sync(found.fragment)

    # -- global parameters ---------------------------------------------------------------------

    def global_parameters(self, fragment: int) -> tuple[list[torch.Tensor], list[str]]:
        """Global parameters of a fragment (not copied), and their names."""
        chosen = self._fragments[fragment]
        return list(chosen.original_parameters.values()), chosen._model_fragment.names

    def apply(self, fragment: int, means: Sequence[torch.Tensor]) -> None:
        """Take the outer step of a round that was decided without this replica.

        Args:
            fragment: whose round it was.
            means: the agreed mean pseudo-gradients, in the order of :meth:`global_parameters`.
        """
        chosen = self._fragments[fragment]
        chosen.restore_parameters()
        parameters = dict(chosen._model_fragment.named_parameters())
        for (name, parameter), mean in zip(parameters.items(), means, strict=True):
            chosen._grads[name] = mean.to(parameter.device)
        chosen._set_grads()
        chosen._outer_optimizer.step()
        chosen._outer_optimizer.zero_grad()
        chosen.save_parameters()
