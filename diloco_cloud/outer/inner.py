"""Inner checkpoints: what lets a new life of a rank go on as if nothing had happened.

    inner/<rank>/<round>.<attempt>.safetensors

A replica writes one before each contribution, in the thread that contributes: inner optimizer,
random states, position in its data, and the local parameters where they are not the global ones
(several fragments, a delayed merge, or one that keeps a part of them). A decision that names a
contribution is therefore one that a checkpoint exists for, whatever died when; a new life that
joins right after it takes over from there (docs/decisions/0011). A replica that hands over, whose
time is short, contributes first.

What it costs: the optimizer's state, two tensors per parameter for AdamW, goes to the store each
round ahead of the pseudo-gradient, and is copied once in memory. Two rounds are kept per rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from diloco_cloud import keys
from diloco_cloud.errors import (
    CorruptContributionError,
    CorruptError,
    DilocoError,
    NotFoundError,
)
from diloco_cloud.exchange import wire
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.exchange.background import in_background
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.residuals import Owed
from diloco_cloud.outer import tensor_file
from diloco_cloud.outer.local_state import OWED, OWED_AFTER, LocalState, in_part

logger = logging.getLogger(__name__)


class HasLocalState(Protocol):
    """What a checkpoint needs of the outer loop."""

    def local_state(self, fragment: int) -> LocalState:
        """A copy of what this replica has for itself, while it contributes ``fragment``."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A replica's local state at its contribution to a round.

    Attributes:
        round, fragment: of the contribution.
        local: as it was then.
        accounts: what is not in that contribution, by :meth:`.accounts.Accounts.pending`.
        base: digest of the global parameters that the contribution was taken against.
        applied: whether the round had a mean; known once it is decided.
        averaged: whether the contribution was to be in it; likewise.
    """

    round: int
    fragment: int
    local: LocalState
    accounts: list[dict[str, int]]
    base: str = ""
    applied: bool = True
    averaged: bool = True

    @property
    def owed(self) -> dict[int, torch.Tensor]:
        """By fragment, what the codec has left unsent now that the round is decided."""
        found = self.local.part(OWED)
        if self.averaged and self.applied:
            found |= self.local.part(OWED_AFTER)
        return {int(key): tensor for key, tensor in found.items() if key.isdecimal()}


def _unsent(owed: Owed, fragment: int) -> dict[str, torch.Tensor]:
    """It as a checkpoint's tensors."""
    before = {str(key): tensor for key, tensor in owed.before.items()}
    after = {} if owed.after is None else {str(fragment): owed.after}
    return {**in_part(OWED, before), **in_part(OWED_AFTER, after)}


@dataclass(frozen=True)
class Decided:
    """A round that was decided, and whether there was a mean to apply."""

    commit: Commit
    applied: bool


