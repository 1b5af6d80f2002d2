"""A language that a tiny model can learn, and whose every loss is known exactly.

Each symbol depends on the two before it: the next one is drawn from a distribution that belongs to
that pair. Contexts are uniform, so that the loss of a model is a finite sum, without sampling
noise; and no model gets below the language's entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

#: How peaked the distributions are.
_SHARPNESS: Final = 2.0
_MASK: Final = (1 << 63) - 1


@dataclass(frozen=True)
class Language:
    """A second-order Markov source.

    Attributes:
        transitions: probabilities of the next symbol, (symbols * symbols, symbols), fp32; row
            ``a * symbols + b`` belongs to the context (a, b).
    """

    transitions: torch.Tensor

    @classmethod
    def make(cls, symbols: int, seed: int) -> Language:
        """A language of so many symbols, the same for the same seed.

        The logits of a context are a sum of what either symbol says and of a smaller part that is
        the pair's own, so that there is something to be learnt soon, and something late.
        """
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        logits = draw(symbols, 1, symbols) + draw(1, symbols, symbols)
        logits = logits + 0.5 * draw(symbols, symbols, symbols)
        return cls(torch.softmax(_SHARPNESS * logits, -1).reshape(-1, symbols))

    @property
    def symbols(self) -> int:
        return self.transitions.shape[1]

    @property
    def entropy(self) -> float:
        """The loss of a perfect model, in nats per symbol."""
        return float(torch.special.entr(self.transitions).sum(-1).mean())

    def batch(self, size: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Contexts (size,), as rows of ``transitions``, and the symbols that followed (size,)."""
        generator = torch.Generator().manual_seed(seed)
        contexts = torch.randint(len(self.transitions), (size,), generator=generator)
        following = torch.multinomial(self.transitions[contexts], 1, generator=generator)
        return contexts, following[:, 0]

    @torch.no_grad()
    def loss(self, model: nn.Module, parameters: Mapping[str, torch.Tensor] | None = None) -> float:
        """A model's expected loss over all contexts, in nats per symbol.

        Args:
            model: from contexts to logits.
            parameters: to be used instead of its own, by name.
        """
        contexts = torch.arange(len(self.transitions))
        logits = functional_call(model, dict(parameters or {}), contexts)
        return float(-(self.transitions * torch.log_softmax(logits, -1)).sum(-1).mean())


class TinyModel(nn.Module):
    """Two embeddings and one hidden layer.

    Args:
        symbols: of the language.
        width: of the embeddings; the hidden layer is four times as wide.
    """

    def __init__(self, symbols: int, width: int) -> None:
        super().__init__()
        self._symbols = symbols
        self.embedding = nn.Embedding(2 * symbols, width)
        self.hidden = nn.Linear(2 * width, 4 * width)
        self.output = nn.Linear(4 * width, symbols)

    def forward(self, contexts: torch.Tensor) -> torch.Tensor:
        """Logits (n, symbols) of contexts (n,)."""
        first, second = contexts // self._symbols, contexts % self._symbols
        embedded = self.embedding(torch.stack((first, second + self._symbols), -1)).flatten(-2)
        logits: torch.Tensor = self.output(functional.gelu(self.hidden(embedded)))
        return logits


def batch_seed(seed: int, rank: int, position: int) -> int:
    """A seed of its own for each batch of each rank, the same in every life."""
    mixed = (seed * 1_000_003 + rank) * 1_000_000_007 + position
    return mixed & _MASK
