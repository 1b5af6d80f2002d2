"""Verifiable tasks: prompts, and a reward function that checks the answers.

    task = load_task("arithmetic", digits=2)
    rows = task.rows(1000, seed=0)
    trainer = ComposerReplicationTrainer(reward_funcs=[task.reward], train_dataset=rows, ...)

A reward function gets the completions and the rows' other columns as keywords, and returns one
number for each completion, as TRL has it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from diloco_cloud.errors import ConfigError

RewardFunction: TypeAlias = Callable[..., list[float | None]]

#: A minus behind a digit is one number less another.
_NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:\.\d+)?")
#: 1,234,567; but not 3,5, which are two numbers.
_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)")
_TASKS: dict[str, str] = {
    "arithmetic": "diloco_cloud.composer.rewards_arithmetic:Arithmetic",
    "reasoning_gym": "diloco_cloud.composer.rewards_reasoning_gym:ReasoningGym",
    "human_eval": "diloco_cloud.composer.rewards_human_eval:HumanEval",
}


class Task(Protocol):
    """Prompts whose answers can be checked.

    A task that has a set of rows, rather than making them up, may say so with an attribute
    ``size``, their number: its :meth:`rows` then never gives one twice, and replicas share them
    out.
    """

    def rows(self, count: int, *, seed: int) -> list[dict[str, Any]]:
        """``count`` rows: ``prompt``, and the columns that :meth:`reward` reads.

        Args:
            count: how many; a task with fewer gives what it has.
            seed: other seeds give other rows, or another order.
        """

    def reward(self, completions: list[Any], **columns: Any) -> list[float | None]:
        """One number for each completion, 1 for a right answer."""


def load_task(name: str, **settings: Any) -> Task:
    """A ready task, or one of your own by import path ("pkg.mod:Class").

    Args:
        name: "arithmetic", "reasoning_gym", "human_eval", or an import path.
        **settings: of the task.

    Raises:
        ConfigError: there is no such task, or it does not take these settings.
        MissingDependencyError: it needs a package that is not installed.
    """
    if name not in _TASKS and ":" not in name:
        raise ConfigError(
            f"there is no task {name!r}",
            fix=f"Use {', '.join(_TASKS)}, or an import path such as pkg.module:Task.",
        )
    make = load_object(_TASKS.get(name, name))
    try:
        task: Task = make(**settings)
    except TypeError as error:
        raise ConfigError(f"task {name!r} does not take {settings}: {error}") from error
    return task


def load_object(path: str) -> Any:
    """What "pkg.module:name" names.

    Raises:
        ConfigError: the path is malformed, or leads nowhere.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"{path!r} is no import path", fix="Write it as pkg.module:name.")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{path} cannot be imported: {error}",
            fix="It must be importable where the replicas run.",
        ) from error
    if not callable(found):
        raise ConfigError(f"{path} is {type(found).__name__}, and cannot be called")
    return found


def text_of(completion: str | list[Mapping[str, Any]]) -> str:
    """What the model wrote in its last turn, of a completion as text or as messages."""
    if isinstance(completion, str):
        return completion
    written = [m.get("content") for m in completion if m.get("role") == "assistant"]
    return str(written[-1] or "") if written else ""


def last_number(text: str) -> float | None:
    """The last number in ``text``, which is where a model that reasons first has its answer."""
    matches = _NUMBER.findall(_GROUPED.sub(lambda found: found[0].replace(",", ""), text))
    return float(matches[-1]) if matches else None
