"""Five steps of the composed loss, with all three channels live.

    python examples/quickstart.py --model HuggingFaceTB/SmolLM2-135M-Instruct

The loss is a language model's cross-entropy, plus the divergence from the same model when it has
read a hint, plus a preference between two answers. Every channel is checked for a gradient first.
"""

# ruff: noqa: T201 (a program prints; the library doesn't)

from __future__ import annotations

import argparse

import torch

from diloco_cloud.composer import build_batch, compose_loss
from diloco_cloud.trainers.pretrained import load_pretrained

parser = argparse.ArgumentParser(description="Five steps of the composed loss.")
parser.add_argument("--model", default="tiny")  # or any of the Hugging Face hub, or a folder
parser.add_argument("--steps", type=int, default=5)
options = parser.parse_args()

loaded = load_pretrained(options.model)
model, tokenizer = loaded.model, loaded.tokenizer
# Student and teacher see the same answer; aligned, they see it at the same positions.
batch = build_batch(tokenizer, align_sdpo_shapes=True)

# ---------------------------------------------------------------------------------------------
# Each channel alone

parts = compose_loss(model, batch)
for name in ("lm_ce", "sdpo_jsd", "trace_replay_dpo"):
    loss = getattr(parts, name)
    gradients = torch.autograd.grad(
        loss, list(model.parameters()), retain_graph=True, allow_unused=True
    )
    norm = torch.stack([g.norm() for g in gradients if g is not None]).norm()
    print(f"{name:17} loss {loss.item():.6f}  gradient {norm.item():.6f}")
    assert norm.isfinite()
    assert norm > 0

# ---------------------------------------------------------------------------------------------
# All of them, five steps

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if options.model == "tiny" else 1e-5)
for step in range(options.steps):
    parts = compose_loss(model, batch)
    optimizer.zero_grad()
    parts.total.backward()
    optimizer.step()
    figures = "  ".join(f"{name} {value:.4f}" for name, value in parts.detached().items())
    print(f"step {step + 1}: {figures}")
