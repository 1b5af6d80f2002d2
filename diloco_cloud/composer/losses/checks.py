"""Refusals: one clear error where tensors or options do not fit."""

from __future__ import annotations

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


def same_logits(student: Tensor, teacher: Tensor) -> None:
    """Require logits of one shape, (..., V), with a vocabulary."""
    require(
        student.dim() >= 1 and student.shape == teacher.shape,
        f"the student's logits have shape {tuple(student.shape)}, "
        f"the teacher's {tuple(teacher.shape)}",
        fix="Align both on the same tokens, with the same vocabulary.",
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
    require(0.0 <= value <= 1.0, f"{name} is {value}", fix="Give a number from 0 to 1.")


def positive(value: float, name: str) -> None:
    """Require a number above 0; NaN is not."""
    require(value > 0.0, f"{name} is {value}", fix="Give a number above 0.")
