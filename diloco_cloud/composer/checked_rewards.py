"""Reward functions whose mistakes are told apart from the model's."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from diloco_cloud.errors import RewardError

logger = logging.getLogger(__name__)


class RewardGuard:
    """Wraps reward functions: what they return is one finite number, or None, per completion.

    None means that the function has nothing to say of a completion (TRL leaves it out).

    Args:
        strict: whether a failure ends training. Else the completions go without this reward, which
            is counted and logged.

    Attributes:
        failures: rewards not had, by function and reason.
    """

    def __init__(self, *, strict: bool) -> None:
        self.failures: Counter[str] = Counter()
        self._strict = strict

    def wrap_all(self, functions: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """Wrap plain and coroutine functions; reward models stay as they are."""
        wrapped: list[Any] = []
        for function, name in zip(functions, names, strict=True):
            if isinstance(function, nn.Module):
                wrapped.append(function)
            elif _is_coroutine(function):
                wrapped.append(self.wrap_async(function, name))
            else:
                wrapped.append(self.wrap(function, name))
        return wrapped

    def wrap(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A plain ``function`` with its results checked."""

        @functools.wraps(function)
        def checked(*, completions: Sequence[Any], **inputs: Any) -> list[float | None]:
            try:
                found = function(completions=completions, **inputs)
            except Exception as error:
                self._fail(name, f"raised {type(error).__name__}: {error}", error)
                return [None] * len(completions)
            return self._check(found, completions, name)

        return checked

    def wrap_async(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A coroutine ``function`` with its results checked."""

        @functools.wraps(function)
        async def checked(*, completions: Sequence[Any], **inputs: Any) -> list[float | None]:
            try:
                found = await function(completions=completions, **inputs)
            except Exception as error:
                self._fail(name, f"raised {type(error).__name__}: {error}", error)
                return [None] * len(completions)
            return self._check(found, completions, name)

        return checked

    def _check(self, found: Any, completions: Sequence[Any], name: str) -> list[float | None]:
        try:
            rewards = list(found)
        except TypeError as error:
            self._fail(name, f"returned {type(found).__name__}, not a list", error)
            return [None] * len(completions)
        if len(rewards) != len(completions):
            self._fail(name, f"returned {len(rewards)} rewards for {len(completions)} completions")
            return [None] * len(completions)
        return [self._number(reward, name, index) for index, reward in enumerate(rewards)]

    def _number(self, reward: Any, name: str, index: int) -> float | None:
        if reward is None:
            return None
        try:
            number = float(reward)
        except (TypeError, ValueError) as error:
            self._fail(name, f"returned {reward!r} for completion {index}", error)
            return None
        if not math.isfinite(number):
            self._fail(name, f"returned {number} for completion {index}")
            return None
        return number

    def _fail(self, name: str, what: str, cause: Exception | None = None) -> None:
        if self._strict:
            raise RewardError(
                f"reward function {name} {what}",
                fix="Return one finite number per completion, or None to leave one out. "
                "strict=False counts such rewards and goes on without them.",
            ) from cause
        key = f"{name}: {what.split(' for completion')[0]}"
        self.failures[key] += 1
        if self.failures[key] & (self.failures[key] - 1) == 0:
            logger.warning("reward function %s %s (seen %d times)", name, what, self.failures[key])


def _is_coroutine(function: Any) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 -- the method, of an object with one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
