"""The outer loop in the composer's trainer: what goes into contributions, and what is agreed."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerControl, TrainerState, TrainingArguments

from diloco_cloud.outer.callback import DiLoCoCallback
from diloco_cloud.outer.manager import MockManager

if TYPE_CHECKING:
    from diloco_cloud.composer.losses import TAIDScheduler
    from diloco_cloud.composer.trainer import ComposerReplicationTrainer

logger = logging.getLogger(__name__)

#: Logged figures that go into a round's metrics.
_REPORTED = ("reward", "kl", "entropy", "completions/mean_length")


class ComposerCallback(DiLoCoCallback):
    """DiLoCo for a :class:`ComposerReplicationTrainer`.

    Tokens are a replica's weight in the mean: all that channel 1's passes with a gradient have
    read, prompts included, and the response tokens that channels 2 and 3 have learnt from. They
    measure the work that is in a contribution. Completions alone would weigh a replica whose
    answers happen to be long more than its share of prompts. The policy version of a contribution
    is the number of outer steps in the oldest policy its rollouts came from.

    Args:
        manager: this replica's manager.
        taid: schedule whose ``t`` follows the agreed step of the run, the same on all replicas.
        **settings: of :class:`DiLoCoCallback`.

    Attributes:
        trainer: to be set once there is one.
    """

    trainer: ComposerReplicationTrainer

    def __init__(
        self, manager: MockManager, *, taid: TAIDScheduler | None = None, **settings: Any
    ) -> None:
        super().__init__(manager, **settings)
        self._taid = taid
        self._trained = 0
        self._contribution = -1

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if self.resumed_steps:
            _advance(kwargs["lr_scheduler"], self.resumed_steps)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._taid is not None and self.loop is not None:
            self.trainer.taid_t = self._taid.linear(self.loop.schedule_step)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trained = self.trainer.tokens_trained
        version = self.trainer.policy_version
        # A round that went without this replica has left its work for the next.
        contribution = self.manager.current_round() - self.manager.progress.missed
        if self._contribution == contribution:
            version = min(version, self.manager.policy_version)
        self._contribution = contribution
        self.manager.policy_version = version
        self.manager.report(tokens=trained - self._trained, policy_version=version)
        self._trained = trained

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_log(args, state, control, **kwargs)
        logs: dict[str, Any] = kwargs.get("logs") or {}
        for name, value in logs.items():
            reported = name in _REPORTED or name.startswith("composer/")
            if reported and isinstance(value, int | float) and math.isfinite(value):
                self.manager.progress.metrics[name] = float(value)


def _advance(scheduler: Any, steps: int) -> None:
    """Set a learning rate schedule where the trainer's earlier life has left it."""
    inner = getattr(scheduler, "scheduler", scheduler)  # accelerate's wrapper
    if not isinstance(inner, LambdaLR):
        logger.warning("%s begins anew in this life of the replica", type(inner).__name__)
        return
    inner.last_epoch = steps
    groups = zip(inner.optimizer.param_groups, inner.base_lrs, inner.lr_lambdas, strict=True)
    for group, base, factor in groups:
        group["lr"] = base * factor(steps)
