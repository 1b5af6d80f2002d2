"""The model, its fragments, and the inner optimisation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from diloco_cloud.errors import ConfigError
from diloco_cloud.trainers.inner import (
    InnerSchedule,
    compute_gradients,
    make_optimizer,
    next_token_loss,
    validation_loss,
)
from diloco_cloud.trainers.model import ModelShape, build_model, model_fragments


def _shape(**changes: Any) -> ModelShape:
    values: dict[str, Any] = {
        "architecture": "llama",
        "vocabulary_size": 50,
        "sequence_length": 16,
        "hidden_size": 16,
        "layers": 4,
        "heads": 2,
        "intermediate_size": 32,
        "tie_embeddings": True,
    }
    return ModelShape(**{**values, **changes})


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_fragments_hold_every_tensor_once_and_tied_weights_together(
    architecture: str, tied: bool, count: int
) -> None:
    model = build_model(_shape(architecture=architecture, tie_embeddings=tied), seed=0)
    parts = [{id(p) for p in part.parameters()} for part in model_fragments(model, count)]
    assert len(parts) == count
    assert all(parts)
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert set().union(*parts) == {id(p) for p in model.parameters()}
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    assert (embedding is head) is tied
    assert sum(id(embedding) in part for part in parts) == 1
    assert [id(embedding) in part for part in parts] == [id(head) in part for part in parts]


def test_fragments_are_balanced() -> None:
    model = build_model(_shape(layers=6), seed=0)
    sizes = [sum(p.numel() for p in part.parameters()) for part in model_fragments(model, 3)]
    layer = sum(p.numel() for p in model.get_submodule("model.layers.0").parameters())
    assert max(sizes) - min(sizes) <= layer


def test_more_fragments_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 fragments cannot be made of 4 layers"):
        model_fragments(build_model(_shape(), seed=0), 5)


@pytest.mark.parametrize("change", [{"architecture": "rnn"}, {"heads": 3}, {"heads": 16}])
def test_impossible_shapes_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        _shape(**change)


def test_build_model_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = build_model(_shape(), seed=7).state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = build_model(_shape(), seed=7).state_dict()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    third = build_model(_shape(), seed=8).state_dict()
    assert not torch.equal(first["lm_head.weight"], third["lm_head.weight"])


def test_schedule_warms_up_then_decays_to_a_tenth() -> None:
    schedule = InnerSchedule(peak=1.0, warmup_steps=4, total_steps=20)
    rates = [schedule.learning_rate(step) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert schedule.learning_rate(20) == pytest.approx(0.1)
    assert schedule.learning_rate(500) == pytest.approx(0.1)


def test_schedule_without_warm_up_starts_at_the_peak() -> None:
    assert InnerSchedule(peak=0.5, warmup_steps=0, total_steps=1).learning_rate(0) == 0.5


def test_optimizer_decays_matrices_only_and_holds_every_parameter_once() -> None:
    model = build_model(_shape(), seed=0)
    decayed, kept = make_optimizer(model, 0.1).param_groups
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert all(p.ndim < 2 for p in kept["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))
    assert kept["weight_decay"] == 0


def test_a_few_steps_lower_the_loss() -> None:
    model = build_model(_shape(), seed=0)
    optimizer = make_optimizer(model, 0.0)
    windows = torch.arange(17).repeat(4, 1)
    losses = []
    for _ in range(30):
        losses.append(
            compute_gradients(model, optimizer, windows, learning_rate=1e-2, gradient_clip=1.0)
        )
        optimizer.step()
    assert losses[0] == pytest.approx(math.log(50), rel=0.1)
    assert losses[-1] < 0.3 * losses[0]


def test_validation_loss_weighs_windows_equally_and_restores_the_mode() -> None:
    model = build_model(_shape(), seed=0)
    windows = torch.randint(50, (5, 17), generator=torch.Generator().manual_seed(0))
    expected = float(next_token_loss(model, windows).detach())
    assert model.training
    assert validation_loss(model, windows, batch_size=2) == pytest.approx(expected, rel=1e-5)
    assert model.training
