"""The default trainer's model: a small decoder-only transformer, whole or in fragments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from diloco_cloud.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARCHITECTURES = ("llama", "qwen2")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer.

    Attributes:
        architecture: "llama" or "qwen2".
        vocabulary_size: ids.
        sequence_length: longest context.
        hidden_size: width; divisible by ``heads``, and the head width is even (rotary positions).
        layers, heads: depth, attention heads.
        intermediate_size: width of the gated feed-forward.
        tie_embeddings: whether the output projection is the embedding.
    """

    architecture: str
    vocabulary_size: int
    sequence_length: int
    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    tie_embeddings: bool

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(
                f"architecture is {self.architecture!r}", fix='It must be "llama" or "qwen2".'
            )
        if self.hidden_size % (2 * self.heads):
            raise ConfigError(
                f"hidden_size {self.hidden_size} cannot be shared by {self.heads} heads",
                fix="It must be a multiple of 2 * heads.",
            )


def build_model(shape: ModelShape, *, seed: int) -> PreTrainedModel:
    """A freshly initialised causal language model; the same weights for the same seed.

    The caller's random state is left as it was.
    """
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocabulary_size,
        "max_position_embeddings": shape.sequence_length,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "intermediate_size": shape.intermediate_size,
        "tie_word_embeddings": shape.tie_embeddings,
        "bos_token_id": shape.vocabulary_size - 1,
        "eos_token_id": shape.vocabulary_size - 1,
        "use_cache": False,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # Only the chosen architecture is imported: each costs about a second.
        if shape.architecture == "llama":
            from transformers.models.llama import LlamaConfig, LlamaForCausalLM

            return LlamaForCausalLM(LlamaConfig(**sizes))
        from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM

        return Qwen2ForCausalLM(Qwen2Config(**sizes))


def model_fragments(model: PreTrainedModel, count: int) -> list[nn.Module]:
    """Split a model into ``count`` modules of about equal size, to be synchronised in turn.

    Embedding, final norm and output projection stay together, so tied weights meet in one
    fragment; the decoder layers are dealt out, each to the lightest fragment so far.

    Raises:
        ConfigError: more fragments than decoder layers.
    """
    if count == 1:
        return [model]
    layers: int = model.config.num_hidden_layers
    if count > layers:
        raise ConfigError(
            f"{count} fragments cannot be made of {layers} layers",
            fix="Use at most as many fragments as the model has layers.",
        )
    blocks = [model.get_submodule(f"model.layers.{index}") for index in range(layers)]
    inside = {id(p) for block in blocks for p in block.parameters()}
    edges = [
        module
        for module in model.modules()
        if any(id(p) not in inside for p in module.parameters(recurse=False))
    ]
    parts: list[list[nn.Module]] = [edges, *([] for _ in range(count - 1))]
    for block in blocks:
        min(parts, key=_size).append(block)
    return [nn.ModuleList(part) for part in parts]


def _size(modules: Iterable[nn.Module]) -> int:
    """Distinct parameters, counted once where they are shared."""
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())
