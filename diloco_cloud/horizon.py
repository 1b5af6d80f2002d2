"""Which outer optimizer a run has if nobody says: by how long it is.

Plain averaging makes the most of a short run; a momentum of 0.9 needs tens of rounds to pay. The
measurements are in benchmarks/results/outer_horizon.md, the decision in docs/decisions/0013.
It is light, since the launcher decides: the spec holds the numbers, the same for all replicas.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

#: "auto" goes by the run's length; "sgd" is what ``outer_lr``, ``outer_momentum`` and ``nesterov``
#: say.
OuterOptimizer: TypeAlias = Literal["auto", "averaging", "nesterov", "sgd"]


class OuterStep(NamedTuple):
    """Settings of the outer SGD: learning rate, momentum, and whether that is Nesterov's."""

    lr: float
    momentum: float
    nesterov: bool


#: The mean of the replicas becomes the model.
AVERAGING: Final = OuterStep(lr=1.0, momentum=0.0, nesterov=False)
#: As Streaming DiLoCo has it (arXiv:2501.18512).
NESTEROV: Final = OuterStep(lr=0.4, momentum=0.9, nesterov=True)
#: As DiLoCo has it (arXiv:2311.08105, section 3): the outer loop's own defaults.
PUBLISHED: Final = OuterStep(lr=0.7, momentum=0.9, nesterov=True)

#: A run is long that has at least so many rounds of each fragment ...
LONG_ROUNDS: Final = 70
#: ... and, in these, so many inner steps.
LONG_STEPS: Final = 1000


def outer_step(optimizer: OuterOptimizer, rounds: int | None, sync_every: int) -> OuterStep:
    """The settings that a choice of outer optimizer stands for.

    Args:
        optimizer: for "sgd" these are the values of those settings that nobody gives.
        rounds: how often each fragment will be synchronised; None if the trainer decides that, so
            that nothing is known.
        sync_every: inner steps between two of them.
    """
    if optimizer == "averaging":
        return AVERAGING
    if optimizer == "nesterov":
        return NESTEROV
    if optimizer == "sgd" or rounds is None:
        return PUBLISHED
    is_long = rounds >= LONG_ROUNDS and rounds * sync_every >= LONG_STEPS
    return NESTEROV if is_long else AVERAGING
