"""The counting of tensors that channel 2's memory figures rest on."""

from __future__ import annotations

import benchmark_modules  # noqa: F401  (makes the next imports possible)
import pytest
import torch
from composer_contenders import CONTENDERS, KINDS, Shape
from composer_memory import LiveBytes, counted_peak, measured_peak

MB = 1 << 20


def test_live_bytes_counts_what_is_alive_at_once() -> None:
    with LiveBytes() as live:
        kept = torch.ones(MB)
        view = kept[1:].view(-1)
        for _ in range(3):
            torch.ones(MB).add_(1)
    assert live.peak == 8 * MB
    assert live.now == 4 * MB
    del kept
    assert live.now == 4 * MB
    del view
    assert live.now == 0


@pytest.mark.parametrize("kind", KINDS)
def test_counted_peak_of_shapes_is_that_of_the_real_pass(kind: str) -> None:
    (formula,) = [one for one in CONTENDERS if (one.kind, one.name) == (kind, "formula")]
    shape = Shape(tokens=8, vocabulary=4096, hidden=16)
    counted = counted_peak(lambda: formula.prepare(shape))
    real = measured_peak(lambda: formula.prepare(shape)).counted
    # A model's small tensors differ: fake ones take another way through its attention.
    assert counted == pytest.approx(real, rel=0.01)


def test_counted_peak_of_more_than_a_machine_has() -> None:
    copies = counted_peak(lambda: CONTENDERS[0].prepare(Shape(1 << 20, 1 << 20, 1))) / (1 << 42)
    assert round(copies) == 14
