"""The decision of a round: who is in it, with what weight, reduced how.

:func:`decide` is pure: it sees headers, never payloads or clocks. The replica that first creates
the ``commit`` object fixes the decision for all; the others read it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from diloco_cloud.exchange import history, wire
from diloco_cloud.exchange.contribution import CHUNK_BYTES, Header, chunk_size, digest
from diloco_cloud.exchange.history import History, LedgerEntry, Standing, update_standings
from diloco_cloud.exchange.signing import Signer

#: commit: apply the mean. discard: everyone returns to the last global parameters and goes on.
#: abort: the replicas cannot work together; everyone stops with ``reason``.
Decision: TypeAlias = Literal["commit", "discard", "abort"]
Plan: TypeAlias = Literal["all-gather", "sharded"]

#: Reason for leaving out a replica whose global parameters are not the others'.
DRIFTED: Final = "taken against other global parameters than the rest"
#: Below this payload a second trip through the store costs more than reading everything.
SHARDED_FROM_BYTES = 8 * 2**20
#: For two, shards move no fewer bytes, but with them a damaged contribution is found before anybody
#: applies the round; smaller ones are read, and so checked, before the decision.
SHARDED_FOR_TWO_FROM_BYTES = 16 * 2**20
#: A token that is k rounds late weighs 1 / (1 + 0.25 k) of one that is not (the best of the values
#: that fsb_decoupled_diloco tried; it rejects nothing, as rejecting cost it a quarter of the work).
STALENESS_DISCOUNT: Final = 0.25
#: Below so many contributions a median says nothing.
_OUTLIERS_FROM: Final = 3


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
        shards: number of shards of the "sharded" plan, else 0; shard k is contributor k's to do.
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
    plan: Plan = "all-gather"
    shards: int = 0
    mac: str = ""

    @property
    def weights(self) -> list[float]:
        """Relative weights scaled so that the largest is exactly 1 (equal weights stay exact)."""
        largest = max(c.weight for c in self.contributors)
        return [c.weight / largest for c in self.contributors]

    def exclusion_of(self, rank: int) -> Exclusion | None:
        """Why a rank's work was left out; None if it was not."""
        return next((one for one in self.excluded if one.rank == rank), None)

    def includes(self, rank: int, attempt: int) -> bool:
        """Whether this life's work was looked at: averaged, or left out for good."""
        return any((one.rank, one.attempt) == (rank, attempt) for one in self.contributors) or any(
            (one.rank, one.attempt) == (rank, attempt) and not one.kept for one in self.excluded
        )

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Commit:
        """Parse a commit.

        Raises:
            CorruptContributionError: not a commit this version understands.
        """
        return wire.parse(data, "the commit", _commit)

    def sign(self, signer: Signer) -> Commit:
        """The same commit with its mac."""
        return replace(self, mac=signer.mac("commit", [replace(self, mac="").encode()]))

    def check(self, signer: Signer, key: str) -> None:
        """Raise ``ForeignObjectError`` unless the commit under ``key`` is the run's own."""
        signer.check("commit", self.mac, [replace(self, mac="").encode()], key, own=False)

    @property
    def digest(self) -> str:
        """Names the commit in the sums made from it."""
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
    "plan": wire.one_of("all-gather", "sharded"),
    "shards": wire.count,
    "mac": wire.text,
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
    before: History | None = None,
    leaving: Sequence[int] = (),
    corrupt: Mapping[int, tuple[int, str]] | None = None,
    reduction: str = "auto",
    weighting: str = "tokens",
    outlier_norm: float | None = None,
) -> Commit:
    """The decision of a round from the headers of everyone who is in it.

    Args:
        headers: by rank, the header of the newest attempt and the header's digest.
        run: the run's id.
        round_: counts decisions, from 0.
        fragment: index of the model fragment.
        before: what the decisions before this one say.
        leaving: ranks that left in this round.
        corrupt: by rank, attempt and reason of a contribution that cannot be used.
        reduction: "all-gather", "sharded" or "auto".
        weighting: "tokens" weighs by tokens processed, "equal" does not; without token counts
            from everyone, all weigh the same.
        outlier_norm: contributions longer than so many times the median are left out.
    """
    past = History() if before is None else before
    superseded = {
        rank: header
        for rank, (header, _) in headers.items()
        if header.attempt < past.attempt_of(rank)
    }
    present = {rank: headers[rank] for rank in sorted(headers) if rank not in superseded}
    commit = Commit(
        run=run,
        round=round_,
        fragment=fragment,
        decision="commit",
        finished=tuple(sorted({*past.finished, *leaving})),
        excluded=tuple(
            Exclusion(rank=rank, attempt=attempt, reason=reason, kept=True)
            for rank, (attempt, reason) in sorted((corrupt or {}).items())
        )
        + tuple(
            Exclusion(rank=rank, attempt=header.attempt, reason="a newer attempt has taken over")
            for rank, header in superseded.items()
        ),
    )
    layouts = {rank: header.layout for rank, (header, _) in present.items()}
    agreed_layout = past.layouts.get(fragment)
    if agreed_layout is None and len(set(layouts.values())) > 1:
        # Nobody has trained yet, and somebody was started wrongly.
        return replace(commit, decision="abort", reason=_mismatch(layouts))
    fit = _Fitness(present, agreed_layout, outlier_norm)
    reasons = {rank: fit.fault(header) for rank, (header, _) in present.items()}
    included = [rank for rank in present if not reasons[rank]]
    commit = replace(
        commit,
        excluded=commit.excluded
        + tuple(
            Exclusion(rank=rank, attempt=present[rank][0].attempt, reason=reason)
            for rank, reason in reasons.items()
            if reason
        ),
        standings=_standings(past, commit, present),
        ledger=_ledger(past, commit, present, included),
    )
    if not included:
        faults = "; ".join(f"replica {e.rank}: {e.reason}" for e in commit.excluded)
        return replace(commit, decision="discard", reason=faults or "no contributions")
    first = present[included[0]][0]
    return replace(
        commit,
        contributors=_contributors([present[rank] for rank in included], weighting),
        layout=first.layout,
        nbytes=first.nbytes,
        chunk_bytes=first.chunk_bytes,
        base=first.base,
        **_plan(reduction, len(included), first),
    )


