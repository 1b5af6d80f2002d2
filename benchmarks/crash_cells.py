"""The crash matrix: every step of a round at which a replica can die, in every role."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from forked_run import Job, paces
from tripwire import Role, Side, Step, Trap

REPLICAS, SNAPSHOT_EVERY, SYNC_EVERY, PACE_S = 4, 2, 6, 0.01
#: Of a run in which nobody dies, and those in which somebody is to.
ROUNDS, DEADLY = 10, range(2, 7)

ALL: tuple[Role, ...] = ("plain", "committer", "owner", "writer")
OWNERS: tuple[Role, ...] = ("owner", "committer", "writer")
NOT_OWNER: tuple[Role, ...] = ("plain", "committer", "writer")
NOT_COMMITTER: tuple[Role, ...] = ("plain", "owner", "writer")
ROUND, STREAM, STATE = r"rounds/\d+\.0/", r"rounds/\d+\.0\.stream/", r"state/\d+/"
INITIAL, LATER = r"state/0+/", r"state/0*[1-9]\d*/"
MANIFEST, TENSORS = r"manifest\.json", r".*\.safetensors"
RESULT = r"result/[^/]+/"

_start = partial(Step, "start", behind="nothing")
_agree = partial(Step, "agree", behind="contribution")
_stream = partial(Step, "reduce", sharded=True)
_for_all = partial(Step, "read on its way", streamed=True)
_snapshot = partial(Step, "snapshot", who="writer")
_collect = partial(Step, "collect garbage", who="writer")
_join = partial(Step, "join", behind="nothing", lives=2, who="joiner")
_export = partial(Step, "export", who="last to leave")

CONTRIBUTE = Step("contribute", "create put", "create", ROUND + "put/.*", ALL)
STEPS = (
    _start("put state", "put", INITIAL + TENSORS, who="replica 0"),
    _start("create manifest", "create", INITIAL + MANIFEST, who="replica 0"),
    _start("read state", "get", INITIAL + TENSORS),
    _start("put join", "put", ROUND + "join/.*"),
    Step("contribute", "create opening", "create", STREAM + "open/.*", ALL, sharded=True),
    Step("contribute", "create part", "create", STREAM + "part/.*", ALL, sharded=True),
    CONTRIBUTE,
    _agree("list", "list", ROUND, ALL),
    _agree("create commit", "create", ROUND + "commit", ("any", "owner"), who="committer"),
    _agree("get commit", "get", ROUND + "commit", NOT_COMMITTER),
    # Who decides, or comes close to it, reads them before.
    Step("reduce", "read contribution", "get_range", ROUND + "put/.*", NOT_OWNER),
    # Mostly before the decision, in the expectation of what it will be.
    _stream("read part", "get_range", STREAM + "part/.*", OWNERS),
    _stream("create sum", "create", STREAM + "sum/.*", OWNERS),
    _stream("read sum", "get_range", STREAM + "sum/.*", ALL),
    _for_all("create part", "create", STREAM + "part/.*", NOT_OWNER),
    _for_all("create put", "create", ROUND + "put/.*", NOT_OWNER),
    _for_all("read part", "get_range", STREAM + "part/.*", NOT_OWNER),
    _for_all("create commit", "create", ROUND + "commit", who="committer"),
    Step("apply", "outer step", "apply", "", ALL, behind="decision"),
    _snapshot("put state", "put", LATER + TENSORS),
    _snapshot("create manifest", "create", LATER + MANIFEST),
    _collect("delete manifest", "delete", STATE + MANIFEST),
    _collect("delete round", "delete_many", "rounds/.*", sides=("before", "halfway", "after")),
    _collect("delete state", "delete_many", "state/.*"),
    _join("list snapshots", "list_dirs", "state/"),
    _join("get manifest", "get", STATE + MANIFEST, there=True),
    _join("read state", "get", STATE + TENSORS),
    _join("replay commit", "get", ROUND + "commit", there=True),
    _join("replay contribution", "get_range", ROUND + "put/.*"),
    _join("list open round", "list", ROUND),
    _join("put join", "put", ROUND + "join/.*"),
    Step("leave", "put leave", "put", ROUND + "leave/.*"),
    _export("put model", "create", RESULT + r"model\.safetensors"),
    _export("put manifest", "put", RESULT + MANIFEST),
)


@dataclass(frozen=True)
class Cell:
    """One place to die at: a step, a role and a side."""

    step: Step
    role: Role
    side: Side

    def __str__(self) -> str:
        return f"{self.step.phase}: {self.step.name}, {self.who}, {self.side}"

    @property
    def who(self) -> str:
        """The role, in words."""
        return self.step.who if self.role == "any" else self.role

    @property
    def is_sharded(self) -> bool:
        return self.step.sharded or self.role == "owner"

    def job(self, rng: random.Random) -> Job:
        return Job(
            replicas=REPLICAS,
            rounds=ROUNDS,
            sync_every=SYNC_EVERY,
            pace_s=paces(rng, REPLICAS, PACE_S),
            snapshot_every=SNAPSHOT_EVERY,
            reduction="sharded" if self.is_sharded else "all-gather",
            streams=self.step.streamed,
        )

    def traps(self, rng: random.Random, root: Path) -> list[Trap]:
        """The trap of this cell, after the one that makes its victim a joiner, if it is to be."""
        here = root / "death"
        rank: int | None = rng.randrange(REPLICAS)
        when = {"first": rng.choice(DEADLY[:3]), "last": DEADLY[-1]}
        if self.step.lives > 1:
            first = Trap(CONTRIBUTE, "after", "any", root / "first_death", rank=rank, **when)
            return [first, Trap(self.step, self.side, "any", here, rank=rank, attempt=1)]
        if self.step.phase == "start":
            rank = 0 if self.step.who == "replica 0" else rng.randrange(1, REPLICAS)
            return [Trap(self.step, self.side, self.role, here, rank=rank)]
        if self.step.is_last:
            rank = rank if self.step.phase == "leave" else None
            return [Trap(self.step, self.side, self.role, here, rank=rank)]
        if self.role != "plain":
            rank = None
        elif self.is_sharded:
            rank = REPLICAS - 1  # there are as many shards as chunks: three
        return [Trap(self.step, self.side, self.role, here, rank=rank, **when)]


def cells() -> Iterator[Cell]:
    """All of the matrix."""
    for step in STEPS:
        for role in step.roles:
            for side in step.sides:
                yield Cell(step, role, side)
