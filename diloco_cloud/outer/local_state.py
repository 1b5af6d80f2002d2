"""What a replica has that no other has, at the moment it contributes to a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from diloco_cloud.exchange import wire
from diloco_cloud.exchange.layout import all_finite

#: Parts that a file's tensors belong to, before the first colon of their names.
OPTIMIZER: Final = "optimizer"
RANDOM: Final = "random"
LOCAL: Final = "local"
BUFFER: Final = "buffer"
#: What the codec of contributions has left unsent, by fragment: without the contribution that the
#: state goes with, and with it, where a mean has it.
OWED: Final = "owed"
OWED_AFTER: Final = "owed after"


@dataclass(frozen=True, kw_only=True)
class LocalState:
    """A copy of it, on the CPU.

    Attributes:
        fits: describes the model, the optimizer and the schedule it was taken from, as JSON values;
            it is of use only where they are the same.
        position: inner steps of this rank's data that were behind it.
        unmerged: inner steps from there to the merge of the round; 0 where that follows at once.
        unsynced: by fragment, inner steps since its work was last taken into a round.
        optimizer, random: what is no tensor of these, as JSON values.
        tensors: by part and name, "part:name".
    """

    fits: Any
    position: int
    unmerged: int
    unsynced: tuple[int, ...]
    optimizer: Any
    random: Any
    tensors: Mapping[str, torch.Tensor]

    def part(self, part: str) -> dict[str, torch.Tensor]:
        """The tensors of one part, by name."""
        start = f"{part}:"
        return {
            name.removeprefix(start): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(start)
        }

    @property
    def is_finite(self) -> bool:
        """Whether neither parameters nor optimizer hold a NaN or an infinite value."""
        floating = (t for t in self.tensors.values() if t.is_floating_point())
        return all(all_finite(t) for t in floating)

    def to_json(self) -> dict[str, Any]:
        """All but the tensors, as JSON values."""
        return {name: value for name, value in vars(self).items() if name != "tensors"}

    @classmethod
    def from_json(cls, values: Any, tensors: Mapping[str, torch.Tensor]) -> LocalState:
        """Rebuild it; raises what :func:`diloco_cloud.exchange.wire.parse` expects."""
        kinds: Mapping[str, Callable[[Any], Any]] = {
            "fits": _anything,
            "position": wire.count,
            "unmerged": wire.count,
            "unsynced": wire.many(wire.count),
            "optimizer": _anything,
            "random": _anything,
        }
        return cls(tensors=tensors, **wire.fields(values, kinds))


def in_part(part: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors`` by the names they have in a :class:`LocalState`."""
    return {f"{part}:{name}": tensor for name, tensor in tensors.items()}


def _anything(value: Any) -> Any:
    return value
