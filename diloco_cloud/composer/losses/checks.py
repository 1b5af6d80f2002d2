"""Refusals: one clear error where tensors or options do not fit."""

from __future__ import annotations

import math
from collections.abc import Container

import torch
from torch import Tensor

from diloco_cloud.errors import ConfigError

REDUCTIONS = ("batchmean", "sum", "mean", "none")


def require(condition: bool, message: str, *, fix: str) -> None:
    """Raise :class:`ConfigError`, which is a ``ValueError``, unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message, fix=fix)


def same_shape(tensor: Tensor, other: Tensor, name: str) -> None:
    """Require a mask, or other companion, of exactly the other tensor's shape."""
    require(
        tensor.shape == other.shape,
        f"{name} has shape {tuple(tensor.shape)}, not {tuple(other.shape)}",
        fix="Give one entry for every token.",
    )


def zero_one(mask: Tensor, name: str) -> None:
    """Require a mask that marks tokens with 1 and leaves the others 0.

    Any other value would count as marked: labels with -100 would mark every token.
    """
    require(
        mask.dtype == torch.bool or bool(((mask == 0) | (mask == 1)).all()),
        f"{name} is not a mask of 0 and 1",
        fix="Pass (labels != -100) if yours are token ids with -100.",
    )


def token_mask(mask: Tensor, tokens: Tensor, name: str) -> None:
    """Require a mask of 0 and 1 with an entry for every token of (B, T)."""
    same_shape(mask, tokens, name)
    zero_one(mask, name)


def same_logits(student: Tensor, teacher: Tensor) -> None:
    """Require logits of one shape, (..., V), with a vocabulary."""
    require(
        student.dim() >= 1 and student.shape == teacher.shape,
        f"the student's logits have shape {tuple(student.shape)}, "
        f"the teacher's {tuple(teacher.shape)}",
        fix="Align both on the same tokens, with the same vocabulary.",
    )


def has_keys(batch: Container[str], *keys: str) -> None:
    """Require the tensors of a batch that a channel reads, by name."""
    missing = [key for key in keys if key not in batch]
    require(
        not missing,
        f"the batch has no {', no '.join(missing)}",
        fix="The trainer makes all of a channel's tensors: pass on what it has made.",
    )


def known_reduction(reduction: str) -> None:
    """Require one of :data:`REDUCTIONS`."""
    require(
        reduction in REDUCTIONS,
        f"reduction is {reduction!r}",
        fix=f"Use one of {', '.join(REDUCTIONS)}.",
    )


def unit_interval(value: float, name: str) -> None:
    """Require a number in [0, 1]; NaN is not."""
    inside = _is_finite(value) and 0.0 <= value <= 1.0
    require(inside, f"{name} is {value}", fix="Give a number from 0 to 1.")


def positive(value: float, name: str) -> None:
    """Require a finite number above 0."""
    above = _is_finite(value) and value > 0.0
    require(above, f"{name} is {value}", fix="Give a number above 0.")


def finite(value: float, name: str) -> None:
    """Require a number that is neither infinite nor NaN."""
    require(_is_finite(value), f"{name} is {value}", fix="Give a finite number.")


def channel_weight(value: float, name: str) -> None:
    """Require the weight of a channel: finite, at least 0."""
    at_least_0 = _is_finite(value) and value >= 0.0
    require(at_least_0, f"{name} is {value}", fix="Give a weight of 0 or more; 0 is off.")


def count(value: int, name: str) -> None:
    """Require a whole number of at least 1."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value >= 1, f"{name} is {value}", fix="Give a whole number of at least 1.")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except TypeError:  # text, such as a configuration file may have
        return False
