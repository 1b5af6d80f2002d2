"""The decision of a round: who is in it, with what weight, reduced how.

It follows from the contributions' headers (:mod:`.deciding`). The replica that first creates the
``commit`` object fixes it for all; the others read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias

from diloco_cloud.exchange import history, planning, wire
from diloco_cloud.exchange.contribution import CHUNK_BYTES, RAW, chunk_size, digest
from diloco_cloud.exchange.history import LedgerEntry, Standing
from diloco_cloud.exchange.prediction import Plan as NextPlan
from diloco_cloud.exchange.signing import Signer
from diloco_cloud.exchange.weighting import PLAIN

#: commit: apply the mean. discard: everyone returns to the last global parameters and goes on.
#: abort: the replicas cannot work together; everyone stops with ``reason``.
Decision: TypeAlias = Literal["commit", "discard", "abort"]
Plan: TypeAlias = Literal["all-gather", "sharded"]

#: Reason for leaving out a replica whose global parameters are not the others'.
DRIFTED: Final = "taken against other global parameters than the rest"


@dataclass(frozen=True, kw_only=True)
class Contributor:
    """One replica's part in a committed round.

    Attributes:
        header: digest of the contribution's header, which pins its bytes.
        weight: relative weight of its pseudo-gradient in the mean.
    """

    rank: int
    attempt: int
    header: str
    tokens: int
    inner_steps: int
    weight: float


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """A replica that was there but is not in the mean, and why.

    Attributes:
        kept: its contribution did not arrive whole; it contributes the work again.
    """

    rank: int
    attempt: int
    reason: str
    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The content of ``rounds/<round>.<fragment>/commit``.

    Attributes:
        contributors: in the order in which contributions are added, which is by rank.
        finished: ranks that have left the run; later rounds do not wait for them.
        standings: of all ranks that have ever been in a round.
        ledger: fate of all tokens so far, as far as this fragment is concerned.
        base: digest of the global parameters before the round.
        codec: how the contributions' chunks are encoded.
        sums: how the means of chunks are, which the "sharded" plan stores.
        shards: number of shards of the "sharded" plan, else 0; chunk c is in shard ``c % shards``,
            and shard k is contributor k's to do.
        reducers: volunteers that do the shards in the contributors' place; 0 where there are none.
        norms: how long each tensor of the mean is to be made, where directions are averaged
            (:mod:`.merging`); empty where tensors are.
        next: how the fragment's next round is to be reduced; None: as without a plan.
        mac: over all the rest, where the run is signed.
    """

    run: str
    round: int
    fragment: int
    decision: Decision
    reason: str = ""
    contributors: tuple[Contributor, ...] = ()
    excluded: tuple[Exclusion, ...] = ()
    finished: tuple[int, ...] = ()
    standings: tuple[Standing, ...] = ()
    ledger: tuple[LedgerEntry, ...] = ()
    layout: str = ""
    nbytes: int = 0
    chunk_bytes: int = CHUNK_BYTES
    base: str = ""
    codec: str = RAW
    sums: str = RAW
    plan: Plan = "all-gather"
    shards: int = 0
    reducers: int = 0
    norms: tuple[float, ...] = ()
    next: NextPlan | None = None
    mac: str = ""

    @cached_property
    def weights(self) -> list[float]:
        """Relative weights scaled so that the largest is exactly 1 (equal weights stay exact)."""
        largest = max(c.weight for c in self.contributors)
        return [c.weight / largest for c in self.contributors]

    def exclusion_of(self, rank: int) -> Exclusion | None:
        """Why a rank's work was left out; None if it was not."""
        return next((one for one in self.excluded if one.rank == rank), None)

    def averages(self, rank: int, attempt: int) -> bool:
        """Whether this life's work is in the mean."""
        lives = ((one.rank, one.attempt) for one in self.contributors)
        return self.decision == "commit" and (rank, attempt) in lives

    def includes(self, rank: int, attempt: int) -> bool:
        """Whether this life's work was looked at: averaged, or left out for good."""
        return any((one.rank, one.attempt) == (rank, attempt) for one in self.contributors) or any(
            (one.rank, one.attempt) == (rank, attempt) and not one.kept for one in self.excluded
        )

    def encode(self) -> bytes:
        """The object's bytes."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        # Not asdict, which copies every leaf: with hundreds of replicas, half of a round's work.
        values = {name: getattr(self, name) for name in _COMMIT}
        return json.dumps(values, separators=(",", ":"), default=vars).encode()

    @property
    def _bare(self) -> Commit:
        return replace(self, mac="") if self.mac else self

    @classmethod
    def decode(cls, data: bytes) -> Commit:
        """Parse a commit.

        Raises:
            CorruptContributionError: not a commit this version understands.
        """
        return wire.parse(data, "the commit", _commit)

    def sign(self, signer: Signer) -> Commit:
        """The same commit with its mac."""
        if not signer.is_on:
            return self._bare
        return replace(self, mac=signer.mac("commit", [self._bare.encode()]))

    def check(self, signer: Signer, key: str) -> None:
        """Raise ``ForeignObjectError`` unless the commit under ``key`` is the run's own."""
        signer.check("commit", self.mac, [self._bare.encode()], key, own=False)

    @cached_property
    def digest(self) -> str:
        """Names the commit in the sums made from it; asked for with every chunk."""
        return digest(self.encode())


_EXCLUSION: Final[dict[str, Callable[[Any], Any]]] = {
    "rank": wire.count,
    "attempt": wire.count,
    "reason": wire.text,
    "kept": wire.flag,
}
_CONTRIBUTOR: Final[dict[str, Callable[[Any], Any]]] = {
    "rank": wire.count,
    "attempt": wire.count,
    "header": wire.text,
    "tokens": wire.count,
    "inner_steps": wire.count,
    "weight": wire.positive,
}
_COMMIT: Final[dict[str, Callable[[Any], Any]]] = {
    "run": wire.text,
    "round": wire.count,
    "fragment": wire.count,
    "decision": wire.one_of("commit", "discard", "abort"),
    "reason": wire.text,
    "contributors": wire.many(lambda values: Contributor(**wire.fields(values, _CONTRIBUTOR))),
    "excluded": wire.many(lambda values: Exclusion(**wire.fields(values, _EXCLUSION))),
    "finished": wire.many(wire.count),
    "standings": history.standings,
    "ledger": history.ledger_entries,
    "layout": wire.text,
    "nbytes": wire.count,
    "chunk_bytes": chunk_size,
    "base": wire.text,
    "codec": wire.text,
    "sums": wire.text,
    "plan": wire.one_of("all-gather", "sharded"),
    "shards": wire.count,
    "reducers": wire.count,
    "norms": wire.many(wire.magnitude_or(PLAIN)),
    "next": wire.optional(planning.plan),
    "mac": wire.text,
}


def _commit(values: Any) -> Commit:
    """A commit whose parts agree with one another."""
    commit = Commit(**wire.fields(values, _COMMIT))
    if commit.decision == "commit":
        if not commit.contributors:
            raise ValueError("nothing to reduce")
        chunks = -(-commit.nbytes // commit.chunk_bytes)
        most = min(commit.reducers or len(commit.contributors), chunks)
        least = 1 if commit.reducers else 2
        if commit.plan == "sharded" and not least <= commit.shards <= most:
            raise ValueError("impossible shards")
    return commit
