"""generalized_jsd_loss: values, gradients, edges and refusals."""

from __future__ import annotations

import math

import loss_references as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_references import Case, assert_agree, blocks_of, cases

from diloco_cloud.composer import generalized_jsd_loss

REDUCTIONS = st.sampled_from(["batchmean", "sum", "mean", "none"])


@settings(max_examples=60)
@given(
    case=cases,
    beta=reference.betas,
    temperature=reference.temperatures,
    reduction=REDUCTIONS,
    masked=st.booleans(),
    top_k=st.sampled_from([None, 1, 3, 100]),
    clip=st.sampled_from([None, 0.3]),
)
def test_generalized_jsd_equals_the_formula(
    case: Case,
    beta: float,
    temperature: float,
    reduction: str,
    masked: bool,
    top_k: int | None,
    clip: float | None,
) -> None:
    mask = case.mask if masked else None

    def expected(student: torch.Tensor) -> torch.Tensor:
        per_token = reference.jsd(student, case.teacher, beta, temperature=temperature, top_k=top_k)
        per_token = per_token if clip is None else per_token.clamp(max=clip)
        return reference.reduced(per_token, mask, reduction)

    labels = None if mask is None else torch.where(mask == 1, 5, -100)
    with blocks_of(case.block):
        assert_agree(
            lambda s: generalized_jsd_loss(
                s, case.teacher, labels, beta, temperature, reduction, top_k=top_k, token_clip=clip
            ),
            expected,
            case.student,
        )


@settings(max_examples=25)
@given(case=cases, beta=reference.betas, reduction=REDUCTIONS)
def test_generalized_jsd_takes_probabilities_as_they_are(
    case: Case, beta: float, reduction: str
) -> None:
    student, teacher = case.student.softmax(-1), case.teacher.softmax(-1)
    with blocks_of(case.block):
        assert_agree(
            lambda p: generalized_jsd_loss(
                p, teacher, None, beta, 3.0, reduction, logits_are_probs=True
            ),
            lambda p: reference.reduced(
                reference.jsd_of(p.clamp_min(1e-8), teacher.double().clamp_min(1e-8), beta),
                None,
                reduction,
            ),
            # A probability near the floor has a gradient of 1e8: relative precision decides.
            student.clamp_min(1e-3),
        )


def test_generalized_jsd_hand_worked() -> None:
    student, teacher = torch.tensor([[[3.0, 1.0]]]).log(), torch.tensor([[[1.0, 1.0]]]).log()
    forward = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    reverse = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    middle = 0.5 * (
        0.5 * math.log(0.5 / 0.625)
        + 0.5 * math.log(0.5 / 0.375)
        + 0.75 * math.log(0.75 / 0.625)
        + 0.25 * math.log(0.25 / 0.375)
    )
    for beta, value in ((0.0, forward), (1.0, reverse), (0.5, middle)):
        assert generalized_jsd_loss(student, teacher, beta=beta).item() == pytest.approx(value)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_generalized_jsd_is_zero_with_zero_gradient_at_equality(beta: float) -> None:
    student = torch.randn(2, 3, 11, requires_grad=True)
    loss = generalized_jsd_loss(student, student.detach().clone(), beta=beta)
    (gradient,) = torch.autograd.grad(loss, student)
    assert abs(loss.item()) < 1e-6
    assert gradient.abs().max() < 1e-7


def test_symmetric_jsd_is_symmetric_and_bounded() -> None:
    one, other = torch.randn(1, 4, 6) * 20, torch.randn(1, 4, 6) * 20
    there = generalized_jsd_loss(one, other, reduction="none")
    back = generalized_jsd_loss(other, one, reduction="none")
    torch.testing.assert_close(there, back)
    assert (there <= math.log(2) + 1e-6).all()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_generalized_jsd_ignores_words_impossible_for_both(beta: float) -> None:
    """A padded or constrained vocabulary: -inf logits add nothing and get no gradient."""
    student, teacher = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    padded = torch.full((2, 3, 2), -math.inf)
    with_padding = torch.cat([student, padded], -1).requires_grad_(True)
    loss = generalized_jsd_loss(with_padding, torch.cat([teacher, padded], -1), beta=beta)
    torch.testing.assert_close(loss, generalized_jsd_loss(student, teacher, beta=beta))
    (gradient,) = torch.autograd.grad(loss, with_padding)
    assert gradient.isfinite().all()
    assert (gradient[..., 5:] == 0).all()


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_word_impossible_for_one_gives_its_true_value_and_no_nan(beta: float, side: str) -> None:
    student, teacher = torch.randn(1, 2, 4), torch.randn(1, 2, 4)
    (student if side == "student" else teacher)[0, 0, 1] = -math.inf
    student.requires_grad_(True)
    values = generalized_jsd_loss(student, teacher, beta=beta, reduction="none")
    (gradient,) = torch.autograd.grad(values.sum(), student)
    infinite = (beta == 0.0 and side == "student") or (beta == 1.0 and side == "teacher")
    assert values[0, 0].isinf().item() == infinite
    assert values[0, 1].isfinite()
    assert gradient.isfinite().all()
    assert gradient[0, 1].abs().sum() > 0


