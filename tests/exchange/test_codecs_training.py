"""What codecs do to training: softmax regression by four replicas, each with its own data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch.nn import functional

from diloco_cloud.exchange.codecs import get_codec
from diloco_cloud.exchange.codecs.base import Codec
from diloco_cloud.exchange.codecs.feedback import Feedback

#: One block of 4096 parameters, of which sparse sends 64 each round: 200 rounds send each thrice.
INPUTS = CLASSES = 64
REPLICAS, ROUNDS, STEPS, BATCH, PEAK_LR = 4, 200, 4, 32, 0.75

Examples = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices are multiplied faster so, most of all where processors are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def _examples(seed: int, count: int) -> Examples:
    """Inputs, and classes drawn as one and the same linear model says."""
    teacher = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(7)) * 0.4
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, INPUTS, generator=draw)
    return inputs, (inputs @ teacher).softmax(1).multinomial(1, generator=draw)[:, 0]


def _gradient(weights: torch.Tensor, inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Of the mean cross-entropy."""
    chances = (inputs @ weights).softmax(1)
    chances[torch.arange(len(classes)), classes] -= 1
    return inputs.T @ chances / len(classes)


def _inner_steps(shared: torch.Tensor, rank: int, round_: int) -> torch.Tensor:
    """One replica's pseudo-gradient, flat."""
    inputs, classes = _examples(rank, ROUNDS * STEPS * BATCH)
    weights = shared.view(INPUTS, CLASSES)
    for step in range(round_ * STEPS, (round_ + 1) * STEPS):
        batch = slice(step * BATCH, (step + 1) * BATCH)
        rate = PEAK_LR * (1 - round_ / ROUNDS)
        weights = weights - rate * _gradient(weights, inputs[batch], classes[batch])
    return shared - weights.view(-1)


def _as_it_travels(codec: Codec, mean: torch.Tensor) -> torch.Tensor:
    """The mean that a sharded round applies, whose sums are encoded once more."""
    if codec.sums in ("raw", ""):
        return mean
    carrier = get_codec(codec.sums)
    return carrier.decode(carrier.encode(mean), len(mean))


@cache
def _loss(name: str, *, with_feedback: bool = True) -> float:
    """Loss on data that no replica saw, of the model that four replicas trained."""
    codec = get_codec(name)
    shared = torch.zeros(INPUTS * CLASSES)
    decay = codec.decay if with_feedback else None
    feedbacks = [None if decay is None else Feedback(len(shared), decay) for _ in range(REPLICAS)]
    for round_ in range(ROUNDS):
        mean = codec.mean(len(shared))
        for rank, feedback in enumerate(feedbacks):
            delta = _inner_steps(shared, rank, round_)
            if feedback is None:
                data = codec.encode(delta)
            else:
                data = codec.encode(feedback.added_to(delta, 0))
                feedback.settle(delta, 0, codec, data)
            mean.add(data, 1.0)
        shared = shared - _as_it_travels(codec, mean.result())
    inputs, classes = _examples(99, 4096)
    return float(functional.cross_entropy(inputs @ shared.view(INPUTS, CLASSES), classes))


def test_fp32_learns_most_of_what_there_is_to_learn() -> None:
    """The losses below mean something: 4.16 before training, 1.73 of the model behind the data."""
    assert _loss("fp32") < 1.85


@pytest.mark.parametrize("name", ["bf16", "int8", "e3m0", "e2m1"])
def test_dense_codecs_train_as_fp32_does(name: str) -> None:
    assert _loss(name) == pytest.approx(_loss("fp32"), rel=0.001)


def test_sparse_trains_as_fp32_does_with_error_feedback() -> None:
    assert _loss("sparse") == pytest.approx(_loss("fp32"), rel=0.02)


def test_sparse_trains_visibly_worse_without_error_feedback() -> None:
    assert _loss("sparse", with_feedback=False) > 1.04 * _loss("fp32")
