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
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from diloco_cloud.composer.hinted_rollouts import paired_turns
from diloco_cloud.composer.losses import TAIDScheduler
from diloco_cloud.composer.trainer import ComposerReplicationTrainer
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
        ({"alpha_sdpo": float("inf")}, "alpha_sdpo is inf"),
        ({"replay_batch_size": 0}, "replay_batch_size is 0"),
        ({"replay_batch_size": -1}, "replay_batch_size is -1"),
        ({"max_dpo_seq_len": 0}, "max_dpo_seq_len is 0"),
        ({"hint_generator": "pkg:fn"}, "hint_generator is 'pkg:fn'"),
        ({"sdpo_wrapper": "taid", "taid_t": 0.5, "taid_scheduler": TAIDScheduler(9)}, "sets t too"),
        ({"taid_scheduler": TAIDScheduler(9)}, "does not read it"),
        ({"taid_t": 0.3}, "does not read it"),
        (
            {"train_dataset": conversations("w1", error_kind=["w4"], error_meta=["boom"])},
            "error_meta of row 0 is str",
        ),
        ({"dpo_variant": "ipo"}, "dpo_variant is 'ipo'"),
        ({"sdpo_wrapper": "taid"}, "needs taid_t"),
        ({"train_dataset": Dataset.from_dict({"question": ["w1"]})}, "no 'prompt' column"),
        ({"processing_class": tiny.tokenizer(chat_template=None)}, "no chat template"),
        (
            {
                "processing_class": tiny.tokenizer(chat_template=None),
                "train_dataset": Dataset.from_dict({"prompt": ["w1"]}),
            },
            "no chat template",  # the pairs' conversations have none
        ),
        ({"train_dataset": conversations("w1 " * 200)}, "leaves room for a completion"),
        ({"train_dataset": conversations("w1", "w2", hint=["", None])}, "cannot fire"),
        ({"train_dataset": conversations("w1", error_kind=["unheard_of"])}, "cannot fire"),
        ({"dpo_pairs": [{"prompt": "w1", "chosen": "w2"}]}, "no 'rejected'"),
        ({"dpo_pairs": [{"prompt": "w1", "chosen": "w2", "rejected": "w2"}]}, "cannot fire"),
        ({"dpo_pairs": []}, "none given"),
        ({"dpo_pairs": ["w2"]}, "preference pair 0 is str 'w2'"),
        (
            {"dpo_pairs": [{"prompt": "w1", "chosen": ["w2"], "rejected": "w3"}]},
            r"'chosen' is \['w2'\]",
        ),
        ({"dpo_pairs": [{"prompt": "", "chosen": "w2", "rejected": "w3"}]}, "pair_without_prompt"),
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


def test_trainer_checks_what_evaluate_is_given(tmp_path: Path) -> None:
    """Under any of the three forms, as the constructor checks its own."""
    args = {"per_device_eval_batch_size": 4}
    trainer = tiny.trainer(tmp_path, args=args, alpha_sdpo=0, beta_replay=0)
    mixed = conversations("w1 " * 200, "w1", "w2")
    assert trainer.evaluate(eval_dataset=mixed)["eval_reward"] is not None
    assert trainer.prompts_skipped == 1
    figures = trainer.evaluate(eval_dataset={"mixed": mixed, "fine": conversations("w3")})
    assert {"eval_mixed_loss", "eval_fine_loss"} <= figures.keys()
    assert trainer.prompts_skipped == 2
    with pytest.raises(ConfigError, match="leaves room for a completion"):
        trainer.evaluate(eval_dataset=conversations("w1 " * 200))
    with pytest.raises(ConfigError, match="no 'prompt' column"):
        trainer.evaluate(eval_dataset=Dataset.from_dict({"question": ["w1"]}))


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


