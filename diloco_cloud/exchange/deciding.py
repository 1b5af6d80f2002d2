"""Deciding a round: pure, from headers alone, never payloads or clocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, TypeVar

from diloco_cloud.exchange.codecs import codec_names
from diloco_cloud.exchange.commit import DRIFTED, Commit, Contributor, Exclusion
from diloco_cloud.exchange.contribution import CHUNK_BYTES, RAW, Header
from diloco_cloud.exchange.following import plan_next, sums_of
from diloco_cloud.exchange.history import History, LedgerEntry, Standing, update_standings
from diloco_cloud.exchange.weighting import mean_norms, plain, weights

T = TypeVar("T")

#: Below so many contributions a median says nothing.
_OUTLIERS_FROM: Final = 3


def decide(
    headers: Mapping[int, tuple[Header, str]],
    *,
    run: str,
    round_: int,
    fragment: int,
    before: History | None = None,
    leaving: Sequence[int] = (),
    corrupt: Mapping[int, tuple[int, str]] | None = None,
    weighting: str = "tokens",
    reduction: str = "auto",
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
        weighting: see :func:`~diloco_cloud.exchange.weighting.weights`.
        reduction: "all-gather", "sharded", or "auto" by what the links have carried.
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
    chosen = [present[rank][0] for rank in included]
    first, counts = chosen[0], weights(chosen, weighting)
    return replace(
        commit,
        contributors=tuple(
            _contributor(*present[rank], weight)
            for rank, weight in zip(included, counts, strict=True)
        ),
        norms=mean_norms([header.norms for header in chosen], counts) if first.norms else (),
        next=plan_next(chosen, reduction, past.plans.get(fragment)),
        layout=first.layout,
        nbytes=first.nbytes,
        chunk_bytes=first.chunk_bytes,
        base=first.base,
        codec=first.codec,
        sums=sums_of(first.codec),
        **_plan(len(included), first),
    )


def _contributor(header: Header, name: str, weight: float) -> Contributor:
    return Contributor(
        rank=header.rank,
        attempt=header.attempt,
        header=name,
        tokens=header.tokens,
        inner_steps=header.inner_steps,
        weight=weight,
    )


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
        self._nbytes = _commonest([header.nbytes for header in headers], 0)
        self._chunk_bytes = _commonest([header.chunk_bytes for header in headers], CHUNK_BYTES)
        self._codec = _commonest([header.codec for header in headers], RAW)
        self._plain = _commonest([plain(header.norms) for header in headers], ())
        norms = sorted(header.norm for header in headers if header.finite)
        self._longest = math.inf
        if outlier_norm is not None and len(norms) >= _OUTLIERS_FROM:
            self._longest = outlier_norm * norms[(len(norms) - 1) // 2] or math.inf

    def fault(self, header: Header) -> str:
        """Why a contribution cannot be averaged, or ""."""
        if header.kind != "contribution":
            return f"a {header.kind}, which cannot be averaged"
        if not _is_known(header.codec):
            return f"encoded as {header.codec!r}, which is not known here"
        if header.codec != self._codec:
            return f"encoded as {header.codec!r}, not {self._codec!r} as the rest"
        if self._layout is not None and header.layout != self._layout:
            return "tensors of other names, shapes or dtypes than the run's"
        if header.nbytes != self._nbytes:
            return f"of {header.nbytes} bytes, not {self._nbytes} as the rest"
        if header.chunk_bytes != self._chunk_bytes:
            return f"in chunks of {header.chunk_bytes} bytes, not {self._chunk_bytes} as the rest"
        if plain(header.norms) != self._plain:
            return "sent to be merged another way than the rest"
        if header.base != self._base:
            return DRIFTED
        if not header.finite:
            return "has NaN or infinite values"
        if header.norm > self._longest:
            return f"its norm {header.norm:.3g} is an outlier (above {self._longest:.3g})"
        return ""


@lru_cache(maxsize=64)
def _is_known(codec: str) -> bool:
    # Looking for the codecs of other packages takes milliseconds, and there are many headers.
    return codec == RAW or codec in codec_names()


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


def _commonest(values: Sequence[T], default: T) -> T:
    """The first of those that occur most often."""
    return Counter(values).most_common(1)[0][0] if values else default


def _plan(contributors: int, header: Header) -> dict[str, Any]:
    """Who reduces what, as far as the contributors have provided for it."""
    groups = min(header.spread, header.chunks)
    if header.reducers and groups:
        shards = min(header.reducers, groups)
        return {"plan": "sharded", "shards": shards, "reducers": header.reducers}
    shards = min(contributors, groups)
    if shards > 1:
        return {"plan": "sharded", "shards": shards}
    return {"plan": "all-gather"}
