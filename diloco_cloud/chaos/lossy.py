"""Uploads that get lost."""

from __future__ import annotations

import random
from typing import Any

from diloco_cloud import keys
from diloco_cloud.store.base import Data, ObjectStore


class LossyUploads:
    """A store that loses a part of each round's contributions, and says that all is well.

    No object store does that. It stands for a link so slow that the round is always decided without
    them, which is what the DiLoCo paper (arXiv:2311.08105) drops outer gradients for. The first
    round loses none: it waits for everyone who was launched.

    Args:
        inner: the store.
        rank: whose contributions pass through it.
        world_size: number of replicas.
        part: of each round's contributions, rounded to a whole number.
        seed: of whose they are; the same on all replicas.
    """

    def __init__(
        self, inner: ObjectStore, *, rank: int, world_size: int, part: float, seed: int
    ) -> None:
        self._inner = inner
        self._rank = rank
        self._ranks = range(world_size)
        self._count = round(part * world_size)
        self._seed = seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, key: str, data: Data) -> None:
        round_ = keys.round_of(key.removeprefix(keys.ROUNDS))
        if round_ is None or "/put/" not in key or self._rank not in self.losers(round_):
            self._inner.create(key, data)

    def losers(self, round_: int) -> list[int]:
        """Whose contributions are lost."""
        chance = random.Random(f"{self._seed}.{round_}")
        return chance.sample(self._ranks, self._count) if round_ > 0 else []
