"""The outer optimizer, in steps that give the same bits on every machine."""

from __future__ import annotations

from collections.abc import Callable

import torch


class OuterSGD(torch.optim.SGD):
    """SGD with (Nesterov) momentum on mean pseudo-gradients (arXiv:2311.08105, section 3).

    ``buf = mu buf + g; theta = theta - lr (g + mu buf)`` (without Nesterov: ``- lr buf``), every
    product and every sum rounded on its own. torch's SGD fuses them on the processors that can,
    so that its results differ in the last bit between kinds of CPU, and between CPU and GPU:
    replicas on unlike machines would drift apart, and only deltas travel between them.

    Args:
        params: as for any optimizer.
        lr: step size.
        momentum: 0 for plain SGD.
        nesterov: needs a momentum.
    """

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        *,
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, nesterov=nesterov)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step with the gradients that are there."""
        if closure is not None:
            raise TypeError("the outer optimizer has no loss to evaluate")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, float]) -> None:
        step = parameter.grad
        assert step is not None
        if group["momentum"]:
            buffer = self.state[parameter].get("momentum_buffer")
            if buffer is None:
                buffer = self.state[parameter]["momentum_buffer"] = step.clone()
            else:
                buffer.mul_(group["momentum"]).add_(step)
            step = step + buffer * group["momentum"] if group["nesterov"] else buffer
        parameter.sub_(step * group["lr"])
