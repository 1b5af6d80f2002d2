"""The decision of a round: who is in it, with what weight, reduced how.

:func:`decide` is pure: it sees headers, never payloads or clocks. The replica that first creates
the ``commit`` object fixes the decision for all; the others read it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from diloco_cloud.exchange import wire
from diloco_cloud.exchange.contribution import CHUNK_BYTES, Header, chunk_size, digest

#: commit: apply the mean. discard: everyone returns to the last global parameters and goes on.
#: abort: the replicas cannot work together; everyone stops with ``reason``.
Decision: TypeAlias = Literal["commit", "discard", "abort"]
Plan: TypeAlias = Literal["all-gather", "sharded"]

#: Reason for leaving out a replica whose global parameters are not the others'.
DRIFTED: Final = "taken against other global parameters than the rest"
#: Below this payload a second trip through the store costs more than reading everything.
SHARDED_FROM_BYTES = 8 * 2**20


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
    """A replica that was there but is not in the mean, and why."""

    rank: int
    attempt: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The content of ``rounds/<round>.<fragment>/commit``.

    Attributes:
        contributors: in the order in which contributions are added, which is by rank.
        finished: ranks that have left the run; later rounds do not wait for them.
        positions: (rank, inner steps of its data behind it) of everyone who was there, for the
            next life of a rank to begin its data at.
        base: digest of the global parameters before the round.
        shards: number of shards of the "sharded" plan, else 0; shard k is contributor k's to do.
    """

    run: str
    round: int
    fragment: int
    decision: Decision
    reason: str = ""
    contributors: tuple[Contributor, ...] = ()
    excluded: tuple[Exclusion, ...] = ()
    finished: tuple[int, ...] = ()
    positions: tuple[tuple[int, int], ...] = ()
    layout: str = ""
    nbytes: int = 0
    chunk_bytes: int = CHUNK_BYTES
    base: str = ""
    plan: Plan = "all-gather"
    shards: int = 0

    @property
    def weights(self) -> list[float]:
        """Relative weights scaled so that the largest is exactly 1 (equal weights stay exact)."""
        largest = max(c.weight for c in self.contributors)
        return [c.weight / largest for c in self.contributors]

    def reason_for(self, rank: int) -> str | None:
        """Why a rank's work was left out; None if it was not."""
        return next((one.reason for one in self.excluded if one.rank == rank), None)

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Commit:
        """Parse a commit.

        Raises:
            CorruptContributionError: not a commit this version understands.
        """
        return wire.parse(data, "the commit", _commit)

    @property
    def digest(self) -> str:
        """Names the commit in the sums made from it."""
        return digest(self.encode())


_EXCLUSION: Final[dict[str, Callable[[Any], Any]]] = {
    "rank": wire.count,
    "attempt": wire.count,
    "reason": wire.text,
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
    "positions": wire.many(wire.pair),
    "layout": wire.text,
    "nbytes": wire.count,
    "chunk_bytes": chunk_size,
    "base": wire.text,
    "plan": wire.one_of("all-gather", "sharded"),
    "shards": wire.count,
}


