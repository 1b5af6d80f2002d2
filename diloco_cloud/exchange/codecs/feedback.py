"""Error feedback: what a codec left unsent of a fragment's updates is added to the next one.

    e' = β e + Δ        what is encoded
    e  = e' - decoded   what remains

The residual changes only when a round has taken the contribution in. Where one is late, or left
out, or the round has no mean, its Δ goes into the next one whole, and so does the residual.
"""

from __future__ import annotations

import torch

from diloco_cloud.errors import CorruptError
from diloco_cloud.exchange.codecs.base import Codec, Data
from diloco_cloud.exchange.layout import all_finite


class Feedback:
    """One replica's residual of one fragment.

    Args:
        numel: elements of the fragment.
        decay: β, the share of the residual that goes into the next contribution.

    Attributes:
        residual: fp32, shape (numel,), on the CPU, in payload order. A restarted replica that has
            lost it begins with zeros, and only its unsent updates are lost.
    """

    def __init__(self, numel: int, decay: float) -> None:
        self.decay = decay
        self.residual = torch.zeros(numel)

    def load(self, residual: torch.Tensor) -> None:
        """Take over a stored residual.

        Raises:
            CorruptError: it is of another fragment, or has NaN or infinite values.
        """
        if (residual.shape, residual.dtype) != (self.residual.shape, torch.float32):
            raise CorruptError("the stored residual is of another fragment than this one")
        if not all_finite(residual):
            raise CorruptError("the stored residual has NaN or infinite values")
        self.residual = residual.to("cpu", copy=True)

    def copy(self) -> Feedback:
        """Another of the same residual."""
        other = Feedback(0, self.decay)
        other.residual = self.residual.clone()
        return other

    def added_to(
        self, values: torch.Tensor, start: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What to encode, shape (n,).

        Args:
            values: some of the update's elements, fp32, shape (n,).
            start: number of the first one.
            out: where it goes, fp32, shape (n,); by default new memory.
        """
        kept = self.residual[start : start + len(values)]
        return torch.mul(kept, self.decay, out=out).add_(values)

    def settle(self, values: torch.Tensor, start: int, codec: Codec, data: Data) -> None:
        """Keep what remains of some elements, now that the round has what was sent of them.

        Args:
            values: as :meth:`added_to` was given them.
            start: likewise.
            codec: of the contribution.
            data: what it made of these elements.
        """
        remaining = self.residual[start : start + len(values)]
        remaining.mul_(self.decay).add_(values)
        codec.subtract(data, remaining)
        if not all_finite(remaining):  # Sums of finite values can overflow.
            remaining.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
