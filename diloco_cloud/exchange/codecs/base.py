"""What a codec is, and the mean of what several replicas encoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from diloco_cloud.errors import CorruptContributionError
from diloco_cloud.exchange.layout import all_finite

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
#: Bytes as a store, an encoder or a tensor hands them out.
Data: TypeAlias = bytes | bytearray | memoryview | Bytes
Words: TypeAlias = npt.NDArray[np.uint32]

#: Blocks and values smaller than this are written as zero. Nothing a decoder multiplies is then
#: subnormal, which a processor told to flush those would make another number than the rest.
SMALLEST = 2.0**-100


class Codec(ABC):
    """One way to write fp32 values in bytes, and to read them back.

    Decoding gives the same bits on every machine, with any number of threads: only sums, products
    and quotients that IEEE 754 rounds correctly, each on its own, and tables. An encoder of this
    package does so too.

    Attributes:
        name: of the wire format, for good; what contributions and commits call it.
        exact: decoding gives back the very values.
        decay: β of the error feedback without which the codec loses too much; None where it can do
            without.
        bits_per_parameter: what a large chunk of ordinary values takes.
        sums: the codec in which the sums of a sharded round travel; "raw" is the tensors' own
            dtypes, "" says that nobody sends any: contributions are so small that everyone reads
            all of them. Averaging lessens the errors of contributions, as they are independent;
            nothing lessens that of a sum, so no sum has fewer than eight bits. Measured on eight
            Gaussian contributions with cosines of 0.25: e3m0's mean has a relative error of 0.118;
            an int8 sum of it adds 0.007 (0.118 in all), an e3m0 one 0.20 (0.231 in all).
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = False
    decay: float | None = None
    bits_per_parameter: float
    sums: ClassVar[str] = "raw"

    @abstractmethod
    def encode(self, values: torch.Tensor) -> memoryview:
        """Encode one chunk.

        NaN and infinite values are never hidden: what is decoded has some too.

        Args:
            values: any shape, stride, floating dtype and device; read as fp32, in order.

        Returns:
            Bytes, at most ``longest(values.numel())``; they may be the memory of ``values``.
        """

    @abstractmethod
    def decode(self, data: Data, numel: int) -> torch.Tensor:
        """Values of one chunk: fp32, shape (numel,), new memory. Elements not sent are 0.

        Reads ``data`` without trusting it; memory and time are bounded by ``numel`` and
        ``len(data)``.

        Raises:
            CorruptContributionError: not a chunk of ``numel`` values in this format.
        """

    @abstractmethod
    def longest(self, numel: int) -> int:
        """The most bytes that a chunk of ``numel`` values takes; a reader accepts no more."""

    def all_finite(self, data: Data, numel: int) -> bool:
        """Whether what :meth:`decode` makes of a chunk has neither NaN nor infinite values.

        Raises:
            CorruptContributionError: as :meth:`decode` does.
        """
        return all_finite(self.decode(data, numel))

    def subtract(self, data: Data, values: torch.Tensor) -> None:
        """Take what :meth:`decode` makes of a chunk off ``values`` (fp32, 1-D), in place.

        Raises:
            CorruptContributionError: as :meth:`decode` does; ``values`` are as they were.
        """
        values.sub_(self.decode(data, len(values)))

    def mean(self, numel: int) -> ChunkMean:
        """A mean to which encoded chunks of ``numel`` values are added."""
        return DenseMean(self, numel)


class ChunkMean(ABC):
    """The weighted mean of one chunk over several contributions, added in the caller's order."""

    @abstractmethod
    def add(self, data: Data, weight: float) -> None:
        """Add one contribution's chunk.

        Raises:
            CorruptContributionError: ``data`` cannot be decoded; the mean is as it was.
        """

    @abstractmethod
    def result(self) -> torch.Tensor:
        """The mean: fp32, shape (numel,); 0 where nothing was added. Ends the use of the object."""

    def clear(self) -> bool:
        """Begin again as a new object, in the memory of what :meth:`result` returned.

        Returns:
            Whether it did; what cannot is not used again.
        """
        return False


class DenseMean(ChunkMean):
    """``sum_i w_i x_i / sum_i w_i`` of every element."""

    def __init__(self, codec: Codec, numel: int) -> None:
        self._codec = codec
        self._sums = torch.zeros(numel)
        self._total = 0.0

    def add(self, data: Data, weight: float) -> None:
        values = self._codec.decode(data, self._sums.numel())
        # A product and a sum, each rounded: add_(alpha=) is one fused step on some CPUs and two on
        # others, and the bits would depend on who reduces.
        self._sums.add_(values if weight == 1 else values.mul_(weight))
        self._total += weight

    def result(self) -> torch.Tensor:
        return self._sums.div_(self._total) if self._total else self._sums

    def clear(self) -> bool:
        self._sums.zero_()
        self._total = 0.0
        return True


def as_floats(values: torch.Tensor) -> Floats:
    """``values`` as a flat fp32 array; a copy only where they are not that already."""
    flat = values.detach().to("cpu", torch.float32).contiguous().view(-1)
    array: Floats = flat.numpy()
    return array


def as_bytes(data: Data, nbytes: int, what: str) -> Bytes:
    """``data`` as an array.

    Raises:
        CorruptContributionError: it is not ``nbytes`` long.
    """
    array = np.frombuffer(data, dtype=np.uint8)
    if len(array) != nbytes:
        raise CorruptContributionError(f"{what} has {len(array)} bytes instead of {nbytes}")
    return array


def overlap(data: Data, values: torch.Tensor) -> bool:
    """Whether ``data`` is some of the memory of ``values``, on the CPU."""
    return np.may_share_memory(np.frombuffer(data, np.uint8), values.detach().numpy())


def memory(array: Bytes) -> memoryview:
    """The bytes of a contiguous array."""
    return array.data.cast("B") if len(array) else memoryview(b"")
