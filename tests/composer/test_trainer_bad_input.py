"""What the trainer refuses, and what it leaves out and counts."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset

from diloco_cloud.composer.hinted_rollouts import paired_turns
from diloco_cloud.composer.trainer_base import grpo_trainer
from diloco_cloud.errors import ConfigError, MissingDependencyError, RewardError

pytestmark = tiny.pytestmark


def conversations(*texts: str, **columns: Any) -> Dataset:
    prompts = [[{"role": "user", "content": text}] for text in texts]
    return Dataset.from_dict({"prompt": prompts, **columns})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data_collator": print}, "no data_collator"),
        ({"alpha_sdpo": -1.0}, "alpha_sdpo is -1.0"),
        ({"dpo_variant": "ipo"}, "dpo_variant is 'ipo'"),
        ({"sdpo_wrapper": "taid"}, "needs taid_t"),
        ({"train_dataset": Dataset.from_dict({"question": ["w1"]})}, "no 'prompt' column"),
        ({"processing_class": tiny.tokenizer(chat_template=None)}, "no chat template"),
        ({"train_dataset": conversations("w1 " * 200)}, "leaves room for a completion"),
        ({"train_dataset": conversations("w1", "w2", hint=["", None])}, "cannot fire"),
        ({"train_dataset": conversations("w1", error_kind=["unheard_of"])}, "cannot fire"),
        ({"dpo_pairs": [{"prompt": "w1", "chosen": "w2"}]}, "no 'rejected'"),
        ({"dpo_pairs": [{"prompt": "w1", "chosen": "w2", "rejected": "w2"}]}, "cannot fire"),
        ({"dpo_pairs": []}, "none given"),
    ],
)
def test_trainer_refuses_at_the_start(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        tiny.trainer(tmp_path, **changes)
    assert caught.value.fix


def test_trainer_skips_and_counts_long_prompts_and_useless_pairs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    same = {"prompt": "w1", "chosen": "w2", "rejected": "w2"}
    with caplog.at_level(logging.WARNING, "diloco_cloud"):
        trainer = tiny.trainer(
            tmp_path,
            train_dataset=conversations("w1", "w1 " * 200, "w2"),
            dpo_pairs=[*tiny.pairs(2), same],
        )
    assert trainer.prompts_skipped == 1
    assert len(trainer.train_dataset) == 2
    assert trainer._replay.pairs.skipped == {"pair_without_difference": 1}
    assert "1 of 3 prompts are skipped" in caplog.text
    # Hints were not given, so that channel 2 is off in spite of its weight.
    assert "channel 2 is off" in caplog.text


def test_trainer_skips_and_counts_long_prompts_it_would_evaluate_on(tmp_path: Path) -> None:
    judged = conversations("w1 " * 200, "w1", "w2")
    for given in (judged, {"some": judged, "others": conversations("w3")}):
        trainer = tiny.trainer(tmp_path, eval_dataset=given, alpha_sdpo=0, beta_replay=0)
        assert trainer.prompts_skipped == 1
        kept = trainer.eval_dataset
        kept = kept if isinstance(given, Dataset) else kept["some"]
        assert [row["prompt"][0]["content"] for row in kept] == ["w1", "w2"]


def raising(completions: list[Any], **_: Any) -> list[float]:
    raise KeyError("w9")


def not_a_number(completions: list[Any], **_: Any) -> list[float]:
    return [float("nan"), *[0.5] * (len(completions) - 1)]


def one_short(completions: list[Any], **_: Any) -> list[float]:
    return [0.5] * (len(completions) - 1)


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (raising, "raising raised KeyError"),
        (not_a_number, "not_a_number returned nan for completion 0"),
        (one_short, "returned 7 rewards for 8 completions"),
    ],
)
def test_trainer_tells_which_reward_failed(tmp_path: Path, reward: Any, told: str) -> None:
    trainer = tiny.trainer(tmp_path, reward_funcs=[reward])
    with pytest.raises(RewardError, match=told):
        trainer.train()


def test_trainer_that_is_not_strict_counts_failed_rewards_and_goes_on(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, reward_funcs=[not_a_number, tiny.share_of("w3")], strict=False)
    trainer.train()
    assert trainer.rewards.failures == {"not_a_number: returned nan": 2}
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_trainer_with_all_completions_masked_says_the_channel_is_idle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = {
        "mask_truncated_completions": True,
        "max_completion_length": 1,
        "generation_kwargs": {"suppress_tokens": [0, 1]},  # nothing ends a turn
    }
    hinted = conversations("w1", "w2", hint=["hint : w3"] * 2)
    trainer = tiny.trainer(tmp_path, args=args, train_dataset=hinted, beta_replay=0)
    with caplog.at_level(logging.WARNING, "diloco_cloud"):
        trainer.train()
    assert trainer.activity["sdpo"].total["active"] == 0
    assert trainer.activity["sdpo"].total["skipped"] == 16
    assert tiny.history(trainer, "composer/sdpo/skipped") == [8, 8]
    assert "the sdpo channel learnt nothing" in caplog.text
    assert "rollouts that are masked: 8" in caplog.text
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_paired_turns_refuses_a_mask_of_another_shape() -> None:
    ones = torch.ones(2, 3, dtype=torch.long)
    inputs = {
        "completion_ids": ones,
        "prompt_ids": ones,
        "prompt_mask": ones,
        "ctx_teacher_prompt_ids": ones,
        "ctx_teacher_prompt_mask": ones,
        "sdpo_loss_mask": torch.ones(2, 4, dtype=torch.long),
    }
    with pytest.raises(ConfigError, match=r"sdpo_loss_mask has shape \(2, 4\)"):
        paired_turns(inputs, 0)


def test_trainer_without_trl_tells_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    stand_in = grpo_trainer()
    with pytest.raises(MissingDependencyError, match="needs trl"):
        stand_in(model="any")
