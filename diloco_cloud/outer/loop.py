"""torchft's DiLoCo, with a beginning all replicas agree on and an end nothing is lost at."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from diloco_cloud.outer.join import join
from diloco_cloud.outer.manager import MockManager


class TrainableView(nn.Module):
    """The trainable parameters of a module, and nothing else.

    torchft's DiLoCo takes every parameter of the module it is given: a frozen base model would be
    backed up, sent and averaged.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.names: list[str] = []
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
        **settings: Any,
    ) -> None:
        try:
            super().__init__(
                manager, list(fragments), inner_optimizer, list(outer_optimizers), **settings
            )
            for fragment in self._fragments:
                # TORCHFT_USE_BUCKETIZATION overrides the argument, and bucketization drops tensors.
                fragment.use_bucketization = False
            self._attach()
        except BaseException:
            manager.fragments.clear(keep=False)
            raise

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
            )
        #: Whether the state came from the store, rather than from an earlier loop in this process.
        self.joined: bool = not self._manager.fragments.take_over()
        if self.joined:
            join(self._manager, self)
        self._restore_parameters()
        #: Inner steps whose work is in the global parameters this loop began with.
        self.inner_steps_done: int = self._manager.position
        self._inner_steps = 0
        self._synced_at = [0] * len(self._fragments)
        self._local_step = 0
        self._attached = self._sound = True

    # -- the inner loop ------------------------------------------------------------------------

    def __enter__(self) -> OuterLoop:
        if not self._attached:
            self._register_state_dict_fn()
            self._attach()
        super().__enter__()
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
        fragment = self._current_fragment()
        if self._local_step + 1 == self._sync_every - self._fragment_sync_delay:
            self._manager.position = self._steps_taken + self._fragment_sync_delay
        try:
            super()._step_post_hook(*args)
        except BaseException:
            self._return_to_global(fragment)
            raise
        if self._local_step == 0:
            self._synced_at[fragment] = self._inner_steps

    @property
    def _steps_taken(self) -> int:
        """Inner steps of this rank's data so far, in this life and those before it."""
        return self.inner_steps_done + self._inner_steps

    def finish(self) -> None:
        """Synchronise every fragment that trained since its last sync.

        The replicas' last steps would otherwise be lost, and they would end with parameters of
        their own.
        """
        fragment = self._current_fragment()
        if self._fragments[fragment]._allreduce_work:
            self._sync(fragment, prepare=False)
        for _ in self._fragments:
            fragment = self._current_fragment()
            if self._synced_at[fragment] == self._inner_steps:
                break
            self._sync(fragment, prepare=True)
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
        self._synced_at[fragment] = self._inner_steps

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
