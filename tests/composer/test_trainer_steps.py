"""The trainer over several steps: accumulation, iterations, evaluation, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from diloco_cloud.composer.losses import TAIDScheduler

pytestmark = tiny.pytestmark


def parameters(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_trainer_accumulation_of_four_equals_one_batch(tmp_path: Path, loss_type: str) -> None:
    ends, losses = [], []
    for batch, accumulation in ((8, 1), (2, 4)):
        args = {
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": accumulation,
            "loss_type": loss_type,
            "max_steps": 3,
            # Adam makes a step of the same length out of a gradient that is rounding alone.
            "optim": "sgd",
            "learning_rate": 0.3,
        }
        trainer = tiny.trainer(tmp_path, args=args)
        trainer.train()
        ends.append(parameters(trainer))
        losses.append(
            [tiny.history(trainer, f"composer/{name}/loss") for name in ("sdpo", "replay")]
        )
        assert tiny.history(trainer, "composer/replay/active") == [8, 8, 8]
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(
        torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-7
    )


def test_trainer_steps_that_share_a_generation_batch_have_means_of_their_own(
    tmp_path: Path,
) -> None:
    ends = []
    for batch, accumulation in ((8, 1), (2, 4)):
        args = {
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": accumulation,
            "steps_per_generation": 3 * accumulation,
            "max_steps": 3,
            "optim": "sgd",
            "learning_rate": 0.3,
        }
        trainer = tiny.trainer(
            tmp_path, args=args, reward_funcs=[tiny.share_of("w99")], beta_replay=0
        )
        trainer.train()
        active, means, losses = (
            tiny.history(trainer, key)
            for key in ("composer/sdpo/active", "composer/sdpo/loss", "loss")
        )
        assert len(set(active)) > 1, "the steps have as many hinted tokens: a test of nothing"
        assert losses == pytest.approx([0.5 * mean for mean in means], rel=1e-4)
        ends.append(parameters(trainer))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=2e-6)


def test_trainer_with_iterations_reference_and_evaluation(tmp_path: Path) -> None:
    tiny.model().save_pretrained(tmp_path / "model")
    args = {
        "per_device_train_batch_size": 4,
        # All in one batch: the loss is a mean over batches, the channels' figures over tokens.
        "per_device_eval_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "beta": 0.04,
        "max_steps": 8,
    }
    judged = tiny.rows(8).filter(lambda row: row["hint"] is not None)
    trainer = tiny.trainer(tmp_path, args=args, model=str(tmp_path / "model"), eval_dataset=judged)
    trainer.train()
    active = tiny.history(trainer, "composer/sdpo/active")
    # Two steps take a generation batch, and two more take it again.
    assert sum(active[:2]) == sum(active[2:4])
    assert sum(active[4:6]) == sum(active[6:])
    assert min(tiny.history(trainer, "composer/sdpo/loss")) > 0
    assert max(tiny.history(trainer, "kl")) > 0
    before = trainer.activity["replay"].total["steps"]
    figures = trainer.evaluate()
    assert figures["eval_loss"] == pytest.approx(
        figures["eval_composer/grpo/loss"] + 0.5 * figures["eval_composer/sdpo/loss"], rel=1e-3
    )
    assert trainer.activity["replay"].total["steps"] == before


def test_trainer_logs_every_channel_at_logging_steps(tmp_path: Path) -> None:
    logged = []
    hinted = tiny.rows(8).filter(lambda row: row["hint"] is not None)
    for every in (1, 2):
        args = {"max_steps": 4, "logging_steps": every}
        trainer = tiny.trainer(tmp_path, args=args, train_dataset=hinted)
        trainer.train()
        lines = [line for line in trainer.state.log_history if "loss" in line]
        assert [line["step"] for line in lines] == list(range(every, 5, every))
        for channel in ("grpo", "sdpo", "replay"):
            assert all(f"composer/{channel}/loss" in line for line in lines)
        logged.append({name: tiny.history(trainer, name) for name in lines[0]})
    each, both = logged
    for name in ("composer/sdpo/active", "composer/replay/active"):
        sums = [a + b for a, b in zip(each[name][::2], each[name][1::2], strict=True)]
        assert both[name] == sums
    weights, means = each["composer/sdpo/active"][:2], each["composer/sdpo/loss"][:2]
    mean = sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
    assert both["composer/sdpo/loss"][0] == pytest.approx(mean, rel=1e-4)


def test_trainer_resumed_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    def make(where: str, steps: int, seed: int = 0) -> Any:
        return tiny.trainer(
            tmp_path / where,
            args={"max_steps": steps, "save_strategy": "steps", "save_steps": 2},
            model=tiny.model(seed),
            sdpo_wrapper="taid",
            taid_scheduler=TAIDScheduler(10, t_start=0.2, alpha=0.1),
        )

    whole = make("whole", 4)
    whole.train()
    # Not the model that the first one began with: what the checkpoint knows goes first.
    resumed = make("again", 4, seed=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    schedules = [one._taid.scheduler.state_dict() for one in (resumed, whole)]
    assert schedules[0] == schedules[1]
    assert resumed.taid_t == whole.taid_t > 0.2
    pairs = whole._replay.pairs.pairs
    assert resumed._replay.reference.of(pairs) == whole._replay.reference.of(pairs)
    assert torch.equal(parameters(resumed), parameters(whole))


def test_trainer_takes_hints_from_a_rollout_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        words = trainer.processing_class
        return {
            "prompt_ids": [words("w1 w2")["input_ids"] for _ in prompts],
            "completion_ids": [words("w3 w4 <eos>")["input_ids"] for _ in prompts],
            "logprobs": [[0.0] * 3 for _ in prompts],
            # What went wrong is known once it has: the first half did.
            "error_kind": ["runtime_error" if i < 4 else None for i in range(len(prompts))],
        }

    trainer = tiny.trainer(
        tmp_path, train_dataset=tiny.rows(hints=False), rollout_func=rollout, beta_replay=0
    )
    trainer.train()
    assert tiny.history(trainer, "composer/sdpo/active") == [4 * 3, 4 * 3]