def test_nan_logits_stay_nan() -> None:
    """A model that has diverged must not look as if it had learnt."""
    student = torch.randn(1, 2, 4)
    student[0, 0, 2] = math.nan
    student.requires_grad_(True)
    for beta in (0.0, 0.5, 1.0):
        loss = generalized_jsd_loss(student, torch.randn(1, 2, 4), beta=beta)
        assert loss.isnan()
        assert torch.autograd.grad(loss, student)[0].isnan().any()


def test_no_token_left_gives_zero_and_a_zero_gradient() -> None:
    student = torch.randn(2, 3, 4, requires_grad=True)
    labels = torch.full((2, 3), -100)
    for reduction in ("batchmean", "sum", "mean"):
        loss = generalized_jsd_loss(student, torch.randn(2, 3, 4), labels, reduction=reduction)
        assert loss.item() == 0
        assert (torch.autograd.grad(loss, student)[0] == 0).all()


def test_clipped_tokens_have_no_gradient() -> None:
    student, teacher = torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)
    teacher[0, 0, 0], teacher[0, 1, 0] = 9.0, 0.5
    student.requires_grad_(True)
    loss = generalized_jsd_loss(student, teacher, reduction="sum", token_clip=0.1)
    (gradient,) = torch.autograd.grad(loss, student)
    assert (gradient[0, 0] == 0).all()
    assert gradient[0, 1].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_logits_are_computed_in_fp32(dtype: torch.dtype) -> None:
    student, teacher = torch.randn(2, 3, 50).to(dtype), torch.randn(2, 3, 50).to(dtype)
    exact = generalized_jsd_loss(student.double(), teacher.double())
    student.requires_grad_(True)
    loss = generalized_jsd_loss(student, teacher)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(loss, student)
    assert gradient.dtype == dtype


def test_autocast_does_not_round_the_divergence() -> None:
    """A trainer runs its loss under autocast; the sums must stay in fp32."""
    student, teacher = torch.randn(2, 3, 50), torch.randn(2, 3, 50)
    exact = generalized_jsd_loss(student, teacher)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(generalized_jsd_loss(student, teacher), exact)


def test_a_graph_can_be_walked_twice() -> None:
    student = torch.randn(1, 3, 4, requires_grad=True)
    loss = generalized_jsd_loss(student, torch.randn(1, 3, 4))
    (once,) = torch.autograd.grad(3 * loss, student, retain_graph=True)
    (twice,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(once, 3 * twice)


def test_the_teacher_gets_no_gradient() -> None:
    student, teacher = (torch.randn(1, 3, 4, requires_grad=True) for _ in range(2))
    generalized_jsd_loss(student, teacher).backward()
    assert student.grad is not None
    assert teacher.grad is None


def test_slices_of_logits_agree_with_their_copies() -> None:
    student, teacher = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    view = generalized_jsd_loss(student[:, :-1], teacher[:, 1:])
    copy = generalized_jsd_loss(student[:, :-1].contiguous(), teacher[:, 1:].contiguous())
    assert torch.equal(view, copy)


LOGITS = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"teacher_logits": torch.zeros(2, 2, 4)}, r"\(2, 3, 4\).*\(2, 2, 4\)"),
        ({"teacher_logits": torch.zeros(2, 3, 5)}, r"\(2, 3, 4\).*\(2, 3, 5\)"),
        ({"labels": torch.zeros(2, 4)}, r"labels have shape \(2, 4\)"),
        ({"labels": torch.zeros(3)}, r"labels have shape \(3,\)"),
        ({"beta": 1.5}, "beta is 1.5"),
        ({"beta": math.nan}, "beta is nan"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"reduction": "average"}, "reduction is 'average'"),
        ({"top_k": 0}, "top_k is 0"),
    ],
)
def test_generalized_jsd_refuses_what_does_not_fit(
    arguments: dict[str, object], message: str
) -> None:
    given = {"student_logits": LOGITS, "teacher_logits": LOGITS, **arguments}
    with pytest.raises(ValueError, match=message):
        generalized_jsd_loss(**given)  # type: ignore[arg-type]
