"""Learning from errors: hints where a tool call went wrong, and better answers others gave.

    python examples/sdpo_errors.py --model Qwen/Qwen2.5-0.5B-Instruct --steps 100

Each row is the moment before a call that failed in an earlier trace. The student tries again
without help; the teacher, which is the same model, has read a hint made from the error (channel 2).
The pairs prefer the call that other models agreed on to the one that failed (channel 3).
"""

# ruff: noqa: T201 (a program prints; the library doesn't)

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig

from diloco_cloud.composer import ComposerReplicationTrainer
from diloco_cloud.composer.rewards import text_of
from diloco_cloud.trainers.pretrained import load_pretrained

parser = argparse.ArgumentParser(description="Hint distillation and preference replay.")
parser.add_argument("--model", default="tiny")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--completion-length", type=int, default=24)
options = parser.parse_args()

# ---------------------------------------------------------------------------------------------
# What went wrong, and what would have been right

TOOLS = ["read_file", "list_files"]
ERRORS: list[dict[str, Any]] = [
    {
        "asked": f"Show me {name}. Call a tool in JSON.",
        "failed": json.dumps({"name": wrong, "arguments": {"path": name}}),
        "right": json.dumps({"name": "read_file", "arguments": {"path": name}}),
        "error_kind": "tool_not_found",
        "error_meta": {"tool_name": wrong, "available_tools": TOOLS},
    }
    for name, wrong in [("a.txt", "open"), ("b.py", "cat"), ("notes.md", "view"), ("c.c", "show")]
]


def calls_a_tool(completions: list[Any], **_: Any) -> list[float]:
    """1 for a call, in JSON, of a tool that exists; a tenth for JSON."""
    rewards: list[float] = []
    for completion in completions:
        try:
            call = json.loads(text_of(completion))
        except ValueError:
            rewards.append(0.0)
        else:
            known = isinstance(call, dict) and call.get("name") in TOOLS
            rewards.append(1.0 if known else 0.1)
    return rewards


rows = [
    {
        "prompt": [{"role": "user", "content": error["asked"]}],
        "error_kind": error["error_kind"],
        "error_meta": error["error_meta"],
    }
    for error in ERRORS
]
pairs = [
    {
        "state_messages": [{"role": "user", "content": error["asked"]}],
        "chosen": error["right"],
        "rejected": error["failed"],
    }
    for error in ERRORS
]

# ---------------------------------------------------------------------------------------------
# All three channels

loaded = load_pretrained(options.model)
with tempfile.TemporaryDirectory() as output:
    trainer = ComposerReplicationTrainer(
        model=loaded.model,
        processing_class=loaded.tokenizer,
        reward_funcs=[calls_a_tool],
        train_dataset=Dataset.from_list(rows),
        dpo_pairs=pairs,
        alpha_sdpo=0.1,
        beta_replay=0.05,
        args=GRPOConfig(
            output_dir=output,
            max_steps=options.steps,
            learning_rate=1e-3 if options.model == "tiny" else 1e-5,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=options.completion_length,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
    )
    trainer.train()

FIGURES = ("sdpo/loss", "sdpo/active", "replay/loss", "replay/margin")
for line in trainer.state.log_history:
    if "reward" in line:
        figures = "  ".join(f"{name} {line[f'composer/{name}']:.4g}" for name in FIGURES)
        print(f"step {line['step']}: reward {line['reward']:.2f}  {figures}")
