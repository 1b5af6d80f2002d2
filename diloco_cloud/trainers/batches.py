"""Which tokens a replica sees at which step, and on what the merged model is judged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from diloco_cloud.errors import ConfigError

Tokens = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class BatchSampler:
    """Random windows of a shard; a batch is a pure function of (seed, rank, inner step).

    A replica restarted at step n therefore meets the batches it would have met without the crash,
    and keeps no data state.

    Attributes:
        tokens: the rank's shard, one row of ids.
        batch_size: windows per batch.
        sequence_length: predicted tokens per window.
        seed, rank: the rest of what the draw depends on.
    """

    tokens: Tokens
    batch_size: int
    sequence_length: int
    seed: int
    rank: int

    def __post_init__(self) -> None:
        if len(self.tokens) <= self.sequence_length:
            raise ConfigError(
                f"rank {self.rank} has {len(self.tokens)} tokens of text, not enough for one "
                f"sequence of {self.sequence_length}",
                fix="Give more text, fewer replicas or a shorter sequence_length.",
            )

    def batch(self, step: int) -> torch.Tensor:
        """Ids of inner step ``step``, int64, shape (batch_size, sequence_length + 1)."""
        # SeedSequence takes no negative numbers.
        entropy = (self.seed & (1 << 64) - 1, self.rank, step)
        generator = np.random.default_rng(entropy)
        last = len(self.tokens) - self.sequence_length
        return _windows(self.tokens, generator.integers(last, size=self.batch_size), last)

    def __len__(self) -> int:
        return len(self.tokens)


def validation_windows(tokens: Tokens, *, count: int, sequence_length: int) -> torch.Tensor:
    """At most ``count`` windows, evenly spread over the held-out text and without overlap.

    Returns:
        int64 ids, shape (windows, sequence_length + 1).

    Raises:
        ConfigError: the held-out text is shorter than one window.
    """
    last = len(tokens) - sequence_length
    if last < 1:
        raise ConfigError(
            f"{len(tokens)} tokens are held out, not enough for one sequence of {sequence_length}",
            fix="Give more text, a larger validation_fraction or a shorter sequence_length.",
        )
    count = min(count, max(1, last // sequence_length))
    return _windows(tokens, np.linspace(0, last - 1, count).astype(np.int64), last)


def _windows(tokens: Tokens, starts: npt.NDArray[np.int64], last: int) -> torch.Tensor:
    width = len(tokens) - last + 1
    rows = tokens[starts[:, None] + np.arange(width)]
    return torch.from_numpy(rows.astype(np.int64))