def _commit(values: Any) -> Commit:
    """A commit whose parts agree with one another."""
    commit = Commit(**wire.fields(values, _COMMIT))
    if commit.decision == "commit":
        if not commit.contributors:
            raise ValueError("nothing to reduce")
        chunks = -(-commit.nbytes // commit.chunk_bytes)
        most = min(len(commit.contributors), chunks)
        if commit.plan == "sharded" and not 1 < commit.shards <= most:
            raise ValueError("impossible shards")
    return commit


def decide(
    headers: Mapping[int, tuple[Header, str]],
    *,
    run: str,
    round_: int,
    fragment: int,
    finished: Sequence[int] = (),
    leaving: Sequence[int] = (),
    corrupt: Mapping[int, tuple[int, str]] | None = None,
    reduction: str = "auto",
    weighting: str = "tokens",
) -> Commit:
    """The decision of a round from the headers of everyone who is in it.

    Args:
        headers: by rank, the header of the newest attempt and the header's digest.
        run: the run's id.
        round_: counts decisions, from 0.
        fragment: index of the model fragment.
        finished: ranks that left in an earlier round.
        leaving: ranks that left in this one.
        corrupt: by rank, attempt and reason of a contribution whose header cannot be used.
        reduction: "all-gather", "sharded" or "auto".
        weighting: "tokens" weighs by tokens processed, "equal" does not; without token counts
            from everyone, all weigh the same.
    """
    present = dict(sorted(headers.items()))
    commit = Commit(
        run=run,
        round=round_,
        fragment=fragment,
        decision="commit",
        finished=tuple(sorted({*finished, *leaving})),
        positions=tuple((rank, header.position) for rank, (header, _) in present.items()),
        excluded=tuple(
            Exclusion(rank=rank, attempt=attempt, reason=reason)
            for rank, (attempt, reason) in sorted((corrupt or {}).items())
        ),
    )
    layouts = {rank: header.layout for rank, (header, _) in present.items()}
    if len(set(layouts.values())) > 1:
        return replace(commit, decision="abort", reason=_mismatch(layouts))
    base = _agreed([header.base for header, _ in present.values()])
    chunk_bytes = next((header.chunk_bytes for header, _ in present.values()), CHUNK_BYTES)
    included: list[Contributor] = []
    for rank, (header, name) in present.items():
        reason = _unfit(header, base, chunk_bytes)
        if reason:
            excluded = Exclusion(rank=rank, attempt=header.attempt, reason=reason)
            commit = replace(commit, excluded=(*commit.excluded, excluded))
            continue
        included.append(
            Contributor(
                rank=rank,
                attempt=header.attempt,
                header=name,
                tokens=header.tokens,
                inner_steps=header.inner_steps,
                weight=1.0,
            )
        )
    if not included:
        reasons = "; ".join(f"replica {e.rank}: {e.reason}" for e in commit.excluded)
        return replace(commit, decision="discard", reason=reasons or "no contributions")
    if weighting == "tokens" and all(c.tokens > 0 for c in included):
        included = [replace(c, weight=float(c.tokens)) for c in included]
    first = present[included[0].rank][0]
    return replace(
        commit,
        contributors=tuple(included),
        layout=first.layout,
        nbytes=first.nbytes,
        chunk_bytes=chunk_bytes,
        base=first.base,
        **_plan(reduction, len(included), first),
    )


def _unfit(header: Header, base: str | None, chunk_bytes: int) -> str:
    """Why a contribution cannot be averaged, or ""."""
    if header.kind != "contribution" or header.codec != "raw":
        return f"a {header.kind} encoded as {header.codec!r}, which this version cannot average"
    if header.chunk_bytes != chunk_bytes:
        return f"in chunks of {header.chunk_bytes} bytes, not {chunk_bytes} as the rest"
    if header.base != base:
        return DRIFTED
    if not header.finite:
        return "has NaN or infinite values"
    return ""


def _agreed(bases: Sequence[str]) -> str | None:
    """The base that more replicas have than any other; None if that settles nothing."""
    ranking = Counter(bases).most_common(2)
    if not ranking or (len(ranking) == 2 and ranking[0][1] == ranking[1][1]):
        return None
    return ranking[0][0]


def _mismatch(layouts: Mapping[int, str]) -> str:
    usual, _ = Counter(layouts.values()).most_common(1)[0]
    odd = [str(rank) for rank, layout in layouts.items() if layout != usual]
    return f"replica {', '.join(odd)} trains tensors of other names, shapes or dtypes than the rest"


def _plan(reduction: str, contributors: int, header: Header) -> dict[str, Any]:
    """Which plan moves fewer bytes: (N-1)S down, or 2S(N-1)/N down and S/N more up."""
    shards = min(contributors, header.chunks)
    sharded = reduction == "sharded" or (
        reduction == "auto" and contributors > 2 and header.nbytes >= SHARDED_FROM_BYTES
    )
    if sharded and shards > 1:
        return {"plan": "sharded", "shards": shards}
    return {"plan": "all-gather", "shards": 0}
