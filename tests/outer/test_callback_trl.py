"""The callback in TRL's SFTTrainer, as one who fine-tunes would use it."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.outer import DiLoCoCallback, MockManager

TEXT = "the bucket is the only thing they share and every replica trains on its own"
WORDS = TEXT.split()


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", *sorted(set(WORDS))])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def train(where: str, rank: int, lora: bool) -> tuple[str | None, int, list[tuple[int, ...]]]:
    """Fine-tune as one replica; its global digest, outer steps, and the shapes it exchanged."""
    torch.manual_seed(rank)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    door = ObjectStoreAllReduce(f"{where}/run", rank, 2, timeout_s=60, poll_interval_s=0.02)
    callback = DiLoCoCallback(MockManager(door), sync_every=3)
    arguments = SFTConfig(
        output_dir=f"{where}/{rank}",
        max_steps=7,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        activation_checkpointing=False,
    )
    trainer = SFTTrainer(
        model=Qwen2ForCausalLM(config),
        args=arguments,
        train_dataset=Dataset.from_dict(
            {"text": [" ".join(WORDS[(rank + i) % 7 :]) for i in range(16)]}
        ),
        processing_class=tokenizer(),
        callbacks=[callback],
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if lora else None,
    )
    trainer.train()
    trained = [tuple(p.shape) for p in trainer.model.parameters() if p.requires_grad]
    (state,) = callback.manager.fragments.states()
    assert trained == [tuple(p.shape) for p in state.parameters]
    return callback.manager.global_digest(), callback.manager.current_step(), trained


@pytest.mark.parametrize("lora", [False, True])
def test_sft_replicas_end_equal(pool: ProcessPoolExecutor, tmp_path: Path, lora: bool) -> None:
    futures = [pool.submit(train, str(tmp_path), rank, lora) for rank in range(2)]
    first, second = (future.result(timeout=120) for future in futures)
    assert first == second
    digest, outer_steps, shapes = first
    assert digest is not None
    # Two rounds of three steps, and the final sync of the seventh.
    assert outer_steps == 3
    assert len(shapes) == (8 if lora else 26)
