"""GRPO on arithmetic: a model, a verifiable task, a trainer.

    python examples/grpo_gsm.py --task gsm --model Qwen/Qwen2.5-0.5B-Instruct --steps 200

By default, one-digit sums and a tiny model that has never seen any: it hits an answer by chance,
so digits are worth a little too. ``--task gsm`` needs ``pip install 'diloco-cloud[rewards]'``.
"""

# ruff: noqa: T201 (a program prints; the library doesn't)

from __future__ import annotations

import argparse
import tempfile

import torch
from datasets import Dataset
from trl import GRPOConfig

from diloco_cloud.composer import ComposerReplicationTrainer
from diloco_cloud.composer.rewards import load_task, text_of
from diloco_cloud.trainers.pretrained import load_pretrained

TASKS = {"arithmetic": {}, "gsm": {"dataset": "gsm_symbolic"}}
parser = argparse.ArgumentParser(description="GRPO on arithmetic.")
parser.add_argument("--model", default="tiny")
parser.add_argument("--task", choices=TASKS, default="arithmetic")
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()


def digits(completions: list[object], **_: object) -> list[float]:
    """A tenth of the share of digits: less than the answer is worth."""
    texts = [text_of(completion) for completion in completions]
    return [sum(c in "0123456789" for c in text) / max(1, len(text)) / 10 for text in texts]


task = load_task("reasoning_gym" if options.task == "gsm" else "arithmetic", **TASKS[options.task])
loaded = load_pretrained(options.model)
with tempfile.TemporaryDirectory() as output:
    settings = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    settings |= dict.fromkeys(["bf16", "dataloader_pin_memory"], torch.cuda.is_available())
    trainer = ComposerReplicationTrainer(
        model=loaded.model,
        processing_class=loaded.tokenizer,
        reward_funcs=[task.reward, digits],
        train_dataset=Dataset.from_list(task.rows(100, seed=0)),
        alpha_sdpo=0,  # The other two channels have no data here: see sdpo_errors.py.
        beta_replay=0,
        args=GRPOConfig(
            output,
            max_steps=options.steps,
            max_completion_length=16 if options.model == "tiny" else 256,
            learning_rate=1e-2 if options.model == "tiny" else 1e-5,
            **settings,
        ),
    )
    trainer.train()
for step in (line for line in trainer.state.log_history if "reward" in line):
    print(f"step {step['step']}: reward {step['reward']:.4f}  gradient {step['grad_norm']:.4f}")
