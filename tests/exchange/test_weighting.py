"""How contributions are weighed, and how long their mean is to be."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from diloco_cloud.exchange.weighting import (
    PLAIN,
    WEIGHTINGS,
    mean_norms,
    plain,
    weights,
)


@dataclass(frozen=True)
class Work:
    tokens: int
    inner_steps: int = 10
    carried: int = 0
    staleness: int = 0


def test_weights_by_tokens_equally_or_by_quality() -> None:
    work = [Work(1000), Work(4000), Work(4000, inner_steps=40)]
    assert weights(work, "equal") == [1, 1, 1]
    assert weights(work, "tokens") == [1000, 4000, 4000]
    # Tokens times tokens per step: the third had as many tokens, in batches of a quarter.
    assert weights(work, "quality") == [100_000, 1_600_000, 400_000]


@pytest.mark.parametrize("weighting", ["tokens", "quality"])
def test_weights_discount_what_is_late(weighting: str) -> None:
    fresh, late, half = weights(
        [Work(800), Work(800, carried=800, staleness=4), Work(800, carried=400, staleness=4)],
        weighting,
    )
    assert (late / fresh, half / fresh) == (0.5, 0.75)


@pytest.mark.parametrize(
    ("weighting", "odd"),
    [("tokens", Work(0)), ("quality", Work(0)), ("quality", Work(500, inner_steps=0))],
)
def test_weights_are_equal_where_somebody_does_not_say(weighting: str, odd: Work) -> None:
    assert weights([Work(1000), odd], weighting) == [1, 1]


def test_weights_by_tokens_need_no_steps() -> None:
    assert weights([Work(1000), Work(500, inner_steps=0)], "tokens") == [1000, 500]


def test_weights_refuse_another_word() -> None:
    with pytest.raises(ValueError, match="'token' is not one of tokens, equal, quality"):
        weights([Work(1)], "token")
    assert WEIGHTINGS == ("tokens", "equal", "quality")


def test_mean_norms_are_weighted_by_tensor() -> None:
    assert mean_norms([(1.0, 0.0, PLAIN), (4.0, 2.0, PLAIN)], [1.0, 0.5]) == (
        2.0,
        pytest.approx(2 / 3),
        PLAIN,
    )


def test_mean_norms_of_equal_norms_are_that_norm_exactly() -> None:
    draw = random.Random(0)
    for _ in range(200):
        norm = draw.uniform(0, 1e-3)
        some = [draw.random() for _ in range(7)]
        assert mean_norms([(norm,)] * 7, some)[0] == pytest.approx(norm, rel=1e-15)
        assert mean_norms([(norm,)] * 7, [1.0] * 7) == (norm,)


def test_mean_norms_do_not_overflow() -> None:
    assert mean_norms([(1.7e308,), (1.7e308,)], [1.0, 1.0]) == (1.7e308,)
    assert mean_norms([(5e-324,), (5e-324,)], [1e-3, 1e-3]) == (5e-324,)


def test_mean_norms_refuse_contributions_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="differ"):
        mean_norms([(1.0, PLAIN), (1.0, 1.0)], [1.0, 1.0])
    with pytest.raises(ValueError, match="differ"):
        mean_norms([(1.0,), (1.0, 1.0)], [1.0, 1.0])
    with pytest.raises(ValueError, match="weights"):
        mean_norms([(1.0,)], [1.0, 1.0])
    with pytest.raises(ValueError, match="weights"):
        mean_norms([], [])


def test_plain_tells_what_is_averaged_as_it_is() -> None:
    assert plain((0.0, PLAIN, 1.7e308)) == (False, True, False)
