"""What goes into a round, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.contribution import Header
from diloco_cloud.exchange.layout import TensorLayout
from diloco_cloud.exchange.payloads import Payloads


@dataclass(frozen=True)
class RoundResult:
    """What a round came to.

    Attributes:
        commit: the agreed decision.
        tensors: the reduced tensors in the caller's order, on the CPU; None where there is nothing
            to apply: the decision was to discard, or there is no usable mean.
        reason: why there is nothing to apply, or "".
    """

    commit: Commit
    tensors: list[torch.Tensor] | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a contribution stands for.

    Attributes:
        base: digest of the global parameters the tensors were taken against.
        tokens: processed since this replica's work was last in a round of the fragment.
        inner_steps: optimizer steps since then.
        carried: tokens of those that missed a round.
        staleness: rounds of the fragment since the oldest of that work began.
        processed: tokens of this life in all.
        position: inner steps of this rank's data behind it once the round is merged.
        policy_version: outer steps in the oldest policy that rollouts of the work came from; 0
            where nothing is rolled out.
    """

    base: str = ""
    tokens: int = 0
    inner_steps: int = 0
    carried: int = 0
    staleness: int = 0
    processed: int = 0
    position: int = 0
    policy_version: int = 0


@dataclass(frozen=True)
class Contributed:
    """This replica's part in a round, as the store has it.

    Attributes:
        payloads: reads the round's contributions; knows this one where memory holds its bytes.
        layout: of its tensors, where this life has them.
        own: its header, and the header's digest.
        is_there: whether the store holds it, and not something damaged in its place.
    """

    payloads: Payloads
    layout: TensorLayout | None
    own: tuple[Header, str]
    is_there: bool
