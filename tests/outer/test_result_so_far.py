"""Who finishes while others go on leaves a result, which is there even if they never finish."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from fleet import End, Fleet, Killed, _await
from replicas import Job
from torch import nn

from diloco_cloud import keys
from diloco_cloud.outer import MockManager
from diloco_cloud.result import read_result
from diloco_cloud.store.memory import MemoryStore


@dataclass
class Stalling(Fleet):
    """Its rank 0 is in all rounds, and does not end until the others have; then it dies or not.

    As one does whose trainer evaluates at the end, and may well fail there.
    """

    dies: bool = False
    ended: list[int] = field(default_factory=list)

    def live(self, rank: int, attempt: int, store: Any, model: nn.Module) -> End:
        end = super().live(rank, attempt, store, model)
        self.ended.append(rank)
        return end

    def stall(self, rank: int, attempt: int, step: int, manager: MockManager) -> None:
        if (rank, step) != (0, 0):
            return
        shutdown = manager.shutdown

        def late(*, finished: bool = False) -> None:
            if finished:
                _await(lambda: len(self.ended) == 2)
                assert read_result(MemoryStore(self.name)) is not None
                if self.dies:
                    raise Killed
            shutdown(finished=finished)

        manager.shutdown = late  # type: ignore[method-assign]


@pytest.mark.parametrize("dies", [True, False])
def test_what_the_first_to_finish_leaves_stands_until_the_last_one_has_finished(dies: bool) -> None:
    fleet = Stalling(
        Job(world_size=3, sync_every=4, steps=24),
        quorum=3,
        dies=dies,
        retired={0} if dies else set(),
    )
    fleet.on_step = fleet.stall
    ends = fleet.run()  # It checks that manifest and parameters are those of the last round.
    assert sorted(ends) == ([1, 2] if dies else [0, 1, 2])
    result = read_result(MemoryStore(fleet.name))
    assert result is not None
    assert result.is_final is not dies
    assert result.model is not None
    # Nothing is left of what it replaced.
    left = {key for key in fleet.stored if key.startswith(keys.RESULT)}
    assert left == {result.model, result.directory + keys.RESULT_MANIFEST}