def _contributors(
    included: Sequence[tuple[Header, str]], weighting: str
) -> tuple[Contributor, ...]:
    weighed = weighting == "tokens" and all(header.tokens > 0 for header, _ in included)
    return tuple(
        Contributor(
            rank=header.rank,
            attempt=header.attempt,
            header=name,
            tokens=header.tokens,
            inner_steps=header.inner_steps,
            weight=_weight(header) if weighed else 1.0,
        )
        for header, name in included
    )


def _weight(header: Header) -> float:
    """Tokens, of which those that missed a round count less for every round they are late."""
    fresh = header.tokens - header.carried
    return fresh + header.carried / (1 + STALENESS_DISCOUNT * header.staleness)


def _standings(
    past: History, commit: Commit, present: Mapping[int, tuple[Header, str]]
) -> tuple[Standing, ...]:
    here = [
        Standing(rank=rank, attempt=header.attempt, round=commit.round, position=header.position)
        for rank, (header, _) in present.items()
    ]
    # What a damaged contribution says of its data's position is as little to be trusted.
    for one in commit.excluded:
        known = past.standings.get(one.rank)
        if one.rank not in present and known is not None:
            here.append(replace(known, attempt=max(known.attempt, one.attempt), round=commit.round))
    return update_standings(past.standings.values(), here)


def _ledger(
    past: History,
    commit: Commit,
    present: Mapping[int, tuple[Header, str]],
    included: Sequence[int],
) -> tuple[LedgerEntry, ...]:
    ledger = dict(past.ledgers.get(commit.fragment, {}))
    for rank, (header, _) in present.items():
        entry = ledger.get(rank, LedgerEntry(rank=rank, attempt=header.attempt))
        ledger[rank] = entry.add(
            attempt=header.attempt,
            life=header.processed,
            tokens=header.tokens,
            merged=rank in included,
        )
    return tuple(ledger[rank] for rank in sorted(ledger))


class _Fitness:
    """Tells what is wrong with a contribution, by comparison with the others."""

    def __init__(
        self,
        present: Mapping[int, tuple[Header, str]],
        layout: str | None,
        outlier_norm: float | None,
    ) -> None:
        headers = [header for header, _ in present.values()]
        self._layout = layout
        self._base = _agreed([header.base for header in headers])
        self._chunk_bytes = headers[0].chunk_bytes if headers else CHUNK_BYTES
        norms = sorted(header.norm for header in headers if header.finite)
        self._longest = math.inf
        if outlier_norm is not None and len(norms) >= _OUTLIERS_FROM:
            self._longest = outlier_norm * norms[(len(norms) - 1) // 2] or math.inf

    def fault(self, header: Header) -> str:
        """Why a contribution cannot be averaged, or ""."""
        if header.kind != "contribution" or header.codec != "raw":
            return f"a {header.kind} encoded as {header.codec!r}, which cannot be averaged here"
        if self._layout is not None and header.layout != self._layout:
            return "tensors of other names, shapes or dtypes than the run's"
        if header.chunk_bytes != self._chunk_bytes:
            return f"in chunks of {header.chunk_bytes} bytes, not {self._chunk_bytes} as the rest"
        if header.base != self._base:
            return DRIFTED
        if not header.finite:
            return "has NaN or infinite values"
        if header.norm > self._longest:
            return f"its norm {header.norm:.3g} is an outlier (above {self._longest:.3g})"
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
    least = SHARDED_FROM_BYTES if contributors > 2 else SHARDED_FOR_TWO_FROM_BYTES
    sharded = reduction == "sharded" or (reduction == "auto" and header.nbytes >= least)
    if sharded and shards > 1:
        return {"plan": "sharded", "shards": shards}
    return {"plan": "all-gather", "shards": 0}
