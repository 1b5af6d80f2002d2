"""DiLoCo for Hugging Face's Trainer and all that derives from it (TRL's too).

trainer = Trainer(..., callbacks=[DiLoCoCallback(manager, sync_every=100)])
trainer.train()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco_cloud.outer.loop import OuterLoop
from diloco_cloud.outer.make import make_diloco_outer_loop
from diloco_cloud.outer.manager import MockManager

logger = logging.getLogger(__name__)


class DiLoCoCallback(TrainerCallback):
    """Attaches an outer loop when training begins and takes it off, after a final sync, at its end.

    ``train()`` may be called again: the outer momentum carries on. In a restarted replica the
    trainer takes the steps that remain of its ``max_steps``; give it its own checkpoint too
    (``resume_from_checkpoint``) to carry on with the inner optimizer, schedule and data.

    Args:
        manager: this replica's manager.
        fragments: splits the model; by default the whole model is one fragment.
        **settings: of :func:`diloco_cloud.outer.make_diloco_outer_loop`.

    Attributes:
        loop: the outer loop while training, else None.
    """

    def __init__(
        self,
        manager: MockManager,
        *,
        fragments: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
        **settings: Any,
    ) -> None:
        self.manager = manager
        self.loop: OuterLoop | None = None
        #: Inner steps that an earlier life of this replica has taken; the trainer begins at 0.
        self.resumed_steps = 0
        self._fragments = fragments
        self._settings = settings
        self._tokens_seen = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._detach(RuntimeError)  # A train() that raised never reached on_train_end.
        model: nn.Module = kwargs["model"]
        optimizer: torch.optim.Optimizer = kwargs["optimizer"]
        parts = [model] if self._fragments is None else self._fragments(model)
        self._tokens_seen = int(state.num_input_tokens_seen)
        self.loop = make_diloco_outer_loop(
            self.manager, parts, optimizer, model=model, **self._settings
        )
        done = self.loop.inner_steps_done if self.loop.joined else 0
        self.resumed_steps = max(0, done - state.global_step)
        if self.resumed_steps:
            logger.info("%d of %d steps were taken before", done, state.max_steps)
        if state.global_step + self.resumed_steps < state.max_steps:
            self.loop.__enter__()
        # Else the one step that the trainer takes all the same stays this replica's own, and goes
        # when the global parameters come back at the end.

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        taken = state.global_step + self.resumed_steps
        # The run can be ahead of a replica that is slower than the others, or was away.
        if self.loop is not None and self.loop.joined:
            taken = max(taken, self.loop.schedule_step)
        if taken >= state.max_steps:
            control.should_training_stop = True

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        seen = int(state.num_input_tokens_seen)
        self.manager.report(tokens=seen - self._tokens_seen)
        self._tokens_seen = seen

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        logs: dict[str, Any] = kwargs.get("logs") or {}
        if "loss" in logs:
            self.manager.progress.loss = float(logs["loss"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._detach(None)

    def _touch(self, *_: Any, **__: Any) -> None:
        """Between two steps, too, a replica that gets on with something is not hung."""
        self.manager.progress.touch()

    on_substep_end = on_prediction_step = on_evaluate = on_save = _touch

    def _detach(self, failure: type[BaseException] | None) -> None:
        if self.loop is not None:
            loop, self.loop = self.loop, None
            loop.__exit__(failure, None, None)
