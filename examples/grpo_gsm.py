"""GRPO on arithmetic word problems: a model, a verifiable task, a trainer.

    python examples/grpo_gsm.py --model Qwen/Qwen2.5-0.5B-Instruct --steps 200

The problems are reasoning-gym's ``gsm_symbolic`` (``pip install 'diloco-cloud[rewards]'``), or sums
of small numbers with ``--task arithmetic``, which needs no package.
"""

# ruff: noqa: T201 (a program prints; the library doesn't)

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOConfig

from diloco_cloud.composer import ComposerReplicationTrainer
from diloco_cloud.composer.rewards import load_task
from diloco_cloud.trainers.pretrained import load_pretrained

parser = argparse.ArgumentParser(description="GRPO on word problems.")
parser.add_argument("--model", default="tiny")
parser.add_argument("--task", choices=["gsm", "arithmetic"], default="arithmetic")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--completion-length", type=int, default=16)
options = parser.parse_args()

if options.task == "gsm":
    task = load_task("reasoning_gym", dataset="gsm_symbolic")
else:
    task = load_task("arithmetic")

with tempfile.TemporaryDirectory() as folder:
    loaded = load_pretrained(options.model, cache=Path(folder))
    trainer = ComposerReplicationTrainer(
        model=loaded.model,
        processing_class=loaded.tokenizer,
        reward_funcs=[task.reward],
        train_dataset=Dataset.from_list(task.rows(512, seed=0)),
        # The other two channels have no data here: see sdpo_errors.py.
        alpha_sdpo=0,
        beta_replay=0,
        args=GRPOConfig(
            output_dir=f"{folder}/output",
            max_steps=options.steps,
            learning_rate=1e-5,
            per_device_train_batch_size=8,
            num_generations=8,
            max_completion_length=options.completion_length,
            logging_steps=max(1, options.steps // 10),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
    )
    trainer.train()

for line in trainer.state.log_history:
    if "reward" in line:
        print(f"step {line['step']}: reward {line['reward']:.3f}, entropy {line['entropy']:.2f}")
