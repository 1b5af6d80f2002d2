"""Each channel alone learns what only it can teach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny

pytestmark = tiny.pytestmark


def nothing(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def test_trainer_learns_a_reward_by_grpo_alone(tmp_path: Path) -> None:
    args = {"max_steps": 40, "per_device_train_batch_size": 16, "num_generations": 8}
    trainer = tiny.trainer(tmp_path, args=args, alpha_sdpo=0, beta_replay=0)
    trainer.train()
    rewards = tiny.history(trainer, "reward")
    assert rewards[0] < 0.15
    assert sum(rewards[-3:]) / 3 > 0.9


def test_trainer_learns_preferences_by_replay_alone(tmp_path: Path) -> None:
    trainer = tiny.trainer(
        tmp_path, args={"max_steps": 25}, reward_funcs=[nothing], alpha_sdpo=0, beta_replay=1
    )
    trainer.train()
    losses, margins = (
        tiny.history(trainer, f"composer/replay/{name}") for name in ("loss", "margin")
    )
    assert abs(losses[0] - 0.6931) < 1e-3  # ln 2: the policy is still the reference.
    assert losses[-1] < 0.1
    assert margins[0] == 0
    assert margins[-1] > 2
    assert tiny.history(trainer, "composer/replay/accuracy")[-1] == 1


def test_trainer_closes_the_gap_to_the_hinted_teacher_alone(tmp_path: Path) -> None:
    trainer = tiny.trainer(
        tmp_path,
        args={"max_steps": 25, "learning_rate": 3e-3},
        # At the usual scale a tiny model hardly minds what is in its context.
        model=tiny.model(initializer_range=0.3),
        reward_funcs=[nothing],
        alpha_sdpo=1,
        beta_replay=0,
    )
    trainer.train()
    divergence = tiny.history(trainer, "composer/sdpo/loss")
    assert divergence[0] > 1e-3
    assert sum(divergence[-3:]) / 3 < divergence[0] / 3
