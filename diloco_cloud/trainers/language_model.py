"""The default trainer: a small decoder-only transformer on text the machine already has.

    diloco-cloud launch --trainer diloco_cloud.trainers.language_model:train --set layers=4

Each rank trains on its own shard; every ``sync_every`` inner steps the replicas' models are merged,
and rank 0 judges the merged model on held-out text.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from diloco_cloud.errors import ConfigError
from diloco_cloud.outer import make_diloco_outer_loop
from diloco_cloud.trainers.data import ReplicaData, TextOptions, prepare_data, require_same_corpus
from diloco_cloud.trainers.inner import InnerSchedule, make_optimizer
from diloco_cloud.trainers.inner_loop import InnerLoop, MergedModelJudge
from diloco_cloud.trainers.model import ModelShape, build_model, model_fragments
from diloco_cloud.trainers.run_length import run_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from diloco_cloud.outer.manager import MockManager


def train(
    *,
    manager: MockManager,
    rank: int,
    world_size: int,
    sync_every: int = 500,
    rounds: int | None = None,
    seed: int = 0,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    fragments: int = 1,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
    text: str | None = None,
    tokenizer: str = "byte",
    vocabulary_size: int = 1024,
    validation_fraction: float = 0.1,
    validation_sequences: int = 64,
    architecture: str = "llama",
    hidden_size: int = 128,
    layers: int = 4,
    heads: int = 4,
    intermediate_size: int | None = None,
    tie_embeddings: bool = True,
    sequence_length: int = 128,
    batch_size: int = 8,
    inner_steps: int | None = None,
    learning_rate: float = 3e-3,
    warmup_steps: int | None = None,
    weight_decay: float = 0.1,
    gradient_clip: float = 1.0,
) -> dict[str, Any]:
    """Train one replica.

    Args:
        manager: the run's manager; carries rounds, figures and results to the store.
        rank: of this replica, from 0.
        world_size: number of replicas.
        sync_every: inner steps between two syncs of a fragment.
        rounds: times ``sync_every`` is the length of the run, unless ``inner_steps`` says it.
        seed: of the initial weights (the same on all ranks), of the shards and of the batches.
        outer_lr: of the outer SGD.
        outer_momentum: of the outer SGD.
        nesterov: whether that momentum is Nesterov's.
        fragments: parts of the model synchronised in turn; at most ``layers``.
        fragment_sync_delay: inner steps a transfer overlaps.
        fragment_update_alpha: weight of the local parameters in the merge.
        text: file or directory to read; by default the Python standard library's sources.
        tokenizer: "byte", or "bpe" for one learnt from the training text at start.
        vocabulary_size: ids of the "bpe" tokenizer.
        validation_fraction: part of the text that no rank trains on.
        validation_sequences: held-out sequences that the merged model is judged on.
        architecture: "llama" or "qwen2".
        hidden_size: width.
        layers: depth.
        heads: attention heads.
        intermediate_size: width of the feed-forward; by default 8/3 of ``hidden_size``.
        tie_embeddings: whether the output projection is the embedding.
        sequence_length: predicted tokens per sequence.
        batch_size: sequences per inner step.
        inner_steps: length of the run where ``rounds`` does not say it.
        learning_rate: peak of the inner AdamW.
        warmup_steps: linear warm-up; by default a twentieth of the run. Cosine decay follows.
        weight_decay: of matrices.
        gradient_clip: largest global gradient norm.

    Returns:
        JSON values: steps and tokens this process trained, sizes, the final training loss, and on
        rank 0 loss (nats per token), perplexity and bits per byte of the merged model.

    Raises:
        ConfigError: settings or text that cannot work; raised before any training.
    """
    _check_positive(
        sequence_length=sequence_length,
        batch_size=batch_size,
        validation_sequences=validation_sequences,
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        learning_rate=learning_rate,
        gradient_clip=gradient_clip,
    )
    total_steps = run_length(sync_every, rounds, inner_steps)
    options = TextOptions(
        text=text,
        tokenizer=tokenizer,
        vocabulary_size=vocabulary_size,
        batch_size=batch_size,
        sequence_length=sequence_length,
        validation_fraction=validation_fraction,
        validation_sequences=validation_sequences,
    )
    data = prepare_data(options, rank=rank, world_size=world_size, seed=seed)
    require_same_corpus(manager.prefix, data.corpus_digest)
    shape = ModelShape(
        architecture=architecture,
        vocabulary_size=data.tokenizer.vocabulary_size,
        sequence_length=sequence_length,
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        intermediate_size=intermediate_size or _default_intermediate_size(hidden_size),
        tie_embeddings=tie_embeddings,
    )
    model = build_model(shape, seed=seed)
    parts = model_fragments(model, fragments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)  # type: ignore[arg-type]  # transformers' decorator hides the signature
    optimizer = make_optimizer(model, weight_decay)
    outer = make_diloco_outer_loop(
        manager,
        parts,
        optimizer,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        nesterov=nesterov,
        sync_every=sync_every,
        fragment_sync_delay=fragment_sync_delay,
        fragment_update_alpha=fragment_update_alpha,
        model=model,
    )
    schedule = InnerSchedule(
        peak=learning_rate,
        warmup_steps=math.ceil(total_steps / 20) if warmup_steps is None else warmup_steps,
        total_steps=total_steps,
    )
    loop = InnerLoop(
        manager=manager,
        outer=outer,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        sampler=data.sampler,
        gradient_clip=gradient_clip,
        judge=MergedModelJudge(model, outer, len(parts), data) if rank == 0 else None,
    )
    with outer:
        loop.run(outer.inner_steps_done)
    loop.finish()
    manager.save_result(_result_files(model, data))
    return {**loop.result(), **_sizes(model, data)}


def _result_files(model: PreTrainedModel, data: ReplicaData) -> dict[str, bytes]:
    """What makes the exported weights a model that transformers loads by itself."""
    model.config.architectures = [type(model).__name__]
    config = model.config.to_json_string(use_diff=True)
    return {"config.json": config.encode(), **data.tokenizer.files()}


def _sizes(model: PreTrainedModel, data: ReplicaData) -> dict[str, Any]:
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary_size": data.tokenizer.vocabulary_size,
        "shard_tokens": len(data.sampler),
        "validation_tokens": data.validation[:, 1:].numel(),
        "corpus_digest": data.corpus_digest,
    }


def _default_intermediate_size(hidden_size: int) -> int:
    """8/3 of the width, as gated feed-forwards have it, up to a multiple of 16."""
    return math.ceil(hidden_size * 8 / 3 / 16) * 16


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ConfigError(f"{name} is {value!r}", fix="It must be above 0.")
