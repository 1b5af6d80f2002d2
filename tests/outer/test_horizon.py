"""The outer optimizer that suits a run's length."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path

import pytest

from diloco_cloud.errors import ConfigError
from diloco_cloud.horizon import (
    AVERAGING,
    LONG_ROUNDS,
    LONG_STEPS,
    NESTEROV,
    PUBLISHED,
    OuterStep,
    outer_step,
)
from diloco_cloud.outer import OuterSGD, make_diloco_outer_loop
from diloco_cloud.run import RunSpec
from diloco_cloud.run.config import resolve


@pytest.mark.parametrize(
    ("rounds", "sync_every", "step"),
    [
        (1, 1, AVERAGING),
        (LONG_ROUNDS - 1, 10_000, AVERAGING),
        (LONG_ROUNDS, 10_000, NESTEROV),
        (LONG_STEPS - 1, 1, AVERAGING),
        (LONG_STEPS, 1, NESTEROV),
        (None, 10_000, PUBLISHED),  # the trainer decides the end: nothing is known of it
    ],
)
def test_auto_goes_by_the_length(rounds: int | None, sync_every: int, step: OuterStep) -> None:
    assert outer_step("auto", rounds, sync_every) == step
    spec = RunSpec(run_id="a-1", rounds=rounds, sync_every=sync_every)
    assert (spec.outer_optimizer, spec.outer_step) == ("auto", step)


def test_a_named_optimizer_does_not() -> None:
    for rounds in (1, 10**6, None):
        assert outer_step("averaging", rounds, 100) == AVERAGING
        assert outer_step("nesterov", rounds, 100) == NESTEROV
        assert outer_step("sgd", rounds, 100) == PUBLISHED


def test_published_is_what_the_outer_loop_has_by_itself() -> None:
    defaults = inspect.signature(make_diloco_outer_loop).parameters
    names = ("outer_lr", "outer_momentum", "nesterov")
    assert OuterStep(*(defaults[name].default for name in names)) == PUBLISHED


def test_averaging_makes_the_mean_of_the_replicas_the_model() -> None:
    import torch

    shared = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    replicas = torch.tensor([[3.0, 0.0], [5.0, 4.0]])
    lr, momentum, nesterov = AVERAGING
    outer = OuterSGD([shared], lr=lr, momentum=momentum, nesterov=nesterov)
    shared.grad = (shared.detach() - replicas).mean(0)
    outer.step()
    assert torch.equal(shared.detach(), replicas.mean(0))


@pytest.mark.parametrize(
    ("given", "step"),
    [
        # What is not given is the published value, whatever the number of rounds.
        ({"outer_lr": 0.4}, (0.4, 0.9, True)),
        ({"outer_momentum": 0.5}, (0.7, 0.5, True)),
        ({"outer_momentum": 0.0}, (0.7, 0.0, False)),
        ({"nesterov": False}, (0.7, 0.9, False)),
        ({"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False}, (1.0, 0.0, False)),
    ],
)
@pytest.mark.parametrize("rounds", [3, 1000])
def test_what_is_given_wins(given: dict[str, float], step: OuterStep, rounds: int) -> None:
    spec = RunSpec(run_id="a-1", rounds=rounds, **given)
    assert spec.outer_step == step
    assert spec.outer_optimizer == "sgd"


def test_what_is_given_wins_over_a_named_optimizer_too() -> None:
    spec = RunSpec(run_id="a-1", rounds=9, outer_optimizer="averaging", outer_lr=0.5)
    assert (spec.outer_optimizer, spec.outer_step) == ("averaging", (0.5, 0.0, False))


def test_a_run_keeps_what_its_launcher_chose() -> None:
    stored = RunSpec(run_id="a-1", rounds=5).to_json()
    assert OuterStep(*(stored[k] for k in ("outer_lr", "outer_momentum", "nesterov"))) == AVERAGING
    again = RunSpec.from_json(stored)
    assert again == RunSpec(run_id="a-1", rounds=5)
    # A launcher of another version, that chose otherwise.
    other = RunSpec.from_json({**stored, "outer_lr": 0.9, "outer_momentum": 0.3, "nesterov": True})
    assert (other.outer_optimizer, other.outer_step) == ("auto", (0.9, 0.3, True))
    assert RunSpec.from_json(other.to_json()).digest == other.digest != again.digest


@pytest.mark.parametrize("bad", [{"outer_momentum": 1.0}, {"outer_lr": 0.0}, {"outer_lr": "high"}])
def test_what_a_stored_run_says_is_checked_all_the_same(bad: dict[str, object]) -> None:
    stored = RunSpec(run_id="a-1", rounds=5).to_json()
    with pytest.raises(ConfigError):
        RunSpec.from_json({**stored, **bad})


def test_nesterov_without_momentum_is_refused() -> None:
    with pytest.raises(ConfigError, match="nesterov needs a momentum"):
        RunSpec(run_id="a-1", outer_momentum=0.0, nesterov=True)
    with pytest.raises(ConfigError, match="nesterov needs a momentum"):
        RunSpec(run_id="a-1", outer_optimizer="averaging", nesterov=True)


def test_a_trainer_need_not_take_what_was_chosen_for_it() -> None:
    assert RunSpec(run_id="a-1", rounds=5).changed_trainer_settings == {"rounds": 5}
    named = RunSpec(run_id="a-1", outer_optimizer="averaging").changed_trainer_settings
    assert named == {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False}
    named = RunSpec(run_id="a-1", outer_optimizer="nesterov").changed_trainer_settings
    assert named == {"outer_lr": 0.4}
    given = RunSpec(run_id="a-1", rounds=5, outer_lr=1.0).changed_trainer_settings
    assert given == {"rounds": 5, "outer_lr": 1.0}


def test_settings_come_from_flags_and_variables() -> None:
    environ = {"DILOCO_OUTER_OPTIMIZER": "averaging", "DILOCO_WEIGHTING": "quality"}
    spec = resolve({"merge": "rda"}, environ=environ).spec
    assert (spec.merge, spec.weighting, spec.outer_step) == ("rda", "quality", AVERAGING)
    assert math.isclose(resolve({"outer_lr": 0.3}, environ=environ).spec.outer_step.lr, 0.3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("merge", 'merge is \'median\'\n.*"mean" or "rda"'),
        ("weighting", 'weighting is \'median\'\n.*"tokens", "equal" or "quality"'),
        ("outer_optimizer", 'is \'median\'\n.*"auto", "averaging", "nesterov" or "sgd"'),
    ],
)
def test_other_words_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve({name: "median"}, environ={})


def test_auto_is_close_to_the_best_that_was_measured() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "outer_horizon.json"
    rows: dict[tuple[object, ...], dict[tuple[float, float], float]] = {}
    for arm in json.loads(path.read_text())["best"]:
        if arm["merge"] == "mean":
            row = tuple(arm[name] for name in ("task", "rounds", "sync_every", "replicas"))
            rows.setdefault(row, {})[arm["lr"], arm["momentum"]] = arm["loss"]
    assert {rounds for _, rounds, _, _ in rows} >= {10, 30, 100}
    for (_, rounds, sync_every, _), losses in rows.items():
        step = outer_step("auto", rounds, sync_every)
        # The two models disagree on 100 rounds of 20 steps: 1.06 % is the least worst choice there.
        assert losses[step.lr, step.momentum] <= 1.011 * min(losses.values())
