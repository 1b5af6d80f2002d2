"""taid_loss against its formula and at its ends."""

from __future__ import annotations

import math

import loss_references as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_references import Case, assert_agree, blocks_of, cases

from diloco_cloud.composer import generalized_jsd_loss, taid_loss


@settings(max_examples=40)
@given(case=cases, t=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), masked=st.booleans())
def test_taid_equals_the_formula(case: Case, t: float, masked: bool) -> None:
    mask = case.mask if masked else None
    with blocks_of(case.block):
        assert_agree(
            lambda s: taid_loss(s, case.teacher, mask, t=t),
            lambda s: reference.reduced(reference.taid(s, case.teacher, t), mask, "mean"),
            case.student,
        )


def test_taid_loss_t_zero_target_matches_detached_student() -> None:
    student = torch.randn(1, 2, 4, requires_grad=True)
    teachers = torch.zeros(2, 1, 2, 4)
    teachers[0, ..., 0], teachers[1, ..., 3] = 10.0, 10.0
    losses = [taid_loss(student, teacher, torch.ones(1, 2), t=0.0) for teacher in teachers]
    assert losses[0].item() == losses[1].item()
    own = reference.entropy(student.detach().softmax(-1)).mean()
    torch.testing.assert_close(losses[0].detach(), own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_taid_gradient_at_t_zero_is_exactly_zero(dtype: torch.dtype) -> None:
    student = (torch.randn(3, 50, 999) * 5).to(dtype).requires_grad_(True)
    loss = taid_loss(student, torch.randn(3, 50, 999).to(dtype), t=0.0)
    (gradient,) = torch.autograd.grad(loss, student)
    assert (gradient == 0).all()


def test_taid_loss_t_one_is_pure_forward_kl() -> None:
    student, teacher = torch.randn(2, 3, 5, requires_grad=True), torch.randn(2, 3, 5)
    loss = taid_loss(student, teacher, t=1.0)
    q = teacher.softmax(-1)
    by_hand = -(q * student.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(loss, by_hand)
    forward = generalized_jsd_loss(student, teacher, beta=0.0, reduction="mean")
    torch.testing.assert_close(loss - reference.entropy(q).mean(), forward)
    torch.testing.assert_close(
        torch.autograd.grad(loss, student), torch.autograd.grad(forward, student)
    )


@pytest.mark.parametrize("t", [0.0, 0.4, 1.0])
def test_taid_survives_impossible_words(t: float) -> None:
    student, teacher = torch.randn(1, 2, 5), torch.randn(1, 2, 5)
    student[0, 0, 1] = student[0, 1, 2] = teacher[0, 0, 1] = teacher[0, 1, 3] = -math.inf
    student.requires_grad_(True)
    loss = taid_loss(student, teacher, t=t)
    assert loss.isfinite()
    assert torch.autograd.grad(loss, student)[0].isfinite().all()


def test_taid_with_no_token_is_zero() -> None:
    student = torch.randn(1, 2, 5, requires_grad=True)
    loss = taid_loss(student, torch.randn(1, 2, 5), torch.zeros(1, 2), t=0.5)
    assert loss.item() == 0
    assert (torch.autograd.grad(loss, student)[0] == 0).all()


@pytest.mark.parametrize(
    ("teacher", "mask", "t", "message"),
    [
        (torch.zeros(1, 3, 4), None, 0.5, "teacher's"),
        (torch.zeros(1, 2, 4), torch.ones(2, 1), 0.5, r"mask has shape \(2, 1\)"),
        (torch.zeros(1, 2, 4), None, 1.01, "t is 1.01"),
        (torch.zeros(1, 2, 4), None, math.nan, "t is nan"),
        (torch.zeros(1, 2, 4), None, torch.tensor(-0.5), "t is -0.5"),
    ],
)
def test_taid_refuses_what_does_not_fit(
    teacher: torch.Tensor, mask: torch.Tensor | None, t: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        taid_loss(torch.zeros(1, 2, 4), teacher, mask, t=t)
