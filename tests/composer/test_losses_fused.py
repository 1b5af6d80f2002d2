"""Losses from hidden states equal those from logits, in values and in every gradient."""

from __future__ import annotations

import loss_references as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_references import Case, blocks_of, cases
from torch import Tensor, nn

from diloco_cloud.composer import (
    SDPOOptions,
    fused_jsd_loss,
    generalized_jsd_loss,
    sdpo_loss,
    sdpo_loss_from_hidden,
)

OPTIONS = [
    SDPOOptions(),
    SDPOOptions(jsd_beta=0.0, temperature=2.0),
    SDPOOptions(jsd_beta=1.0, token_clip=0.4),
    SDPOOptions(wrapper="taid", taid_t=0.4),
    SDPOOptions(wrapper="entropy_opd"),
    SDPOOptions(wrapper="entropy_opd", entropy_opd_mode="paper"),
]


@settings(max_examples=50)
@given(
    case=cases,
    options=st.sampled_from(OPTIONS),
    bias=st.booleans(),
    own_teacher=st.booleans(),
    frozen=st.booleans(),
)
def test_fused_equals_logits(
    case: Case, options: SDPOOptions, bias: bool, own_teacher: bool, frozen: bool
) -> None:
    torch.manual_seed(case.seed)
    head = nn.Linear(3, case.vocabulary, bias=bias).double()
    head.requires_grad_(not frozen)
    teacher_head = nn.Linear(4, case.vocabulary, bias=bias).double() if own_teacher else None
    student = torch.randn(case.batch, case.length, 3, dtype=torch.float64, requires_grad=True)
    width = 4 if own_teacher else 3
    teacher = torch.randn(case.batch, case.length, width, dtype=torch.float64)
    with blocks_of(case.block):
        fused = sdpo_loss_from_hidden(
            student, teacher, head, case.mask, options, teacher_lm_head=teacher_head
        )
        plain = sdpo_loss(head(student), (teacher_head or head)(teacher), case.mask, options)
    assert (fused.active, fused.skipped, fused.idle) == (plain.active, plain.skipped, plain.idle)
    torch.testing.assert_close(fused.loss, plain.loss)
    if plain.active:
        wanted = [student, *(p for p in head.parameters() if p.requires_grad)]
        torch.testing.assert_close(
            torch.autograd.grad(fused.loss, wanted), torch.autograd.grad(plain.loss, wanted)
        )


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_fused_jsd_equals_the_formula(beta: float) -> None:
    head = nn.Linear(6, 11)
    student, teacher = torch.randn(2, 5, 6, requires_grad=True), torch.randn(2, 5, 6)
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0]])

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight.T + head.bias.double()
        fixed = teacher.double() @ weight.detach().T + head.bias.double()
        return reference.reduced(reference.jsd(logits, fixed, beta), mask, "mean")

    with blocks_of(22):
        loss = fused_jsd_loss(student, teacher, head, mask, beta=beta)
    wide = student.detach().double().requires_grad_(True)
    weight = head.weight.detach().double().requires_grad_(True)
    expected = plain(wide, weight)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    mine = torch.autograd.grad(loss, [student, head.weight])
    theirs = torch.autograd.grad(expected, [wide, weight])
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_fused_without_a_mask_takes_every_token() -> None:
    head, student, teacher = nn.Linear(3, 5), torch.randn(2, 3, 3), torch.randn(2, 3, 3)
    torch.testing.assert_close(
        fused_jsd_loss(student, teacher, head),
        generalized_jsd_loss(head(student), head(teacher), reduction="mean"),
    )


def test_fused_sixteen_bit_gradients_have_the_parameters_dtype() -> None:
    head = nn.Linear(8, 40).bfloat16()
    student, teacher = torch.randn(2, 3, 8).bfloat16(), torch.randn(2, 3, 8).bfloat16()
    student.requires_grad_(True)
    loss = fused_jsd_loss(student, teacher, head)
    assert loss.dtype == torch.float32
    gradients = torch.autograd.grad(loss, [student, head.weight, head.bias])
    assert {g.dtype for g in gradients} == {torch.bfloat16}
    wide = nn.Linear(8, 40)
    wide.load_state_dict(head.state_dict())
    exact = torch.autograd.grad(
        fused_jsd_loss(student.float(), teacher.float(), wide), [wide.weight]
    )
    torch.testing.assert_close(gradients[1].float(), exact[0], rtol=0.05, atol=1e-3)


def test_fused_under_autocast_projects_in_bf16_as_the_model_does() -> None:
    head = nn.Linear(8, 40)
    student, teacher = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused = fused_jsd_loss(student, teacher, head)
        plain = generalized_jsd_loss(head(student), head(teacher), reduction="mean")
    torch.testing.assert_close(fused, plain)
    gradients = torch.autograd.grad(fused, [student, head.weight])
    wanted = torch.autograd.grad(plain, [student, head.weight])
    torch.testing.assert_close(gradients, wanted, rtol=0.05, atol=1e-3)


def test_fused_makes_no_gradient_that_nobody_wants() -> None:
    head = nn.Linear(3, 5)
    with torch.no_grad():
        loss = fused_jsd_loss(torch.randn(1, 2, 3), torch.randn(1, 2, 3), head)
    assert not loss.requires_grad


def test_fused_graph_can_be_walked_twice() -> None:
    head, student = nn.Linear(3, 5), torch.randn(1, 2, 3, requires_grad=True)
    loss = fused_jsd_loss(student, torch.randn(1, 2, 3), head)
    (once,) = torch.autograd.grad(2 * loss, head.weight, retain_graph=True)
    (twice,) = torch.autograd.grad(loss, head.weight)
    torch.testing.assert_close(once, 2 * twice)


def test_fused_refuses_what_does_not_fit() -> None:
    head, hidden = nn.Linear(3, 5), torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="head has 5 entries, the teacher's 6"):
        fused_jsd_loss(hidden, hidden, head, teacher_lm_head=nn.Linear(3, 6))
    with pytest.raises(ValueError, match="cover"):
        fused_jsd_loss(hidden, torch.zeros(1, 3, 3), head)
    with pytest.raises(ValueError, match="mask has shape"):
        fused_jsd_loss(hidden, hidden, head, torch.ones(1, 3))
    with pytest.raises(ValueError, match="temperature is 0"):
        fused_jsd_loss(hidden, hidden, head, temperature=0.0)
