"""TAIDScheduler: how t moves, is agreed on and is kept."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cloud.composer import TAIDScheduler

LOSSES = st.lists(st.floats(-5, 50) | st.sampled_from([math.nan, math.inf, 0.0]), max_size=30)


@settings(max_examples=60)
@given(losses=LOSSES, adaptive=st.booleans(), end=st.sampled_from([0.6, 1.0]))
def test_t_never_falls_nor_passes_its_end(losses: list[float], adaptive: bool, end: float) -> None:
    schedule = TAIDScheduler(10, t_end=end, alpha=0.5, beta=0.5, disable_adaptive=not adaptive)
    before = schedule.t
    for step, loss in enumerate(losses):
        schedule.update_t(loss, step)
        assert before <= schedule.t <= end
        before = schedule.t


def test_defaults_are_the_papers() -> None:
    schedule = TAIDScheduler(100)
    assert (schedule.t, schedule.t_start, schedule.t_end) == (0.4, 0.4, 1.0)
    assert (schedule.alpha, schedule.beta) == (5e-4, 0.99)


def test_first_finite_loss_only_seeds() -> None:
    schedule = TAIDScheduler(10)
    assert schedule.update_t(torch.tensor(math.nan), 5) is None
    assert schedule.update_t(torch.tensor(math.inf), 5) is None
    assert schedule.update_t(torch.tensor(2.0), 5) is None
    assert schedule.t == 0.4
    increment = schedule.update_t(torch.tensor(1.9), 5)
    assert increment is not None
    assert increment.shape == ()
    assert increment.item() > 0
    assert schedule.t == pytest.approx(0.7)  # the linear schedule is ahead of the increment


def test_a_falling_loss_moves_t_faster_than_a_rising_one() -> None:
    falling, rising = (TAIDScheduler(10**6, alpha=0.1, beta=0.0) for _ in range(2))
    for step, loss in enumerate([4.0, 3.0, 2.0, 1.0]):
        falling.update_t(loss, step)
        rising.update_t(5.0 - loss, step)
    assert falling.t > rising.t > 0.4


def test_disable_adaptive_is_the_linear_schedule_with_a_ceiling() -> None:
    schedule = TAIDScheduler(8, t_start=0.2, t_end=0.6, disable_adaptive=True)
    seen = []
    for step in range(13):
        schedule.update_t(1.0 / (step + 1), step)
        seen.append(schedule.t)
    wanted = [0.2 + 0.4 * min(step, 8) / 8 for step in range(13)]
    assert seen == pytest.approx(wanted)
    assert seen[-1] == 0.6


def test_replicas_that_agree_go_on_from_one_t() -> None:
    replicas = [TAIDScheduler(50, alpha=0.3, beta=0.5) for _ in range(3)]
    for round_ in range(4):
        for number, replica in enumerate(replicas):
            for step in range(4):
                replica.update_t(3.0 / (1 + step + number), 4 * round_ + step)
        ts = [replica.t for replica in replicas]
        assert len(set(ts)) > 1
        mean = sum(ts) / 3
        for replica in replicas:
            replica.agree(mean)  # also below what the fastest had reached
        assert {replica.t for replica in replicas} == {mean}


def test_agreement_never_falls_and_never_passes_the_end() -> None:
    schedule = TAIDScheduler(10, t_end=0.9)
    schedule.agree(0.5)
    with pytest.raises(ValueError, match=r"0\.45, and 0\.5 was agreed before"):
        schedule.agree(0.45)
    with pytest.raises(ValueError, match="nan"):
        schedule.agree(math.nan)
    assert schedule.t == 0.5
    schedule.agree(3.0)
    assert schedule.t == 0.9


def test_state_continues_to_the_bit() -> None:
    losses = [3.0, 2.5, 2.7, 2.2, 2.0, 1.5]
    straight, first = (TAIDScheduler(20, alpha=0.2, beta=0.7) for _ in range(2))
    for step, loss in enumerate(losses):
        straight.update_t(loss, step)
    for step, loss in enumerate(losses[:3]):
        first.update_t(loss, step)
    first.agree(first.t)
    resumed = TAIDScheduler(20, alpha=0.2, beta=0.7)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step, loss in enumerate(losses[3:], start=3):
        resumed.update_t(loss, step)
    assert resumed.t == straight.t
    with pytest.raises(ValueError, match="agreed before"):
        resumed.agree(0.4)


def test_state_of_another_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="belongs to the schedule"):
        TAIDScheduler(20).load_state_dict(TAIDScheduler(10).state_dict())
    with pytest.raises(ValueError, match="no state of a TAIDScheduler"):
        TAIDScheduler(20).load_state_dict({"t": 0.5})


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_train_steps": 0},
        {"t_start": 1.0},
        {"t_start": -0.1},
        {"t_start": 0.8, "t_end": 0.5},
        {"t_end": 1.1},
        {"alpha": 2.0},
        {"beta": math.nan},
    ],
)
def test_scheduler_refuses_what_cannot_be(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"is|goes"):
        TAIDScheduler(**{"num_train_steps": 10, **arguments})  # type: ignore[arg-type]
