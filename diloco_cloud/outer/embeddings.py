"""Which parameters are embeddings: averaged as they are where directions are averaged otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def are_embeddings(
    modules: Iterable[nn.Module], parameters: Sequence[torch.Tensor]
) -> tuple[bool, ...]:
    """For each parameter, whether a module looks rows up in it.

    A row is trained on as often as its token occurs, so that the length of such a tensor's
    pseudo-gradient says more of the data than of the training, and replicas that met other tokens
    have directions that do not compare. Known by the module that holds it, as names vary: an output
    projection is none, unless it is tied to the embedding and so the same parameter.

    Args:
        modules: that hold the parameters, at any depth.
        parameters: in question.
    """
    found = {
        id(parameter)
        for module in modules
        for part in module.modules()
        if isinstance(part, _EMBEDDINGS)
        for parameter in part.parameters(recurse=False)
    }
    return tuple(id(parameter) in found for parameter in parameters)
