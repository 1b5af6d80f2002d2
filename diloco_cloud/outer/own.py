"""What an outer loop trains with that the other replicas do not share: captured and restored."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from diloco_cloud.errors import CorruptError
from diloco_cloud.exchange.layout import TensorLayout
from diloco_cloud.outer import optimizer_state, random_state
from diloco_cloud.outer.local_state import BUFFER, LOCAL, OPTIMIZER, RANDOM, LocalState, in_part
from diloco_cloud.outer.tensor_file import can_hold

logger = logging.getLogger(__name__)


class OwnParts:
    """The inner optimizer, the local parameters, the buffers and the random states of a replica.

    Args:
        optimizer: the inner one.
        fragments: by fragment, the trained parameters by name.
        modules: whose buffers, such as running statistics, belong to this replica alone.
        schedule: what decides when which fragment is synchronised and how it is merged.
        keeps_own: whether a merge leaves something of the local parameters, or comes later than
            the contribution; else the contributing fragment's need not be stored.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        fragments: Sequence[Mapping[str, nn.Parameter]],
        modules: Sequence[nn.Module],
        *,
        schedule: Sequence[float],
        keeps_own: bool,
    ) -> None:
        self._optimizer = optimizer
        self._fragments = fragments
        self._parameters = {name: p for fragment in fragments for name, p in fragment.items()}
        self._modules = modules
        self._schedule = list(schedule)
        self._keeps_own = keeps_own

    def capture(self, fragment: int, **where: Any) -> LocalState:
        """Copy everything to the CPU.

        Args:
            fragment: which is being contributed.
            **where: the :class:`LocalState`'s position, unmerged and unsynced.

        Raises:
            TypeError: there is something that cannot be stored.
        """
        optimizer, packed = optimizer_state.capture(self._optimizer, self._parameters)
        generators, random = random_state.capture()
        return LocalState(
            fits=self._describe(),
            optimizer=packed,
            random=random,
            tensors={
                **in_part(OPTIMIZER, optimizer),
                **in_part(RANDOM, generators),
                **in_part(LOCAL, _copies(self._local(fragment))),
                **in_part(BUFFER, _copies(dict(self._buffers()))),
            },
            **where,
        )

    def restore(self, local: LocalState, fragment: int) -> None:
        """Put a captured state back, all of it or nothing; but for the random states.

        Raises:
            CorruptError: it is of another model, optimizer or schedule.
        """
        if local.fits != self._describe():
            raise CorruptError("it is of another model, optimizer or schedule")
        parameters, stored = self._local(fragment), local.part(LOCAL)
        if parameters.keys() != stored.keys() or not all(
            _is_like(parameters[name], tensor) for name, tensor in stored.items()
        ):
            raise CorruptError("its local parameters are not this model's")
        try:
            state = optimizer_state.unpack(local.part(OPTIMIZER), local.optimizer, self._parameters)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptError(f"its optimizer state cannot be read: {error!r}") from None
        optimizer_state.replace(self._optimizer, state)
        buffers = local.part(BUFFER)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(stored[name])
            for name, buffer in self._buffers():
                # Caches are buffers too, and change their shape.
                if name in buffers and _is_like(buffer, buffers[name]):
                    buffer.copy_(buffers[name])

    def restore_random(self, local: LocalState) -> None:
        """Put the random states back; one that is not to be had here costs a warning."""
        try:
            random_state.restore(local.part(RANDOM), local.random)
        except (ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
            logger.warning("the random states could not be restored: %r", error)

    def _local(self, fragment: int) -> dict[str, nn.Parameter]:
        """The parameters that are not the global ones once ``fragment``'s sync is over."""
        return {
            name: parameter
            for index, parameters in enumerate(self._fragments)
            if index != fragment or self._keeps_own
            for name, parameter in parameters.items()
        }

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, module in enumerate(self._modules):
            for name, buffer in module.named_buffers():
                yield f"{index}.{name}", buffer

    def _describe(self) -> dict[str, Any]:
        parameters = list(self._parameters.values())
        return {
            "model": TensorLayout.of(parameters, list(self._parameters)).digest,
            "schedule": self._schedule,
            "optimizer": optimizer_state.describe(self._optimizer, self._parameters),
        }


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for name, tensor in tensors.items():
        if not can_hold(tensor):
            raise TypeError(f"{name}, a {type(tensor).__name__} of {tensor.dtype},")
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _is_like(mine: torch.Tensor, stored: torch.Tensor) -> bool:
    return (mine.shape, mine.dtype) == (stored.shape, stored.dtype)
