"""What one replica of a composer run draws its rollouts and its preference pairs from."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from diloco_cloud.composer.rewards import RewardFunction, Task, load_object, load_task
from diloco_cloud.errors import ConfigError
from diloco_cloud.trainers.composer_rows import Rows, as_table, dealt

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

#: Ranks whose seeds are apart from those of all others, in each life.
_RANKS: Final = 4096


@dataclass(frozen=True)
class Share:
    """How rows are shared out among the replicas.

    Attributes:
        rank: of this replica.
        world_size: number of replicas; 1 for rows that are this one's alone.
        seed: of the run.
        attempt: this life of the rank.
    """

    rank: int
    world_size: int
    seed: int
    attempt: int

    def of(self, count: int, source: str, *, first: set[int] | None = None) -> list[int]:
        """Which of ``count`` rows are this replica's; another life has them in another order.

        Args:
            count: of all rows, the same on all replicas.
            source: of the rows, for an error.
            first: rows that are dealt first, so that every replica has as many of them.

        Raises:
            ConfigError: there are fewer rows than replicas.
        """
        self.require(count, source)
        shuffle = random.Random(_hashed(self.seed)).shuffle
        own = dealt(count, self.rank, self.world_size, shuffle=shuffle, first=first or set())
        random.Random(_hashed(self.seed, self.rank, self.attempt)).shuffle(own)
        return own

    def require(self, count: int, source: str) -> None:
        """Refuse ``count`` rows if there are more replicas.

        Raises:
            ConfigError: see above.
        """
        if count < self.world_size:
            raise ConfigError(
                f"{source} has {count} rows for {self.world_size} replicas",
                fix="Give more rows, or fewer replicas.",
            )


@dataclass(frozen=True)
class ReplicaPrompts:
    """What the replicas' rollouts and pairs come from.

    Attributes:
        rows: of all replicas, of which each takes a share; of a task that makes rows up, this
            one's own.
        source: of the rows, as its user knows it.
        share: of this replica.
        rewards: that judge the completions.
        pairs: preference pairs for the replay channel: the share of them that this replica trains
            on; None for a run without pairs.
        seed: of this life of this rank, for all that it draws.
    """

    rows: Dataset
    source: str
    share: Share
    rewards: list[RewardFunction]
    pairs: list[dict[str, Any]] | None
    seed: int

    def brings(self, *columns: str) -> bool:
        """Whether any row of any replica has something in one of ``columns``."""
        return bool(self._filled(self.rows, *columns))

    def mine(self, rows: Dataset) -> Dataset:
        """This replica's share of ``rows``, with its part of those that bring a hint.

        Args:
            rows: all rows, or those of them that can be used: the same on all replicas.

        Raises:
            ConfigError: there are fewer rows than replicas.
        """
        hinted = self._filled(rows, "hint", "error_kind")
        return rows.select(self.share.of(len(rows), self.source, first=hinted))

    @staticmethod
    def _filled(rows: Dataset, *columns: str) -> set[int]:
        present = [name for name in columns if name in rows.column_names]
        return {i for name in present for i, value in enumerate(rows[name]) if value}


def replica_prompts(
    *,
    rank: int,
    world_size: int,
    attempt: int,
    seed: int,
    count: int,
    task: str | None,
    task_args: Mapping[str, Any],
    prompts: str | None,
    rewards: Sequence[str],
    pairs: str | None,
    has_prompts: bool = True,
) -> ReplicaPrompts:
    """Make or read the prompts.

    Rows of a file, and of a task that has a set of them (``Task.size``), are shared out: no two
    ranks have the same one, and a later life of a rank has the same share as its first, in another
    order. A task that makes rows up gets a seed for each rank and life, further from any other than
    there are rows: what it makes differs as far as its rows are many.

    Args:
        rank: of this replica.
        world_size: number of replicas.
        attempt: this life of the rank, from 0.
        seed: of the run.
        count: rows that a task makes for this replica, at most.
        task: see :func:`diloco_cloud.composer.rewards.load_task`; or None.
        task_args: settings of the task.
        prompts: a JSONL file of rows, instead of a task.
        rewards: import paths of reward functions, besides the task's.
        pairs: a JSONL file of preference pairs, or None.
        has_prompts: whether each row must have a prompt; not where environments write them.

    Raises:
        ConfigError: neither task nor prompts, or both; nothing judges the completions; a file is
            not to be read, or a row of it; it, or the task, has fewer rows than there are replicas.
    """
    if (task is None) == (prompts is None):
        raise ConfigError(
            "task and prompts are both " + ("missing" if task is None else "given"),
            fix='Set task (such as "arithmetic") or prompts (a JSONL file).',
        )
    if isinstance(rewards, str):
        raise ConfigError(
            f"rewards is one string, {rewards!r}", fix=f'Write rewards as a list: ["{rewards}"].'
        )
    share = Share(rank, world_size, seed, attempt)
    functions: list[RewardFunction] = [load_object(path) for path in rewards]
    own = share
    if task is not None:
        made = load_task(task, **task_args)
        functions.insert(0, made.reward)
        rows = Rows.made(f"task {task!r}", _task_rows(made, count, share))
        if getattr(made, "size", None) is None:
            own = Share(0, 1, seed, attempt)
    else:
        assert prompts is not None
        rows = Rows.read(prompts)
    if not functions:
        raise ConfigError(
            "nothing judges the completions",
            fix='Set rewards to import paths of reward functions, such as ["pkg.module:reward"].',
        )
    own.require(len(rows.rows), rows.source)
    return ReplicaPrompts(
        rows=as_table(rows, has_prompts=has_prompts),
        source=rows.source,
        share=own,
        rewards=functions,
        pairs=None if pairs is None else _own_pairs(pairs, share),
        seed=_hashed(seed, rank, attempt),
    )


def _task_rows(made: Task, count: int, share: Share) -> list[dict[str, Any]]:
    """All replicas' rows of a task that has a set of them; this one's of a task that has not."""
    if getattr(made, "size", None) is not None:
        return made.rows(count * share.world_size, seed=_hashed(share.seed))
    # Next to each other, seeds would share rows: reasoning-gym makes row i from seed + i. 32 bits,
    # for some of its data sets are numpy's.
    place = (share.attempt * _RANKS + share.rank) * count
    return made.rows(count, seed=(_hashed(share.seed) + place) % 2**32)


def _own_pairs(path: str, share: Share) -> list[dict[str, Any]]:
    rows = Rows.read(path).rows
    return [rows[index] for index in share.of(len(rows), path)]


def _hashed(*numbers: int) -> int:
    """A seed of 31 bits, which has nothing in common with that of other numbers."""
    digest = blake2b(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
