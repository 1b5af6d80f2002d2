"""What a decision says of a mean: how much each contribution counts, how long the mean is to be.

Plain numbers, worked out in the order of the commit, so that whoever decides a round finds the same
bits. Nothing here needs torch: commits are read by the command line too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, Protocol, TypeAlias

#: How contributions are weighed: "tokens" by how much they were trained on, "equal" not at all,
#: "quality" by tokens times tokens per step, as Decoupled DiLoCo does (arXiv:2604.21428): of two
#: that saw as many tokens, the one with larger batches has the less noisy steps.
Weighting: TypeAlias = Literal["tokens", "equal", "quality"]
WEIGHTINGS: Final = ("tokens", "equal", "quality")
#: How they become one: "mean" is the weighted mean; "rda" the mean of directions, as long as the
#: contributions are on average (see :mod:`~diloco_cloud.exchange.merging`).
Merge: TypeAlias = Literal["mean", "rda"]
MERGES: Final = ("mean", "rda")

#: A token that is k rounds late weighs 1 / (1 + 0.25 k) of one that is not (the best of the values
#: that fsb_decoupled_diloco tried; it rejects nothing, as rejecting cost it a quarter of the work).
STALENESS_DISCOUNT: Final = 0.25

#: In place of a norm: the tensor is averaged as it is.
PLAIN: Final = -1.0


class Amount(Protocol):
    """How much work a contribution stands for, as its header says."""

    @property
    def tokens(self) -> int:
        """Tokens in all."""

    @property
    def inner_steps(self) -> int:
        """Optimizer steps they were trained in."""

    @property
    def carried(self) -> int:
        """Of the tokens, those that missed a round."""

    @property
    def staleness(self) -> int:
        """Rounds since the oldest of that work began."""


def weights(work: Sequence[Amount], weighting: str) -> list[float]:
    """The relative weight of each contribution, all above 0.

    All weigh the same where what they are to be weighed by is not known of every one of them.

    Args:
        work: of the contributions, in the order of the commit.
        weighting: one of :data:`WEIGHTINGS`.

    Raises:
        ValueError: no such weighting.
    """
    if weighting not in WEIGHTINGS:
        raise ValueError(f"{weighting!r} is not one of {', '.join(WEIGHTINGS)}")
    counted = all(one.tokens > 0 for one in work)
    if weighting == "tokens" and counted:
        return [_fresh_tokens(one) for one in work]
    if weighting == "quality" and counted and all(one.inner_steps > 0 for one in work):
        return [_fresh_tokens(one) * (one.tokens / one.inner_steps) for one in work]
    return [1.0] * len(work)


def _fresh_tokens(one: Amount) -> float:
    """Tokens, of which those that missed a round count less for every round they are late."""
    fresh = one.tokens - one.carried
    return fresh + one.carried / (1 + STALENESS_DISCOUNT * one.staleness)


def mean_norms(norms: Sequence[Sequence[float]], weights: Sequence[float]) -> tuple[float, ...]:
    """How long each tensor of the merged update is to be: sum(w |v|) / sum(w).

    Args:
        norms: of the tensors, by contribution, in the order of the commit; :data:`PLAIN` where a
            tensor is averaged as it is, which all must agree on.
        weights: of the contributions; relative.

    Raises:
        ValueError: they have other tensors, or do not agree on which are averaged as they are.
    """
    if not norms or len(norms) != len(weights):
        raise ValueError(f"{len(norms)} contributions have {len(weights)} weights")
    if any(plain(one) != plain(norms[0]) for one in norms):
        raise ValueError("contributions differ in which tensors are averaged as they are")
    return tuple(_mean(column, weights) for column in zip(*norms, strict=True))


def plain(norms: Sequence[float]) -> tuple[bool, ...]:
    """Which tensors are averaged as they are."""
    return tuple(norm == PLAIN for norm in norms)


def _mean(column: Sequence[float], weights: Sequence[float]) -> float:
    longest = max(column)
    if longest <= 0:  # all zero, or all averaged as they are
        return longest
    # As parts of the longest: a sum of norms can overflow where their mean does not.
    parts = math.fsum(w * (norm / longest) for w, norm in zip(weights, column, strict=True))
    return longest * min(1.0, parts / math.fsum(weights))
