"""The callback in TRL's SFTTrainer, as one who fine-tunes would use it."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
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


def sft_trainer(rank: int, where: Path, *, lora: bool) -> tuple[SFTTrainer, DiLoCoCallback]:
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
    door = ObjectStoreAllReduce(
        f"memory://{where.name}", rank, 2, timeout_s=60, poll_interval_s=0.02
    )
    callback = DiLoCoCallback(MockManager(door), sync_every=3)
    arguments = SFTConfig(
        output_dir=str(where / str(rank)),
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
    texts = [" ".join(WORDS[(rank + i) % 7 :]) for i in range(16)]
    trainer = SFTTrainer(
        model=Qwen2ForCausalLM(config),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        callbacks=[callback],
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if lora else None,
    )
    return trainer, callback


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # among TRL, PEFT and transformers
def test_sft_replicas_end_equal(tmp_path: Path, lora: bool) -> None:
    where = tmp_path / uuid.uuid4().hex
    pairs = [sft_trainer(rank, where, lora=lora) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(trainer.train) for trainer, _ in pairs]:
            future.result(timeout=120)
    digests = {callback.manager.global_digest() for _, callback in pairs}
    assert len(digests) == 1
    assert digests != {None}
    # Two rounds of three steps, and the final sync of the seventh.
    assert [callback.manager.current_step() for _, callback in pairs] == [3, 3]
    trained = [p for p in pairs[0][0].model.parameters() if p.requires_grad]
    shared = pairs[0][1].manager.states()[0].parameters
    assert [tuple(p.shape) for p in trained] == [tuple(p.shape) for p in shared]
    assert len(shared) == (8 if lora else 26)
