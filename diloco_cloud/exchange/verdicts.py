"""What a decision means for one replica: whether its part in the run, or in the round, is over."""

from __future__ import annotations

import threading

from diloco_cloud.errors import (
    DriftError,
    ExchangeError,
    LayoutMismatchError,
    LeftRunError,
    MissedRoundError,
)
from diloco_cloud.exchange.commit import DRIFTED, Commit
from diloco_cloud.exchange.contribution import Header
from diloco_cloud.exchange.history import History


def raise_if_out(rank: int, base: str, commit: Commit) -> None:
    """Raise if a replica cannot take part in what was decided.

    Args:
        rank: its rank.
        base: digest of its global parameters.
        commit: the decision.

    Raises:
        LayoutMismatchError: the replicas cannot work together.
        LeftRunError: it had left the run.
        DriftError: its parameters are not the others'.
    """
    if commit.decision == "abort":
        raise LayoutMismatchError(
            f"round {commit.round}: {commit.reason}",
            fix="Every replica must build the same model, in the same precision.",
        )
    if rank in commit.finished:
        raise _finished(rank, commit.round)
    exclusion = commit.exclusion_of(rank)
    if exclusion is not None and exclusion.reason == DRIFTED:
        raise DriftError(f"round {commit.round}: replica {rank}'s work was {DRIFTED}")
    if commit.decision == "commit" and commit.base != base:
        # A life that slept through rounds that have been deleted since: it was alone in this one,
        # or found a decision that it has no part in.
        raise DriftError(
            f"round {commit.round} was decided on other global parameters than replica {rank}'s"
        )


def raise_if_missed(commit: Commit, own: Header) -> None:
    """Raise ``MissedRoundError`` unless a contribution was looked at."""
    if commit.includes(own.rank, own.attempt):
        return
    exclusion = commit.exclusion_of(own.rank)
    reason = f": {exclusion.reason}" if exclusion is not None else ""
    raise MissedRoundError(f"round {commit.round} was decided without this replica{reason}")


def raise_if_finished(rank: int, round_: int, history: History) -> None:
    """Raise ``LeftRunError`` if a replica had left before a round."""
    if rank in history.finished:
        raise _finished(rank, round_)


def _finished(rank: int, round_: int) -> LeftRunError:
    return LeftRunError(
        f"replica {rank} had left the run before round {round_}",
        fix="Launch a new run to train further.",
    )


def raise_if_given_up(stop: threading.Event) -> None:
    """Raise where whoever asked has given up, and may have gone on from another round meanwhile."""
    if stop.is_set():
        raise ExchangeError("the wait for other replicas was given up")
