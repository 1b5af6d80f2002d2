"""What one replica of a composer run draws its rollouts and its preference pairs from."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_cloud.composer.rewards import RewardFunction, load_object, load_task
from diloco_cloud.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)


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
    """Make or read this replica's prompts; no other rank of the run has the same.

    Args:
        rank: of this replica.
        world_size: number of replicas.
        attempt: this life of the rank. A later one draws anew rather than the same once more.
        seed: of the run.
        count: rows that a task makes.
        task: see :func:`diloco_cloud.composer.rewards.load_task`; or None.
        task_args: settings of the task.
        prompts: a JSONL file of rows, instead of a task.
        rewards: import paths of reward functions, besides the task's.
        pairs: a JSONL file of preference pairs, or None.

    Raises:
        ConfigError: neither task nor prompts, or both; nothing judges the completions; a file is
            not to be read; it has fewer rows than there are replicas.
    """
    from datasets import Dataset

    if (task is None) == (prompts is None):
        raise ConfigError(
            "task and prompts are both " + ("missing" if task is None else "given"),
            fix='Set task (such as "arithmetic") or prompts (a JSONL file).',
        )
    mine = (seed * 1_000_003 + rank) * 1009 + attempt
    functions: list[RewardFunction] = [load_object(path) for path in rewards]
    if task is not None:
        made = load_task(task, **task_args)
        rows = made.rows(count, seed=mine)
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
    return ReplicaPrompts(Dataset.from_list(rows), functions, found, mine % 2**31)


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
    rows: list[dict[str, Any]], rank: int, world_size: int, path: str
) -> list[dict[str, Any]]:
    if len(rows) < world_size:
        raise ConfigError(
            f"{path} has {len(rows)} rows for {world_size} replicas",
            fix="Give more rows, or fewer replicas.",
        )
    return rows[rank::world_size]
