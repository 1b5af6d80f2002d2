"""What the trainer counts and logs of its channels."""

from __future__ import annotations

from typing import Any

from diloco_cloud.composer.channels import ChannelLoss
from diloco_cloud.composer.hinted_rollouts import StepTokens
from diloco_cloud.composer.metrics import ChannelMetrics, Mode
from diloco_cloud.composer.trainer_base import grpo_trainer

_GRPOTrainer: Any = grpo_trainer()


class CountingTrainer(_GRPOTrainer):  # type: ignore[misc]  # or its stand-in
    """A GRPOTrainer that counts what channels learn from, and logs it beside TRL's figures.

    Attributes:
        activity: what each channel learnt from, by its name.
        tokens_trained: in all channels, by this process.
    """

    def _begin_counting(self) -> None:
        """What is counted from here on, over all calls of :meth:`train`."""
        self._figures = ChannelMetrics(self.accelerator)
        self.activity = self._figures.activity
        self._step_tokens = StepTokens(self.accelerator)
        self._micro_batches_done = 0
        self.tokens_trained = 0

    @property
    def _micro_batches(self) -> int:
        """What a mean over a micro-batch is divided by: TRL has switched HF's own scaling off."""
        return self.current_gradient_accumulation_steps if self.model.training else 1

    @property
    def _mode(self) -> Mode:
        return "train" if self.model.training else "eval"

    def _count(self, channel: str, found: ChannelLoss) -> tuple[float, int]:
        if self.model.training:
            self.tokens_trained += found.tokens
        return self._figures.add(channel, found, self._mode)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log TRL's figures and the channels'."""
        for name, value in self._figures.take(self._mode).items():
            self._metrics[self._mode][f"composer/{name}"].append(value)
        if self.model.training:
            for activity in self.activity.values():
                logs.update(activity.end_window())
        super().log(logs, start_time)
