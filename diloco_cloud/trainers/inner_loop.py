"""The steps of one replica between its start and the run's end, and what they report."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diloco_cloud.trainers.inner import (
    InnerSchedule,
    compute_gradients,
    perplexity,
    validation_loss,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from diloco_cloud.outer.loop import OuterLoop
    from diloco_cloud.outer.manager import MockManager
    from diloco_cloud.trainers.batches import BatchSampler
    from diloco_cloud.trainers.data import ReplicaData

logger = logging.getLogger(__name__)

#: Inner steps whose mean is reported as the training loss: single batches are noisy.
_TRAIN_LOSS_STEPS = 50


class MergedModelJudge:
    """Evaluates the merged model on the run's held-out sample.

    The model itself holds the merged parameters only where one fragment is synchronised without
    delay; the outer loop's copy is right always.

    Args:
        model: the replica's model.
        outer: keeps the global parameters.
        fragments: number of fragments the outer loop has.
        data: the held-out windows.
    """

    def __init__(
        self, model: PreTrainedModel, outer: OuterLoop, fragments: int, data: ReplicaData
    ) -> None:
        self._model = model
        self._outer = outer
        self._fragments = fragments
        self._data = data

    def judge(self, inner_step: int) -> dict[str, float]:
        """Loss (nats per token), perplexity and bits per byte after ``inner_step`` steps."""
        merged: dict[str, torch.Tensor] = {}
        for fragment in range(self._fragments):
            parameters, names = self._outer.global_parameters(fragment)
            merged.update(
                (name, parameter.to(self._model.device))
                for name, parameter in zip(names, parameters, strict=True)
            )
        loss = validation_loss(self._model, self._data.validation, parameters=merged)
        logger.info("validation loss %.4f after %d inner steps", loss, inner_step)
        return {
            "val_step": inner_step,
            "val_loss": loss,
            "val_perplexity": perplexity(loss),
            "val_bits_per_byte": loss / math.log(2) / self._data.bytes_per_token,
        }


def _recent() -> deque[float]:
    return deque(maxlen=_TRAIN_LOSS_STEPS)


@dataclass
class InnerLoop:
    """Runs inner steps; the outer loop, hooked to the optimizer, merges in between.

    Attributes:
        manager: told of every step.
        outer: knows where the run is, by which the learning rate and the end go: this replica may
            be slower than the others.
        model, optimizer, schedule, sampler: what is trained, how, and on what.
        gradient_clip: largest global gradient norm.
        judge: on the one rank that evaluates the merged model; None on the others.
    """

    manager: MockManager
    outer: OuterLoop
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    schedule: InnerSchedule
    sampler: BatchSampler
    gradient_clip: float
    judge: MergedModelJudge | None
    _verdict: dict[str, float] = field(default_factory=dict, init=False)
    _losses: deque[float] = field(default_factory=_recent, init=False)
    _steps: int = field(default=0, init=False)
    _seconds: float = field(default=0.0, init=False)

    def run(self, first_step: int) -> None:
        """Run to the schedule's end, with this rank's batches from ``first_step`` on.

        The merged model is judged after every merge.
        """
        if first_step == 0:
            self._judge(0)
        merged = self.manager.current_step()
        step = first_step
        while self.outer.schedule_step < self.schedule.total_steps:
            self._step(step)
            step += 1
            if self.manager.current_step() != merged:
                merged = self.manager.current_step()
                self._judge(self.outer.schedule_step)

    def finish(self) -> None:
        """Judge the final model, once the last sync has put it in place."""
        self._judge(self.schedule.total_steps)

    def result(self) -> dict[str, Any]:
        """What this process did: steps, tokens, speed, loss; and the last judgement."""
        tokens = self._steps * self._tokens_per_step
        return {
            "inner_steps": self.schedule.total_steps,
            "tokens": tokens,
            "tokens_per_second": tokens / self._seconds if tokens else 0.0,
            "train_loss": statistics.fmean(self._losses) if self._losses else None,
            **self._verdict,
        }

    @property
    def _tokens_per_step(self) -> int:
        return self.sampler.batch_size * self.sampler.sequence_length

    def _step(self, step: int) -> None:
        began = time.perf_counter()
        loss = compute_gradients(
            self.model,
            self.optimizer,
            self.sampler.batch(step).to(self.model.device),
            learning_rate=self.schedule.learning_rate(self.outer.schedule_step),
            gradient_clip=self.gradient_clip,
        )
        self._seconds += time.perf_counter() - began
        self._steps += 1
        self._losses.append(loss)
        self.manager.report(
            tokens=self._tokens_per_step,
            loss=loss,
            train_loss=statistics.fmean(self._losses),
            **self._verdict,
        )
        self.optimizer.step()

    def _judge(self, inner_step: int) -> None:
        if self.judge is not None and self._verdict.get("val_step") != inner_step:
            self._verdict = self.judge.judge(inner_step)
