"""What one replica of a composer run draws its rollouts and its preference pairs from."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from diloco_cloud.composer.rewards import RewardFunction, Task, load_object, load_task
from diloco_cloud.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

#: Ranks whose seeds are apart from those of all others, in each life.
_RANKS: Final = 4096


@dataclass(frozen=True)
class ReplicaPrompts:
    """One replica's share.

    Attributes:
        rows: to roll out from.
        rewards: that judge the completions.
        pairs: of the replay channel; None without.
        seed: of this life of this rank, for all that it draws.
    """

    rows: Dataset
    rewards: list[RewardFunction]
    pairs: list[dict[str, Any]] | None
    seed: int


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
) -> ReplicaPrompts:
    """Make or read this replica's prompts.

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

    Raises:
        ConfigError: neither task nor prompts, or both; nothing judges the completions; a file is
            not to be read; it, or the task, has fewer rows than there are replicas.
    """
    from datasets import Dataset

    if (task is None) == (prompts is None):
        raise ConfigError(
            "task and prompts are both " + ("missing" if task is None else "given"),
            fix='Set task (such as "arithmetic") or prompts (a JSONL file).',
        )
    if isinstance(rewards, str):
        raise ConfigError(
            f"rewards is one string, {rewards!r}", fix=f'Write rewards as a list: ["{rewards}"].'
        )
    mine = _hashed(seed, rank, attempt)
    functions: list[RewardFunction] = [load_object(path) for path in rewards]
    if task is not None:
        made = load_task(task, **task_args)
        rows = _task_rows(made, task, count, seed, rank, world_size, attempt)
        functions.insert(0, made.reward)
    else:
        assert prompts is not None
        rows = _share(read_rows(prompts), rank, world_size, prompts)
    if not functions:
        raise ConfigError(
            "nothing judges the completions",
            fix='Set rewards to import paths of reward functions, such as ["pkg.module:reward"].',
        )
    found = None if pairs is None else _share(read_rows(pairs), rank, world_size, pairs)
    return ReplicaPrompts(Dataset.from_list(rows), functions, found, mine)


def _task_rows(
    made: Task, name: str, count: int, seed: int, rank: int, world_size: int, attempt: int
) -> list[dict[str, Any]]:
    """This replica's rows of a task."""
    if getattr(made, "size", None) is None:
        # Next to each other, seeds would share rows: reasoning-gym makes row i from seed + i. 32
        # bits, for some of its data sets are numpy's.
        place = (attempt * _RANKS + rank) * count
        return made.rows(count, seed=(_hashed(seed) + place) % 2**32)
    rows = _share(made.rows(count * world_size, seed=_hashed(seed)), rank, world_size, name)
    random.Random(_hashed(seed, rank, attempt)).shuffle(rows)
    return rows


def _hashed(*numbers: int) -> int:
    """A seed of 31 bits, which has nothing in common with that of other numbers."""
    digest = blake2b(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def read_rows(path: str) -> list[dict[str, Any]]:
    """The objects of a JSONL file.

    Raises:
        ConfigError: there is no such file, or a line of it is no JSON object.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}",
            fix="Give a JSONL file that every replica finds at this path.",
        ) from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number} is no JSON object")
        rows.append(row)
    return rows


def _share(
    rows: list[dict[str, Any]], rank: int, world_size: int, source: str
) -> list[dict[str, Any]]:
    if len(rows) < world_size:
        raise ConfigError(
            f"{source} has {len(rows)} rows for {world_size} replicas",
            fix="Give more rows, or fewer replicas.",
        )
    return rows[rank::world_size]
