"""Dropout off for a while: what a teacher or a reference says should not depend on chance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and each of its modules back into the mode it was in.

    ``train(True)`` alone would wake modules that the user keeps in evaluation mode.
    """
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in was_training:
            module.training = training
