"""The reference policy's log-probabilities of preference pairs: computed once, then kept.

The reference is the model as it is before training (DPO, arXiv:2305.18290, section 4). Computing
them at the start needs no second copy of the model; they go into checkpoints, as a resumed
trainer's model is no longer the reference.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from diloco_cloud.composer.preference_pairs import EncodedPair

logger = logging.getLogger(__name__)

#: Of the chosen and of the rejected response: sums over their tokens.
PairLogprobs: TypeAlias = tuple[float, float]

_FILE = "composer_reference.json"


class ReferenceLogprobs:
    """Log-probabilities by the pair's content.

    Args:
        known: to begin with, by :attr:`EncodedPair.digest`.
    """

    def __init__(self, known: Mapping[str, PairLogprobs] | None = None) -> None:
        self._known: dict[str, PairLogprobs] = dict(known or {})

    def __len__(self) -> int:
        return len(self._known)

    def of(self, pairs: Iterable[EncodedPair]) -> list[PairLogprobs]:
        """In the order of ``pairs``; a KeyError for one that is not known."""
        return [self._known[pair.digest] for pair in pairs]

    def missing(self, pairs: Iterable[EncodedPair]) -> list[EncodedPair]:
        """Those of ``pairs`` that are not known, each once."""
        wanted = {pair.digest: pair for pair in pairs}
        return [pair for digest, pair in wanted.items() if digest not in self._known]

    def compute(
        self,
        pairs: Sequence[EncodedPair],
        score: Callable[[Sequence[EncodedPair]], Sequence[PairLogprobs]],
        *,
        batch_size: int,
    ) -> None:
        """Compute what is missing of ``pairs`` with ``score``, ``batch_size`` at a time."""
        # Pairs of similar length share a batch, so that little of it is padding.
        missing = sorted(self.missing(pairs), key=lambda p: len(p.prompt) + len(p.chosen))
        for start in range(0, len(missing), batch_size):
            batch = missing[start : start + batch_size]
            self._known.update(zip((p.digest for p in batch), score(batch), strict=True))
        if missing:
            logger.info("reference log-probabilities of %d pairs computed", len(missing))

    def save(self, checkpoint: Path) -> None:
        """Write into a checkpoint's folder."""
        (checkpoint / _FILE).write_text(json.dumps(self._known))

    def load(self, checkpoint: Path) -> None:
        """Take over what a checkpoint has, if it has any."""
        path = checkpoint / _FILE
        if path.exists():
            found = json.loads(path.read_text())
            self._known.update({digest: (pair[0], pair[1]) for digest, pair in found.items()})
