"""What the replicas of ``outer_horizon.py`` train: two real models, small enough for one core."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Protocol

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from diloco_cloud.chaos.task import Language, TinyModel, batch_seed
from diloco_cloud.trainers.data import TextOptions, prepare_data
from diloco_cloud.trainers.inner import validation_loss
from diloco_cloud.trainers.model import ModelShape, build_model


class Task(Protocol):
    """A model, its data and what it is judged on; all follow from the seed."""

    model: nn.Module

    def batch(self, rank: int, step: int) -> tuple[torch.Tensor, ...]:
        """What a rank sees at inner step ``step``."""

    def training_loss(
        self, parameters: Mapping[str, torch.Tensor], *batch: torch.Tensor
    ) -> torch.Tensor:
        """Of a batch."""

    def loss(self, parameters: Mapping[str, torch.Tensor]) -> float:
        """What the parameters are worth, in nats per token."""


class LanguageTask:
    """The rehearsals' second-order Markov language; its loss is exact, without sampling noise."""

    def __init__(self, seed: int, replicas: int) -> None:
        self._seed = seed
        self._language = Language.make(24, seed)
        torch.manual_seed(seed)
        self.model = TinyModel(24, 24)

    def batch(self, rank: int, step: int) -> tuple[torch.Tensor, ...]:
        return self._language.batch(64, seed=batch_seed(self._seed, rank, step))

    def training_loss(
        self, parameters: Mapping[str, torch.Tensor], *batch: torch.Tensor
    ) -> torch.Tensor:
        contexts, following = batch
        logits = functional_call(self.model, dict(parameters), contexts)
        return functional.cross_entropy(logits, following)

    def loss(self, parameters: Mapping[str, torch.Tensor]) -> float:
        return self._language.loss(self.model, parameters)


class TextTask:
    """The default trainer's model, two layers of width 48, on bytes of the standard library."""

    def __init__(self, seed: int, replicas: int) -> None:
        options = TextOptions(
            text=None,
            tokenizer="byte",
            vocabulary_size=0,
            batch_size=4,
            sequence_length=64,
            validation_fraction=0.1,
            validation_sequences=512,
        )
        self._data = [
            prepare_data(options, rank=rank, world_size=replicas, seed=seed)
            for rank in range(replicas)
        ]
        shape = ModelShape(
            architecture="llama",
            vocabulary_size=self._data[0].tokenizer.vocabulary_size,
            sequence_length=64,
            hidden_size=48,
            layers=2,
            heads=3,
            intermediate_size=128,
            tie_embeddings=True,
        )
        self.model: nn.Module = build_model(shape, seed=seed)
        # The fused attention has no rule for several models at once.
        self.model.set_attn_implementation("eager")

    def batch(self, rank: int, step: int) -> tuple[torch.Tensor, ...]:
        return (self._data[rank].sampler.batch(step),)

    def training_loss(
        self, parameters: Mapping[str, torch.Tensor], *batch: torch.Tensor
    ) -> torch.Tensor:
        (windows,) = batch
        inputs = {"input_ids": windows[:, :-1], "use_cache": False}
        logits = functional_call(self.model, dict(parameters), kwargs=inputs).logits
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def loss(self, parameters: Mapping[str, torch.Tensor]) -> float:
        return validation_loss(self.model, self._data[0].validation, parameters=dict(parameters))


TASKS = {"language": LanguageTask, "text": TextTask}


@cache
def task(name: str, seed: int, replicas: int) -> Task:
    """A task, made once: reading the text takes a second."""
    return TASKS[name](seed, replicas)
