"""The state of the random number generators that a trainer draws from without naming them.

torch's default ones (CPU and every CUDA device), numpy's global one and Python's own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_NUMPY = "MT19937"


def capture() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The states now: tensors by name, and JSON values."""
    version, words, gauss = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
    }
    values: dict[str, Any] = {"python": [version, gauss]}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"cuda.{index}"] = state
    numpy = np.random.get_state(legacy=False)
    if numpy["bit_generator"] == _NUMPY:  # Another one was put there on purpose.
        tensors["numpy"] = torch.from_numpy(numpy["state"]["key"].view(np.int32).copy())
        values["numpy"] = [numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]]
    return tensors, values


def restore(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
    """Put captured states back; a CUDA device that is not there is left out.

    Raises:
        ValueError: they are no states, as far as can be seen.
        TypeError, KeyError, IndexError, RuntimeError: likewise.
    """
    version, gauss = values["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    if "numpy" in tensors:
        position, has_gauss, cached = values["numpy"]
        words = tensors["numpy"].numpy().view(np.uint32)
        np.random.set_state((_NUMPY, words, position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda.{index}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)
