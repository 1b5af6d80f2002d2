"""What a run leaves behind: results of its replicas, the exported model, figures per round."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from diloco_cloud import keys
from diloco_cloud.result import read_result
from diloco_cloud.run.lives import read_lives
from diloco_cloud.run.record import read_json
from diloco_cloud.store.base import ObjectStore

_METRICS = re.compile(r"metrics/(\d+)\.(\d+)/(\d+)\.json")


@dataclass(frozen=True)
class RunResults:
    """What a run leaves behind.

    Attributes:
        outcomes: by rank, the last word of its newest life; None where it left none.
        manifest: of the exported result (digest, round, step, files; final: nobody was going on
            when it was written), or None.
        files: keys of the exported files in the run's prefix.
        model: the key of the trained parameters in the run's prefix, or None.
    """

    outcomes: tuple[Mapping[str, Any] | None, ...]
    manifest: Mapping[str, Any] | None
    files: tuple[str, ...]
    model: str | None

    @property
    def returned(self) -> list[Any]:
        """By rank, what the trainer returned, where it is JSON; else None."""
        return [(outcome or {}).get("result") for outcome in self.outcomes]

    @property
    def digests(self) -> list[str | None]:
        """By rank, the digest of the final global parameters."""
        return [(outcome or {}).get("digest") for outcome in self.outcomes]

    @property
    def digest(self) -> str | None:
        """The digest that all replicas ended with; None if they differ or one has none.

        A replica that left before the last round, having fewer steps to take or none when it was
        restarted, ended with that round's parameters and is not asked. Nor is one that did not get
        to its end, unless none did.
        """
        ended = [o for o in self.outcomes if o is not None and o.get("state") == "succeeded"]
        rounds = [outcome.get("round") for outcome in ended]
        last = max((r for r in rounds if isinstance(r, int)), default=None)
        asked = (o for o, r in zip(ended, rounds, strict=True) if r is None or r == last)
        digests = {outcome.get("digest") for outcome in asked}
        return digests.pop() if len(digests) == 1 else None


def read_results(store: ObjectStore, ranks: int) -> RunResults:
    """Read what the run whose prefix is ``store`` has left.

    Args:
        store: the run's own prefix.
        ranks: how many there are, or were.
    """
    lives = read_lives(store)
    outcomes = [
        read_json(store, keys.outcome(rank, lives.newest(rank) or 0)) for rank in range(ranks)
    ]
    result = read_result(store)
    if result is None:
        return RunResults(tuple(outcomes), None, (), None)
    return RunResults(tuple(outcomes), result.manifest, result.files, result.model)


def read_metrics(store: ObjectStore) -> list[dict[str, Any]]:
    """Each replica's figures of each round, with ``rank`` and ``attempt``, in that order."""
    found = [m for info in store.list(keys.METRICS) if (m := _METRICS.fullmatch(info.key))]
    with ThreadPoolExecutor(16, thread_name_prefix="metrics") as pool:
        rows = pool.map(lambda match: read_json(store, match[0]), found)
        return [
            {"rank": int(match[1]), "attempt": int(match[2]), "round": int(match[3]), **(row or {})}
            for match, row in zip(found, rows, strict=True)
        ]
