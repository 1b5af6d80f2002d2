"""The outer state of a fragment: global parameters and the outer optimizer's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from diloco_cloud.errors import CorruptError, LayoutMismatchError
from diloco_cloud.exchange.layout import digest_tensors

#: (load, save) as torchft's DiLoCo registers them.
StateFns: TypeAlias = tuple[Callable[[dict[str, Any]], None], Callable[[], dict[str, Any]]]

_PARAMETER = "parameter."
_OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class Fragment:
    """A registered fragment: its state as it lives, not copied.

    Attributes:
        key: under which torchft registered it.
        fns: its load and save functions.
        names: of its parameters, in its order; unique in the run.
        parameters: the global parameters, on the CPU, in the same order.
        optimizer: the outer optimizer.
        embeddings: for each parameter, whether rows are looked up in it.
    """

    key: str
    fns: StateFns
    names: tuple[str, ...]
    parameters: tuple[torch.Tensor, ...]
    optimizer: torch.optim.Optimizer
    embeddings: tuple[bool, ...] = ()

    def digest(self) -> str:
        """Hex BLAKE3 over the global parameters' bytes."""
        return digest_tensors(self.parameters)

    def capture(self) -> FragmentState:
        """A copy of the state now."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # torchft copies parameters to the host asynchronously
        optimizer = {
            f"{index}.{name}": value.detach().cpu().clone()
            for index, entries in self.optimizer.state_dict()["state"].items()
            for name, value in entries.items()
            if isinstance(value, torch.Tensor)
        }
        copies = tuple(parameter.detach().clone() for parameter in self.parameters)
        return FragmentState(self.key, self.names, copies, optimizer)

    def restore(self, state: FragmentState) -> None:
        """Write ``state`` back.

        Raises:
            LayoutMismatchError: a parameter has another name, shape or dtype here.
        """
        if state.names != self.names:
            raise LayoutMismatchError("the outer state is of other parameters than the model's")
        for name, mine, theirs in zip(self.names, self.parameters, state.parameters, strict=True):
            if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                raise LayoutMismatchError(
                    f"parameter {name} is {tuple(mine.shape)} {mine.dtype} here and "
                    f"{tuple(theirs.shape)} {theirs.dtype} in the run",
                    fix="Start every replica with the same model, in the same precision.",
                )
        load_fn, save_fn = self.fns
        own_names = save_fn()["original_parameters"]
        entries: dict[int, dict[str, torch.Tensor]] = {}
        for place, tensor in state.optimizer.items():
            index, _, name = place.partition(".")
            entries.setdefault(int(index), {})[name] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        load_fn(
            {
                "original_parameters": dict(zip(own_names, state.parameters, strict=True)),
                "outer_optimizer": {"state": entries, "param_groups": groups},
            }
        )


@dataclass(frozen=True)
class FragmentState:
    """A copy of one fragment's outer state, on the CPU.

    Attributes:
        optimizer: the outer optimizer's tensors by "<parameter index>.<name>", such as
            "0.momentum_buffer"; empty before the first outer step.
    """

    key: str
    names: tuple[str, ...]
    parameters: tuple[torch.Tensor, ...]
    optimizer: Mapping[str, torch.Tensor]

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
            CorruptError: not a state.
            LayoutMismatchError: the file holds other parameters.
        """
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise CorruptError(f"the stored outer state cannot be read: {error}") from None
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
