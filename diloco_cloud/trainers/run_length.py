"""How many inner steps a replica takes."""

from __future__ import annotations

from diloco_cloud.errors import ConfigError


def run_length(sync_every: int, rounds: int | None, inner_steps: int | None) -> int:
    """Inner steps of the whole run.

    Args:
        sync_every: inner steps between two syncs of a fragment.
        rounds: times ``sync_every`` is the length; None where ``inner_steps`` says it.
        inner_steps: the length itself; None where ``rounds`` says it.

    Raises:
        ConfigError: neither says it, they contradict each other, or it is not above 0.
    """
    if rounds is not None and inner_steps is not None and inner_steps != sync_every * rounds:
        raise ConfigError(
            f"{rounds} rounds of {sync_every} steps are not inner_steps {inner_steps}",
            fix="Set one of rounds and inner_steps.",
        )
    total = inner_steps if rounds is None else sync_every * rounds
    if total is None:
        raise ConfigError(
            "nothing says how long to train", fix="Set rounds, or the trainer's inner_steps."
        )
    if total < 1:
        raise ConfigError(f"inner_steps is {total}", fix="It must be above 0.")
    return total
