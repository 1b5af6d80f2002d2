"""A tiny model, its tokenizer and the toys that trainer tests train it on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig

from diloco_cloud.composer.trainer import ComposerReplicationTrainer

WORDS = [f"w{i}" for i in range(24)]
ROLES = ["system", "user", "assistant", "tool"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<start> ' + m['role'] + ' ' + m['content'] + ' <eos>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start> assistant ' }}{% endif %}"
)

#: TRL 1.16 and PEFT 0.21 use names that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

# With two threads and a busy machine such small matrices take twenty times as long.
torch.set_num_threads(1)
logging.getLogger("transformers").setLevel(logging.ERROR)


def tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token for each word."""
    words = ["<pad>", "<eos>", "<start>", *ROLES, *WORDS, "hint", ":"]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = chat_template
    return made


def model(seed: int = 0, **changes: Any) -> Qwen2ForCausalLM:
    sizes: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        **changes,
    }
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**sizes))


def rows(count: int = 8, *, hints: bool = True) -> Dataset:
    """Conversations; every second one has a hint."""
    columns: dict[str, list[Any]] = {
        "prompt": [[{"role": "user", "content": f"{WORDS[i % 24]} w1"}] for i in range(count)]
    }
    if hints:
        columns["hint"] = [f"hint : {WORDS[(i + 3) % 24]}" if i % 2 else None for i in range(count)]
    return Dataset.from_dict(columns)


def pairs(count: int = 6) -> list[dict[str, Any]]:
    return [
        {
            "state_id": str(i),
            "state_messages": [{"role": "user", "content": f"{WORDS[i]} w2"}],
            "chosen": f"{WORDS[i + 1]} w5",
            "rejected": f"{WORDS[i + 2]} w6 w7",
            "n_teachers_agreeing": 2,
        }
        for i in range(count)
    ]


def share_of(word: str) -> Any:
    """A reward: the share of a completion's words that are ``word``."""

    def reward(completions: list[Any], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [t.split().count(word) / max(1, len(t.split())) for t in texts]

    return reward


def config(where: Path, **changes: Any) -> GRPOConfig:
    settings: dict[str, Any] = {
        "output_dir": str(where),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "dataloader_pin_memory": False,
        "seed": 7,
        **changes,
    }
    return GRPOConfig(**settings)


def trainer(where: Path, *, args: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A trainer with all three channels on."""
    settings: dict[str, Any] = {
        "model": None,
        "reward_funcs": [share_of("w3")],
        "train_dataset": rows(),
        "processing_class": tokenizer(),
        "dpo_pairs": pairs(),
        "alpha_sdpo": 0.5,
        "beta_replay": 0.25,
        **changes,
    }
    settings["model"] = settings["model"] or model()
    return ComposerReplicationTrainer(args=config(where, **(args or {})), **settings)


def history(trainer: Any, key: str) -> list[float]:
    """What was logged under ``key``, in order."""
    return [line[key] for line in trainer.state.log_history if key in line]