class InnerCheckpoints:
    """Writes one rank's inner checkpoints, and finds the one a new life goes on from.

    Args:
        door: this life's.
    """

    def __init__(self, door: ObjectStoreAllReduce) -> None:
        exchange = door.exchange
        self._store = door.prefix
        self._signer = exchange.signer
        self._run, self._rank, self._attempt = exchange.run, exchange.rank, exchange.attempt
        self._can_capture = True

    # -- writing -------------------------------------------------------------------------------

    def capture(
        self, loop: HasLocalState, round_: int, fragment: int, accounts: list[dict[str, int]]
    ) -> Callable[[str, Owed], None]:
        """Copy the state in the training thread, where a contribution begins.

        Args:
            loop: whose state it is.
            round_: of the contribution.
            fragment: of the contribution.
            accounts: see :class:`Checkpoint`.

        Returns:
            What stores the copy, given the base and what is unsent; to be called before the
            contribution is.
            It stores nothing, after a warning, if the optimizer holds what cannot be stored.
        """
        captured: list[Checkpoint] = []
        try:
            local = loop.local_state(fragment) if self._can_capture else None
        except TypeError as error:
            self._can_capture, local = False, None
            logger.warning("no inner checkpoints: %s cannot be stored", error)
        if local is not None:
            captured.append(
                Checkpoint(round=round_, fragment=fragment, local=local, accounts=accounts)
            )

        def write(base: str, owed: Owed) -> None:
            if captured:  # Not held while the round is waited for: it is larger than the model.
                self._write(captured.pop(), base, owed)

        return write

    def _write(self, checkpoint: Checkpoint, base: str, owed: Owed) -> None:
        """A failure costs a later life its inner state, not the run."""
        key = keys.inner(self._rank, checkpoint.round, self._attempt)
        values = {
            "place": self._place(checkpoint.round, checkpoint.fragment, self._attempt),
            "base": base,
            "accounts": checkpoint.accounts,
            "local": checkpoint.local.to_json(),
        }
        tensors = {**checkpoint.local.tensors, **_unsent(owed, checkpoint.fragment)}
        try:
            self._store.put(key, tensor_file.encode(tensors, values, self._signer))
        except DilocoError as error:
            logger.warning("%s could not be written: %s", key, error)
            return
        in_background(lambda: self._tidy(checkpoint.round), "diloco-inner")

    def clear(self) -> None:
        """Delete all of this rank's: it has finished."""
        self._delete(lambda _round, _attempt: True)

    def _tidy(self, round_: int) -> None:
        """Delete what no later life can need.

        This contribution may come into the store or not, and the next life begins after it or after
        the round before: two rounds are kept.
        """
        self._delete(
            lambda other, attempt: (
                other < round_ - 1 or (other == round_ and attempt < self._attempt)
            )
        )

    def _delete(self, is_old: Callable[[int, int], bool]) -> None:
        try:
            listed = [info.key for info in self._store.list(keys.inner_directory(self._rank))]
            parsed = ((key, keys.parse_inner(key)) for key in listed)
            self._store.delete_many([key for key, place in parsed if place and is_old(*place)])
        except DilocoError as error:
            logger.warning("old inner checkpoints could not be deleted: %s", error)

    # -- reading -------------------------------------------------------------------------------

    def find(self, last: Decided) -> Checkpoint | None:
        """The checkpoint of this rank's part in ``last``, the decision a new life begins after.

        None if there is none that can be used; that is never an error.
        """
        commit = last.commit
        lives = [(one.rank, one.attempt) for one in commit.contributors]
        lives += [(one.rank, one.attempt) for one in commit.excluded if not one.kept]
        attempt = dict(lives).get(self._rank)
        if attempt is None:
            logger.info("round %d went without this rank: its inner state is fresh", commit.round)
            return None
        key = keys.inner(self._rank, commit.round, attempt)
        try:
            found = self._read(key, last, attempt)
        except NotFoundError:
            logger.info("there is no %s: the inner state is fresh", key)
            return None
        except (CorruptError, CorruptContributionError) as error:
            logger.warning("%s; the inner state is fresh", error.message)
            return None
        if commit.decision == "commit" and found.base != commit.base:
            logger.warning("%s is of other global parameters: the inner state is fresh", key)
            return None
        if not found.local.is_finite:
            logger.warning("%s has NaN or infinite values: the inner state is fresh", key)
            return None
        return found

    def _read(self, key: str, last: Decided, attempt: int) -> Checkpoint:
        tensors, text = tensor_file.decode(self._store.get(key), self._signer, key)
        commit = last.commit
        place = self._place(commit.round, commit.fragment, attempt)

        def account(values: Any) -> dict[str, int]:
            names = ("fragment", "tokens", "inner_steps", "carried", "staleness")
            return wire.fields(values, dict.fromkeys(names, wire.count))

        kinds: Mapping[str, Callable[[Any], Any]] = {
            "place": lambda found: found,
            "base": wire.text,
            "accounts": wire.many(account),
            "local": lambda local: LocalState.from_json(local, tensors),
        }
        read = wire.parse(text, key, lambda values: wire.fields(values, kinds))
        if read["place"] != place:
            raise CorruptError(f"{key} is of another run, rank or round")
        return Checkpoint(
            round=commit.round,
            fragment=commit.fragment,
            local=read["local"],
            accounts=list(read["accounts"]),
            base=read["base"],
            applied=last.applied,
            averaged=commit.averages(self._rank, attempt),
        )

    def _place(self, round_: int, fragment: int, attempt: int) -> dict[str, Any]:
        return {
            "run": self._run,
            "rank": self._rank,
            "round": round_,
            "fragment": fragment,
            "attempt": attempt,
        }
