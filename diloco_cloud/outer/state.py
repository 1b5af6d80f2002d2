"""The outer state of a fragment: global parameters and the outer optimizer's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from safetensors.torch import load, save

from diloco_cloud.errors import LayoutMismatchError
from diloco_cloud.exchange.layout import digest_tensors

#: (load, save) as torchft's DiLoCo registers them.
StateFns: TypeAlias = tuple[Callable[[dict[str, Any]], None], Callable[[], dict[str, Any]]]

_PARAMETER = "parameter."
_OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class FragmentState:
    """A copy of one fragment's outer state, on the CPU.

    Attributes:
        key: as registered with the manager.
        names: of the parameters, in the fragment's order.
        parameters: the global parameters, in the same order.
        optimizer: the outer optimizer's tensors by "<parameter index>.<name>", such as
            "0.momentum_buffer"; empty before the first outer step.
    """

    key: str
    names: tuple[str, ...]
    parameters: tuple[torch.Tensor, ...]
    optimizer: dict[str, torch.Tensor]

    @property
    def digest(self) -> str:
        """Hex BLAKE3 over the global parameters' bytes."""
        return digest_tensors(self.parameters)

    def encode(self) -> bytes:
        """The state as a safetensors file, which any tool can open."""
        tensors = {f"{_PARAMETER}{n}": t for n, t in zip(self.names, self.parameters, strict=True)}
        tensors |= {f"{_OPTIMIZER}{n}": t for n, t in self.optimizer.items()}
        return save({name: t.contiguous() for name, t in tensors.items()})

    @classmethod
    def decode(cls, data: bytes, key: str, names: Sequence[str]) -> FragmentState:
        """Rebuild a state whose parameters are called ``names``.

        Raises:
            LayoutMismatchError: the file holds other parameters.
        """
        tensors = load(data)
        stored = {n.removeprefix(_PARAMETER) for n in tensors if n.startswith(_PARAMETER)}
        if stored != set(names):
            odd = sorted(stored ^ set(names))
            raise LayoutMismatchError(
                f"this replica's model and the run's differ in {len(odd)} tensors (as {odd[0]})",
                fix="Start every replica with the same model and the same fragments.",
            )
        return cls(
            key,
            tuple(names),
            tuple(tensors[f"{_PARAMETER}{name}"] for name in names),
            {
                name.removeprefix(_OPTIMIZER): tensor
                for name, tensor in tensors.items()
                if name.startswith(_OPTIMIZER)
            },
        )


def capture(key: str, saved: dict[str, Any], names: Sequence[str] | None) -> FragmentState:
    """Copy what a fragment's save function returned; it hands out live references."""
    parameters: dict[str, torch.Tensor] = saved["original_parameters"]
    optimizer = {
        f"{index}.{name}": value.detach().cpu().clone()
        for index, entries in saved["outer_optimizer"]["state"].items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    }
    copies = tuple(p.detach().cpu().clone() for p in parameters.values())
    return FragmentState(key, tuple(names or parameters), copies, optimizer)


def restore(state: FragmentState, fns: StateFns) -> None:
    """Write ``state`` back through a fragment's load function.

    Raises:
        LayoutMismatchError: a parameter has another shape or dtype here.
    """
    load_fn, save_fn = fns
    saved = save_fn()
    here: dict[str, torch.Tensor] = saved["original_parameters"]
    for name, mine, theirs in zip(state.names, here.values(), state.parameters, strict=True):
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            raise LayoutMismatchError(
                f"parameter {name} is {tuple(mine.shape)} {mine.dtype} here and "
                f"{tuple(theirs.shape)} {theirs.dtype} in the run",
                fix="Start every replica with the same model, in the same precision.",
            )
    entries: dict[int, dict[str, torch.Tensor]] = {}
    for place, tensor in state.optimizer.items():
        index, _, name = place.partition(".")
        entries.setdefault(int(index), {})[name] = tensor
    groups = saved["outer_optimizer"]["param_groups"]
    load_fn(
        {
            "original_parameters": dict(zip(here, state.parameters, strict=True)),
            "outer_optimizer": {"state": entries, "param_groups": groups},
        }
    )
