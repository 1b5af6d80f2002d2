"""Reward functions whose mistakes are told apart from the model's."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from diloco_cloud.errors import RewardError

logger = logging.getLogger(__name__)

#: Where code lives that is not the user's: this package, the standard library, what is installed.
_FOREIGN: Final = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(__file__).parents[1],
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)


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
                self._fail(name, f"raised {type(error).__name__}: {error}", function, error)
                return [None] * len(completions)
            return self._check(found, completions, name, function)

        return checked

    def wrap_async(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A coroutine ``function`` with its results checked."""

        @functools.wraps(function)
        async def checked(*, completions: Sequence[Any], **inputs: Any) -> list[float | None]:
            try:
                found = await function(completions=completions, **inputs)
            except Exception as error:
                self._fail(name, f"raised {type(error).__name__}: {error}", function, error)
                return [None] * len(completions)
            return self._check(found, completions, name, function)

        return checked

    def check_models(
        self, rewards: torch.Tensor, functions: Sequence[Any], names: Sequence[str]
    ) -> None:
        """Check what reward models gave, of which TRL takes no number for None.

        Args:
            rewards: (completions, functions), of all processes; what fails becomes NaN.
            functions: as :meth:`wrap_all` returned them.
            names: of theirs.
        """
        for column, (function, name) in enumerate(zip(functions, names, strict=True)):
            if isinstance(function, nn.Module):
                for row in (~rewards[:, column].isfinite()).nonzero().flatten().tolist():
                    self._number(float(rewards[row, column]), name, row, function)
                    rewards[row, column] = math.nan

    def _check(
        self, found: Any, completions: Sequence[Any], name: str, function: Any
    ) -> list[float | None]:
        try:
            rewards = list(found)
        except TypeError:
            self._fail(name, f"returned {type(found).__name__}, not a list", function)
            return [None] * len(completions)
        if len(rewards) != len(completions):
            what = f"returned {len(rewards)} rewards for {len(completions)} completions"
            self._fail(name, what, function)
            return [None] * len(completions)
        return [self._number(reward, name, index, function) for index, reward in enumerate(rewards)]

    def _number(self, reward: Any, name: str, index: int, function: Any) -> float | None:
        if reward is None:
            return None
        try:
            number = float(reward)
        except (TypeError, ValueError):
            self._fail(name, f"returned {reward!r} for completion {index}", function)
            return None
        if not math.isfinite(number):
            self._fail(name, f"returned {number} for completion {index}", function)
            return None
        return number

    def _fail(self, name: str, what: str, function: Any, cause: Exception | None = None) -> None:
        where = _defined(function) if cause is None else _raised(cause)
        if self._strict:
            raise RewardError(
                f"reward function {name} {what}{where}",
                fix="Return one finite number per completion, or None to leave one out. "
                'strict=False (under launch: channels={"strict": false}) counts such rewards and '
                "goes on without them.",
            ) from cause
        key = f"{name}: {what.split(' for completion')[0]}"
        self.failures[key] += 1
        if self.failures[key] & (self.failures[key] - 1) == 0:
            seen = self.failures[key]
            logger.warning("reward function %s %s%s (seen %d times)", name, what, where, seen)


def _raised(error: Exception) -> str:
    """Where the user's own code was when ``error`` was raised: " (file:line, in function)"."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the guard's
    own = [f for f in frames if not f.filename.startswith((*_FOREIGN, "<"))] or frames
    return f" ({own[-1].filename}:{own[-1].lineno}, in {own[-1].name})" if own else ""


def _defined(function: Any) -> str:
    """Where ``function``, or the class of such an object, is written: " (file:line)"."""
    if isinstance(function, nn.Module):
        return ""
    plain = inspect.unwrap(function)
    while isinstance(plain, functools.partial):
        plain = plain.func
    call = getattr(type(plain), "__call__", None)  # noqa: B004 -- the method, of an object with one
    code = getattr(plain, "__code__", None) or getattr(call, "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def _is_coroutine(function: Any) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 -- the method, of an object with one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