def test_trainer_tells_which_reward_model_failed(tmp_path: Path) -> None:
    judge = Qwen2ForSequenceClassification(
        Qwen2Config(
            **{**tiny.model().config.to_dict(), "num_labels": 1, "pad_token_id": 0, "dtype": None}
        )
    )
    with torch.no_grad():
        judge.score.weight.fill_(float("nan"))
    judges = {"reward_funcs": [judge, tiny.share_of("w3")]}
    processing = {"reward_processing_classes": [tiny.tokenizer(), None]}
    with pytest.raises(RewardError, match="returned nan for completion 0"):
        tiny.trainer(tmp_path, **judges, **processing).train()
    trainer = tiny.trainer(tmp_path, **judges, **processing, strict=False)
    trainer.train()
    assert list(trainer.rewards.failures.values()) == [16]
    assert all(p.isfinite().all() for p in trainer.model.parameters())


async def raising_while_awaited(completions: list[Any], **_: Any) -> list[float]:
    raise KeyError("w9")


@pytest.mark.parametrize("strict", [True, False])
def test_trainer_tells_which_awaited_reward_failed(tmp_path: Path, strict: bool) -> None:
    functions = [raising_while_awaited, tiny.share_of("w3")]
    trainer = tiny.trainer(tmp_path, reward_funcs=functions, strict=strict)
    if strict:
        with pytest.raises(RewardError, match="raising_while_awaited raised KeyError"):
            trainer.train()
    else:
        trainer.train()
        assert trainer.rewards.failures == {"raising_while_awaited: raised KeyError: 'w9'": 2}


def test_trainer_leaves_long_prompts_of_a_stream_out(tmp_path: Path) -> None:
    stream = conversations("w1", "w1 " * 200, "w2").to_iterable_dataset()
    trainer = tiny.trainer(tmp_path, train_dataset=stream, alpha_sdpo=0, beta_replay=0)
    assert [row["prompt"][0]["content"] for row in trainer.train_dataset] == ["w1", "w2"]
    assert trainer.prompts_skipped == 0  # Nobody has counted them: it is read as it is needed.


@pytest.mark.parametrize(
    ("lacks", "told"),
    [
        ("ctx_teacher_prompt_ids", "has no ctx_teacher_prompt_ids"),
        ("sdpo_loss_mask", "has no sdpo_loss_mask"),
        ("dpo_rejected_response_mask", "has no dpo_rejected_response_mask"),
        ("dpo_chosen_ref_logprobs", "DPO needs the reference"),
    ],
)
def test_trainer_names_the_tensor_that_a_batch_lacks(tmp_path: Path, lacks: str, told: str) -> None:
    class Lossy(ComposerReplicationTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
            inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
            return {name: tensor for name, tensor in inputs.items() if name != lacks}

    trainer = Lossy(
        model=tiny.model(),
        reward_funcs=[tiny.share_of("w3")],
        args=tiny.config(tmp_path),
        train_dataset=tiny.rows(),
        processing_class=tiny.tokenizer(),
        dpo_pairs=tiny.pairs(),
    )
    with pytest.raises(ConfigError, match=told):
        trainer.train()


def test_replay_refuses_a_mask_of_another_shape_and_counts_masked_pairs(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path)
    trainer.complete_reference()
    pairs = trainer._replay.batch(0, torch.device("cpu"))
    mask = pairs["dpo_chosen_response_mask"]
    with pytest.raises(ConfigError, match=r"dpo_chosen_response_mask has shape"):
        trainer._compute_trace_replay_loss(
            trainer.model, {**pairs, "dpo_chosen_response_mask": mask[:, 1:]}
        )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    mask[0] = 0
    assert trainer._compute_trace_replay_loss(trainer.model, pairs) > 0
    mask.zero_()
    assert trainer._compute_trace_replay_loss(trainer.model, pairs) == 0
    assert trainer.activity["replay"].total["skipped"] == 1 + 8
    assert trainer.activity["replay"].reasons == {"no pair has a response on both sides": 1}


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
