"""What one life of a rank has left unsent, by fragment, and how a round takes it in."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from diloco_cloud.errors import CorruptError
from diloco_cloud.exchange.buffers import ChunkedBytes
from diloco_cloud.exchange.codecs.base import Codec, Data
from diloco_cloud.exchange.codecs.chunks import Chunks, settle_chunk
from diloco_cloud.exchange.codecs.feedback import Feedback

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owed:
    """What is unsent while a contribution is under way; fp32, shape (numel,), in payload order.

    Attributes:
        before: by fragment, without this contribution.
        after: of this contribution's fragment once a round's mean has it; None where its codec
            keeps no residual.
    """

    before: Mapping[int, torch.Tensor]
    after: torch.Tensor | None


@dataclass
class Residuals:
    """The residuals of a replica's fragments."""

    _kept: dict[int, Feedback] = field(default_factory=dict, init=False)
    #: From an earlier life, of fragments that this one has not contributed yet.
    _inherited: dict[int, torch.Tensor] = field(default_factory=dict, init=False)

    def of(self, fragment: int, numel: int, decay: float) -> Feedback:
        """The residual of a fragment of so many elements; zeros where none is known."""
        found = self._kept.get(fragment)
        if found is None or len(found.residual) != numel:
            found = self._kept[fragment] = Feedback(numel, decay)
            self._take_over(fragment, found)
        return found

    def get(self, fragment: int) -> Feedback | None:
        """The residual of a fragment that was contributed; None where its codec keeps none."""
        return self._kept.get(fragment)

    def tensors(self) -> dict[int, torch.Tensor]:
        """All of them by fragment, not copied."""
        return {**self._inherited, **{key: one.residual for key, one in self._kept.items()}}

    def inherit(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Begin with what an earlier life has left, in place of what is here."""
        self._kept.clear()
        self._inherited = dict(tensors)

    def _take_over(self, fragment: int, into: Feedback) -> None:
        inherited = self._inherited.pop(fragment, None)
        if inherited is None:
            return
        try:
            into.load(inherited)
        except CorruptError as error:
            logger.warning("%s; it begins with zeros", error.message)


class Settlement:
    """Takes a contribution that a round's mean has off what is owed, chunk by chunk.

    Args:
        codec: of the contribution.
        chunks: of its tensors.
        raw: their bytes, each chunk unchanged until it is settled.
        encoded: what was sent of them.
        feedback: what is owed.
    """

    def __init__(
        self,
        codec: Codec,
        chunks: Chunks,
        raw: ChunkedBytes,
        encoded: Sequence[Data],
        feedback: Feedback,
    ) -> None:
        self._codec, self._chunks, self._raw = codec, chunks, raw
        self._encoded, self._feedback = encoded, feedback
        self._open = set(range(len(chunks)))

    def settle(self, chunk: int) -> None:
        """Settle one chunk, once."""
        if chunk in self._open:
            self._open.remove(chunk)
            settle_chunk(
                self._codec, self._chunks, self._raw.read, self._encoded, self._feedback, chunk
            )

    def settle_all(self) -> None:
        """Settle whatever is left."""
        for chunk in sorted(self._open):
            self.settle(chunk)


class SettlingBytes(ChunkedBytes):
    """Tensors' memory in which a chunk is settled at the last moment, when its mean comes."""

    def __init__(self, views: list[memoryview], chunk_bytes: int, settlement: Settlement) -> None:
        super().__init__(views, chunk_bytes)
        self._settlement = settlement

    def write(self, chunk: int, data: torch.Tensor) -> None:
        """Settle a chunk and replace its bytes by ``data``."""
        self._settlement.settle(chunk)
        super().write(chunk, data)
