"""entropy_aware_opd_loss in both forms, and teacher_entropy."""

from __future__ import annotations

import math

import loss_references as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_references import Case, assert_agree, blocks_of, cases

from diloco_cloud.composer import entropy_aware_opd_loss, generalized_jsd_loss, teacher_entropy

REDUCTIONS = st.sampled_from(["batchmean", "sum", "mean", "none"])


@settings(max_examples=40)
@given(
    case=cases.filter(lambda case: case.vocabulary > 1),
    h_max=st.sampled_from([None, 0.5, 5.0]),
    temperature=reference.temperatures,
    reduction=REDUCTIONS,
    masked=st.booleans(),
)
def test_soft_gate_equals_the_formula(
    case: Case, h_max: float | None, temperature: float, reduction: str, masked: bool
) -> None:
    mask = case.mask if masked else None
    with blocks_of(case.block):
        assert_agree(
            lambda s: entropy_aware_opd_loss(
                s,
                case.teacher,
                labels=mask,
                h_max=h_max,
                temperature=temperature,
                reduction=reduction,
            ),
            lambda s: reference.reduced(
                reference.soft_entropy_opd(s, case.teacher, h_max, temperature), mask, reduction
            ),
            case.student,
        )


@settings(max_examples=40)
@given(
    case=cases,
    threshold=st.sampled_from([0.0, 0.8, 1.5]),
    alpha=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([1, 3, 16]),
    temperature=reference.temperatures,
)
def test_indicator_equals_the_formula(
    case: Case, threshold: float, alpha: float, top_k: int, temperature: float
) -> None:
    constants = {"threshold": threshold, "alpha": alpha, "top_k": top_k}
    with blocks_of(case.block):
        assert_agree(
            lambda s: entropy_aware_opd_loss(
                s,
                case.teacher,
                labels=case.mask,
                temperature=temperature,
                mode="paper",
                **constants,  # type: ignore[arg-type]
            ),
            lambda s: reference.reduced(
                reference.paper_entropy_opd(s, case.teacher, temperature, **constants),  # type: ignore[arg-type]
                case.mask,
                "batchmean",
            ),
            case.student,
        )


@pytest.mark.parametrize("mode", ["soft", "paper"])
def test_entropy_aware_opd_zero_when_distributions_match(mode: str) -> None:
    student = torch.randn(2, 3, 7, requires_grad=True)
    loss = entropy_aware_opd_loss(student, student.detach() + 3.0, mode=mode)
    (gradient,) = torch.autograd.grad(loss, student)
    assert abs(loss.item()) < 1e-6
    assert gradient.abs().max() < 1e-6


def test_the_gate_is_reverse_kl_when_certain_and_forward_kl_when_lost() -> None:
    student = torch.randn(1, 1, 5)
    certain, lost = torch.tensor([[[40.0, 0, 0, 0, 0]]]), torch.zeros(1, 1, 5)
    for teacher, beta in ((certain, 1.0), (lost, 0.0)):
        torch.testing.assert_close(
            entropy_aware_opd_loss(student, teacher),
            generalized_jsd_loss(student, teacher, beta=beta),
        )


def test_the_indicator_adds_forward_kl_above_the_threshold_only() -> None:
    student, unsure = torch.randn(1, 1, 5), torch.zeros(1, 1, 5)
    reverse = generalized_jsd_loss(student, unsure, beta=1.0)
    forward = generalized_jsd_loss(student, unsure, beta=0.0)
    both = entropy_aware_opd_loss(student, unsure, mode="paper")
    torch.testing.assert_close(both, reverse + forward)
    below = entropy_aware_opd_loss(student, unsure, mode="paper", threshold=math.log(5) + 0.01)
    torch.testing.assert_close(below, reverse)


@pytest.mark.parametrize("mode", ["soft", "paper"])
@pytest.mark.parametrize("h_max", [None, 0.1])
def test_impossible_words_leave_gradients_finite(mode: str, h_max: float | None) -> None:
    student, teacher = torch.randn(1, 4, 5), torch.randn(1, 4, 5)
    student[0, 0, 1] = teacher[0, 0, 1] = -math.inf  # for both
    student[0, 1, 2] = -math.inf
    teacher[0, 2, 3] = -math.inf
    student.requires_grad_(True)
    values = entropy_aware_opd_loss(student, teacher, mode=mode, h_max=h_max, reduction="none")
    (gradient,) = torch.autograd.grad(values.sum(), student)
    assert not values.isnan().any()
    assert values[0, 0].isfinite()
    assert values[0, 3].isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("mode", ["soft", "paper"])
@pytest.mark.parametrize("side", [0, 1])
def test_entropy_aware_nan_logits_stay_nan(mode: str, side: int) -> None:
    logits = torch.randn(2, 1, 2, 5)
    logits[side, 0, 1, 3] = math.nan
    values = entropy_aware_opd_loss(logits[0], logits[1], mode=mode, reduction="none")
    assert values.isnan().tolist() == [[False, True]]


def test_teacher_entropy_one_hot_is_zero() -> None:
    logits = torch.full((2, 3, 9), -math.inf)
    logits[..., 4] = 2.0
    assert torch.equal(teacher_entropy(logits), torch.zeros(2, 3))


def test_teacher_entropy_uniform_is_log_v() -> None:
    torch.testing.assert_close(
        teacher_entropy(torch.full((2, 3, 9), 7.0)), torch.full((2, 3), math.log(9))
    )


@settings(max_examples=20)
@given(case=cases)
def test_teacher_entropy_equals_the_formula(case: Case) -> None:
    with blocks_of(case.block):
        got = teacher_entropy(case.teacher.requires_grad_(True))
    assert not got.requires_grad
    expected = reference.entropy(case.teacher.double().softmax(-1))
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"teacher_logits": torch.zeros(2, 3, 5)}, "teacher's"),
        ({"labels": torch.zeros(2, 2)}, r"labels have shape \(2, 2\)"),
        ({"labels": torch.full((2, 3), -100)}, "mask of 0 and 1"),
        ({"reduction": "avg"}, "reduction is 'avg'"),
        ({"mode": "hard"}, "mode is 'hard'"),
        ({"h_max": 0.0}, "h_max is 0.0"),
        ({"mode": "paper", "top_k": 0}, "top_k is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
    ],
)
def test_entropy_aware_opd_refuses_what_does_not_fit(
    arguments: dict[str, object], message: str
) -> None:
    logits = torch.zeros(2, 3, 4)
    given = {"student_logits": logits, "teacher_logits": logits, **arguments}
    with pytest.raises(ValueError, match=message):
        entropy_aware_opd_loss(**given)  # type: ignore[arg-type]
