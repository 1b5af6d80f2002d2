"""How a list of tensors becomes one run of bytes, and how replicas know they mean the same.

Tensors are laid out by dtype, widest first, and in the given order within a dtype, so that every
element is aligned without padding and each dtype is one contiguous segment. Nothing is copied on
the way out: a CPU tensor's own memory goes to the store.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from blake3 import blake3

from diloco_cloud.exchange import wire

#: dtypes a contribution can hold, by the name used on the wire.
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Segment:
    """One dtype's share of a payload: ``numel`` elements from byte ``start``."""

    dtype: torch.dtype
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """First byte after the segment."""
        return self.start + self.numel * self.dtype.itemsize

    @property
    def accumulator(self) -> torch.dtype:
        """dtype to add in: at least fp32 (bf16 and fp16 would lose the small contributions)."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class TensorLayout:
    """Names, shapes and dtypes of the tensors of one round, in the caller's order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(
        cls, tensors: Sequence[torch.Tensor], names: Sequence[str] | None = None
    ) -> TensorLayout:
        """Describe ``tensors``.

        Raises:
            ValueError: no tensors, or another number of names.
            TypeError: a dtype that cannot be averaged.
        """
        if not tensors:
            raise ValueError("there is nothing to reduce: the list of tensors is empty")
        names = [str(i) for i in range(len(tensors))] if names is None else list(names)
        if len(names) != len(tensors):
            raise ValueError(f"{len(tensors)} tensors have {len(names)} names")
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.dtype not in _NAMES:
                raise TypeError(
                    f"tensor {name!r} is {tensor.dtype}; only {', '.join(DTYPES)} can be averaged"
                )
        return cls(
            tuple(names),
            tuple(tuple(t.shape) for t in tensors),
            tuple(t.dtype for t in tensors),
        )

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Indices of the tensors in payload order."""

        def rank(i: int) -> tuple[int, str, int]:
            return (-self.dtypes[i].itemsize, _NAMES[self.dtypes[i]], i)

        return tuple(sorted(range(len(self.names)), key=rank))

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The payload's dtypes, in payload order."""
        found: list[Segment] = []
        for i in self.order:
            numel = _numel(self.shapes[i])
            if found and found[-1].dtype == self.dtypes[i]:
                last = found.pop()
                found.append(Segment(last.dtype, last.start, last.numel + numel))
            else:
                found.append(Segment(self.dtypes[i], found[-1].stop if found else 0, numel))
        return tuple(found)

    def within(self, start: int, length: int) -> Iterator[tuple[Segment, int, int]]:
        """Segments that a part of the payload touches, with their bytes' place in that part."""
        for segment in self.segments:
            low, high = max(segment.start, start), min(segment.stop, start + length)
            if low < high:
                yield segment, low - start, high - start

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.segments[-1].stop

    @cached_property
    def numel(self) -> int:
        """Elements over all tensors."""
        return sum(s.numel for s in self.segments)

    def to_json(self) -> str:
        """A row of name, shape and dtype for each tensor."""
        rows = [
            [name, list(shape), _NAMES[dtype]]
            for name, shape, dtype in zip(self.names, self.shapes, self.dtypes, strict=True)
        ]
        return json.dumps(rows, separators=(",", ":"))

    @classmethod
    def from_rows(cls, rows: Any) -> TensorLayout:
        """What :meth:`to_json` wrote, decoded.

        Raises:
            ValueError, TypeError, KeyError: it is something else.
        """
        names, shapes, dtypes = zip(*rows, strict=True)
        return cls(
            tuple(map(wire.text, names)),
            tuple(tuple(map(wire.count, shape)) for shape in shapes),
            tuple(DTYPES[dtype] for dtype in dtypes),
        )

    @cached_property
    def digest(self) -> str:
        """Hex BLAKE3 (128 bits) of names, shapes and dtypes."""
        return blake3(self.to_json().encode()).hexdigest(length=16)

    def views(self, tensors: Sequence[torch.Tensor]) -> list[memoryview]:
        """The tensors' memory in payload order; only non-contiguous or GPU tensors are copied."""
        return [byte_view(tensors[i]) for i in self.order]

    def unpack(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """Tensors over ``payload`` (uint8, ``nbytes`` long), in the caller's order, not copied."""
        found: dict[int, torch.Tensor] = {}
        start = 0
        for i in self.order:
            stop = start + _numel(self.shapes[i]) * self.dtypes[i].itemsize
            found[i] = payload[start:stop].view(self.dtypes[i]).view(self.shapes[i])
            start = stop
        return [found[i] for i in range(len(self.names))]


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of ``tensor``, without a copy where it is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data.cast("B")


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; a quarter of the time of ``isfinite().all()``."""
    total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
    # Finite elements can still have a sum that is not.
    return bool(total.isfinite()) or bool(tensor.isfinite().all())


def l2_norm(tensors: Sequence[torch.Tensor]) -> float:
    """L2 norm over all elements, in fp32 per tensor; NaN or infinite where an element is."""
    norms = [
        float(torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)))
        for t in tensors
        if t.numel()
    ]
    return math.hypot(*norms)


def digest_tensors(tensors: Sequence[torch.Tensor]) -> str:
    """Hex BLAKE3 (256 bits) over the bytes of ``tensors``, one after the other."""
    hasher = blake3()
    for tensor in tensors:
        hasher.update(byte_view(tensor))
    return hasher.hexdigest()


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
