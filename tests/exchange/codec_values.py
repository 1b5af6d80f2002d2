"""Values to encode: every kind that a pseudo-gradient has, and those that it should not have."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

#: Lengths around the blocks of 128 and 4096, and none.
LENGTHS = [0, 1, 2, 3, 127, 128, 129, 4095, 4096, 4097, 9001]

_LARGEST = float(np.finfo(np.float32).max)


def _spread(random: np.random.Generator, numel: int) -> np.ndarray:
    return random.standard_normal(numel) * np.exp(random.normal(0, 8, numel))


KINDS = {
    "gaussian": lambda random, numel: random.standard_normal(numel) * 1e-3,
    "heavy": lambda random, numel: random.standard_t(3, numel),
    "spread": _spread,
    "zeros": lambda _, numel: np.zeros(numel),
    "negative zeros": lambda _, numel: np.full(numel, -0.0),
    "equal": lambda _, numel: np.full(numel, -0.37),
    "few levels": lambda random, numel: random.integers(-3, 4, numel),
    "mostly zeros": lambda random, numel: _spread(random, numel) * (random.random(numel) < 0.01),
    "zeros and others": lambda random, numel: (
        random.standard_normal(numel) * (np.arange(numel) >= 4096)
    ),
    "outlier": lambda random, numel: np.where(
        np.arange(numel) == numel // 2, 1e30, random.standard_normal(numel)
    ),
    "subnormal": lambda random, numel: random.standard_normal(numel) * 1e-41,
    "tiny": lambda random, numel: random.standard_normal(numel) * 2.0**-100,
    "huge": lambda random, numel: random.uniform(-_LARGEST, _LARGEST, numel),
    "any bits": lambda random, numel: _finite(random.integers(0, 2**32, numel, np.uint32)),
}


def _finite(bits: np.ndarray) -> np.ndarray:
    values = bits.view(np.float32)
    return np.where(np.isfinite(values), values, np.float32(0))


def values_of(kind: str, numel: int, seed: int = 0) -> torch.Tensor:
    """Finite fp32 values of a kind."""
    values = KINDS[kind](np.random.default_rng(seed), numel)
    return torch.from_numpy(np.asarray(values).astype(np.float32))


@st.composite
def chunks(draw: st.DrawFn, most: int = 9001) -> torch.Tensor:
    """Finite fp32 values of any kind and length, some of them replaced by arbitrary ones."""
    numel = draw(st.one_of(st.sampled_from([n for n in LENGTHS if n <= most]), st.integers(0, 300)))
    values = values_of(draw(st.sampled_from(list(KINDS))), numel, draw(st.integers(0, 2**32 - 1)))
    if numel:
        special = st.floats(width=32, allow_nan=False, allow_infinity=False)
        places = st.dictionaries(st.integers(0, numel - 1), special, max_size=8)
        for place, value in draw(places).items():
            values[place] = value
    return values
