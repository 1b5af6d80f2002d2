"""The default trainer's inner optimizer for many models at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

BETAS = (0.9, 0.95)
EPSILON = 1e-8
DECAY = 0.1
CLIP = 1.0


class StackedAdamW:
    """AdamW with the gradient clipped, as ``trainers.inner`` has it, each model on its own.

    Args:
        parameters: of all models, with the model as the first dimension; matrices decay.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._means = [torch.zeros_like(p) for p in parameters]
        self._squares = [torch.zeros_like(p) for p in parameters]
        self._steps = 0

    @torch.no_grad()
    def step(self, learning_rates: torch.Tensor) -> None:
        """Take one step with the gradients that are there, and drop them.

        Args:
            learning_rates: by model.
        """
        self._steps += 1
        clip = CLIP / (self._gradient_norms() + 1e-6)
        clip.clamp_(max=1.0)
        first, second = (1 - beta**self._steps for beta in BETAS)
        for parameter, mean, square in zip(
            self._parameters, self._means, self._squares, strict=True
        ):
            shape = (-1, *(1 for _ in parameter.shape[1:]))
            gradient = parameter.grad * clip.view(shape)
            mean.lerp_(gradient, 1 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            update = (mean / first) / (square / second).sqrt_().add_(EPSILON)
            if parameter.ndim > 2:
                update.add_(parameter, alpha=DECAY)
            parameter.sub_(update.mul_(learning_rates.view(shape)))
            parameter.grad = None

    def _gradient_norms(self) -> torch.Tensor:
        return sum(p.grad.flatten(1).square().sum(1) for p in self._parameters).sqrt()
