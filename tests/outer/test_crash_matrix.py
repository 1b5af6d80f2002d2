"""A replica dies at every step of a round, in every role; tests/outer/fleet.py checks the rest.

The steps are those of benchmarks/crash_matrix.py, which kills real processes and measures how long
it takes. Here a replica dies by its store, so that each place is reached for certain.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fleet import Death, Fleet, Life
from replicas import Job

from diloco_cloud.exchange.commit import Commit

# A life that its store has killed may have threads that find out only now.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

REPLICAS = 3
JOB = Job(world_size=REPLICAS, sync_every=3, steps=21)
SHARDED = Job(world_size=REPLICAS, sync_every=3, steps=21, reduction="sharded")
STREAMED = replace(JOB, reduction="all-gather", streams=True)
PACE = dict.fromkeys(range(REPLICAS), 0.003)
#: The round, one that a snapshot follows, in which somebody dies; and where that snapshot is.
ROUND = "rounds/00000003.0/"
STREAM = "rounds/00000003.0.stream/"
STATE = "state/00000004/"


@dataclass
class FirstDeath(Death):
    """Kills only the first of the lives that share it to make the request.

    Attributes:
        key: a pattern, for the whole key; of several keys, the first.
    """

    is_over: bool = field(default=False, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def counts(self, method: str, args: tuple[Any, ...]) -> bool:
        keys = args[0] if method == "delete_many" else args[:1]
        key = str(next(iter(keys), ""))
        if method != self.method or not re.fullmatch(self.key, key):
            return False
        with self._lock:
            first, self.is_over = not self.is_over, True
        return first


@dataclass(frozen=True)
class Step:
    """A request, and who dies of it.

    Attributes:
        victim: a rank, or None for whoever comes first: to the commit, that is the committer; to a
            snapshot, its writer.
    """

    name: str
    method: str
    key: str
    victim: int | None = None
    job: Job = JOB
    is_last: bool = False


STEPS = [
    Step("start: put state", "put", r"state/0+/.*\.safetensors"),
    Step("start: create manifest", "create", r"state/0+/manifest\.json"),
    Step("start: read state", "get", r"state/0+/.*\.safetensors", victim=1),
    Step("start: put join", "put", r"rounds/0+\.0/join/.*", victim=2),
    # Rank 2 writes the snapshot that follows, rank 1 is nothing else.
    Step("contribute", "create", ROUND + "put/.*", victim=1),
    Step("contribute, writer", "create", ROUND + "put/.*", victim=2),
    Step("contribute, owner", "create", ROUND + "put/.*", victim=1, job=SHARDED),
    Step("contribute: create opening", "create", STREAM + "open/.*", victim=1, job=SHARDED),
    Step("contribute: create part", "create", STREAM + "part/.*", victim=1, job=SHARDED),
    Step("agree: list", "list", ROUND, victim=1),
    Step("agree: create commit", "create", ROUND + "commit"),
    Step("agree: create commit, owner", "create", ROUND + "commit", job=SHARDED),
    Step("agree: get commit", "get", ROUND + "commit"),
    Step("reduce: read contribution", "get_range", ROUND + "put/.*", victim=1),
    Step("reduce: read part", "get_range", STREAM + "part/.*", victim=1, job=SHARDED),
    Step("reduce: create sum", "create", STREAM + "sum/.*", victim=1, job=SHARDED),
    Step("reduce: create sum, writer", "create", STREAM + "sum/.*", victim=2, job=SHARDED),
    Step("reduce: read sum", "get_range", STREAM + "sum/.*", victim=1, job=SHARDED),
    Step("for all: create opening", "create", STREAM + "open/.*", victim=1, job=STREAMED),
    Step("for all: create part", "create", STREAM + "part/.*", victim=1, job=STREAMED),
    Step("for all: create put", "create", ROUND + "put/.*", victim=2, job=STREAMED),
    Step("for all: read part", "get_range", STREAM + "part/.*", victim=1, job=STREAMED),
    Step("for all: list parts", "list", STREAM + "part/0000/", victim=1, job=STREAMED),
    Step("for all: create commit", "create", ROUND + "commit", job=STREAMED),
    Step("apply", "list", r"rounds/00000004\.0/", victim=1),
    Step("apply, writer", "list", r"rounds/00000004\.0/", victim=2),
    Step("snapshot: put state", "put", STATE + r".*\.safetensors"),
    Step("snapshot: create manifest", "create", STATE + r"manifest\.json"),
    Step("collect garbage: delete manifest", "delete", r"state/0+/manifest\.json"),
    Step("collect garbage: delete round", "delete_many", r"rounds/00000001.*"),
    Step("collect garbage: delete state", "delete_many", r"state/0+/.*"),
    Step("leave", "put", r"rounds/.*/leave/.*", victim=1, is_last=True),
    Step("export: create model", "create", r"result/.*/model\.safetensors", is_last=True),
    Step("export: put manifest", "put", r"result/.*/manifest\.json", is_last=True),
]
JOINING = [
    Step("list snapshots", "list_dirs", r"state/"),
    Step("get manifest", "get", r"state/.*/manifest\.json"),
    Step("read state", "get", r"state/.*\.safetensors"),
    Step("replay commit", "get", r"rounds/.*/commit"),
    Step("list open round", "list", r"rounds/\d+\.0/"),
    Step("put join", "put", r"rounds/.*/join/.*"),
]


def run(step: Step, deaths: dict[Life, Death]) -> Fleet:
    fleet = Fleet(step.job, pace_s=PACE, restart_s=0.01)
    fleet.run(deaths)
    return fleet


def lives(commits: list[Commit]) -> set[Life]:
    """All that were ever merged."""
    return {(one.rank, one.attempt) for commit in commits for one in commit.contributors}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_nothing_is_lost_with_a_replica_that_dies(step: Step, after: bool) -> None:
    victims = range(REPLICAS) if step.victim is None else [step.victim]
    for _ in range(3):  # where others are quicker, a replica's chunks are reduced by them
        death = FirstDeath(method=step.method, key=step.key, after=after)
        fleet = run(step, {(rank, 0): death for rank in victims})
        if death.is_over:
            break
    assert death.is_over
    dead = [rank for rank in range(REPLICAS) if (rank, 1) in fleet.requests]
    assert len(dead) == 1
    assert step.is_last or (dead[0], 1) in lives(fleet.history())


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", JOINING, ids=lambda step: step.name)
def test_nothing_is_lost_with_a_replica_that_dies_as_it_joins(step: Step, after: bool) -> None:
    first = Death(method="create", key=f"{ROUND}put", after=True)
    death = FirstDeath(method=step.method, key=step.key, after=after)
    fleet = run(step, {(1, 0): first, (1, 1): death})
    assert death.is_over
    assert (1, 2) in lives(fleet.history())
