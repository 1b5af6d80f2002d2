"""What needs two processes, as a program: `python two_processes.py FOLDER RANK PORT`.

First two replicas with an adapter, as they do not know of each other but by the store; then one
trainer in both processes. test_trainer_processes.py starts it, and runs the latter in one too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig
from test_composer_replica import replica

#: Of all processes together, per step.
ROLLOUTS, PAIRS = 8, 4


def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Completions that follow from the prompts: the same, however these are shared out."""
    words = trainer.processing_class
    seen: dict[str, int] = {}
    completions = []
    for prompt in prompts:
        text = prompt[0]["content"]
        number = seen[text] = seen.get(text, 0) + 1
        completions.append(f"{' '.join(tiny.WORDS[number : 2 * number])} w3 <eos>")
    return {
        "prompt_ids": [words(f"w1 {prompt[0]['content']}")["input_ids"] for prompt in prompts],
        "completion_ids": [words(text)["input_ids"] for text in completions],
        "logprobs": [[0.0] * len(words(text)["input_ids"]) for text in completions],
    }


def rows() -> Dataset:
    """Of each step's two prompts, one has a hint: the other process has nothing to distil."""
    return tiny.rows(8)


CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "lora": {
        "peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
        "args": {"activation_checkpointing": True},
    },
    # The output head has weights of its own, and channel 2's pass does not end in it.
    "sdpo": {"beta_replay": 0, "tie_word_embeddings": False},
}
KEYS = ["loss", "reward", *(f"composer/{c}/loss" for c in ("grpo", "sdpo", "replay"))]
KEYS += ["composer/sdpo/active", "composer/replay/active", "composer/replay/margin"]


def trained(case: str, where: Path, processes: int) -> dict[str, Any]:
    """What three steps made of the trained parameters, and what was logged."""
    changes = dict(CASES[case])
    args = {
        "per_device_train_batch_size": ROLLOUTS // processes,
        "max_steps": 3,
        "optim": "sgd",
        "learning_rate": 0.3,
        "shuffle_dataset": False,
        **changes.pop("args", {}),
    }
    tied = changes.pop("tie_word_embeddings", True)
    trainer = tiny.trainer(
        where / case,
        args=args,
        model=tiny.model(tie_word_embeddings=tied, initializer_range=0.2),
        train_dataset=rows(),
        rollout_func=rollout,
        replay_batch_size=PAIRS // processes,
        **changes,
    )
    assert trainer.accelerator.num_processes == processes
    trainer.train()
    return {
        "parameters": {
            name: value.detach().clone()
            for name, value in trainer.accelerator.unwrap_model(trainer.model).named_parameters()
            if value.requires_grad
        },
        "history": {key: tiny.history(trainer, key) for key in KEYS},
        "activity": {name: dict(each.total) for name, each in trainer.activity.items()},
        "tokens": trainer.tokens_trained,
    }


def main() -> None:
    where, rank, port = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    lora = {"r": 2, "init_lora_weights": False}
    found: dict[str, Any] = {"replica": replica(str(where), rank, 2, lora=lora)}
    AcceleratorState._reset_state(reset_partial_state=True)
    # As torchrun has it.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    found |= {case: trained(case, where, 2) for case in CASES}
    torch.save(found, where / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
