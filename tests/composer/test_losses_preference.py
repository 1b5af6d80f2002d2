"""DPO, SimPO and the log-probabilities they are made of."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_references import Case, assert_agree, blocks_of, cases

from diloco_cloud.composer import (
    avg_sequence_logprob,
    dpo_loss,
    sequence_logprobs,
    simpo_loss,
    token_logprobs,
)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    beta=st.sampled_from([0.01, 0.1, 2.0]),
    smoothing=st.sampled_from([0.0, 0.1, 0.4]),
    gamma=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_dpo_and_simpo_equal_their_formulas(
    seed: int, beta: float, smoothing: float, gamma: float
) -> None:
    made = torch.Generator().manual_seed(seed)
    chosen, rejected, ref_chosen, ref_rejected = torch.randn(4, 5, generator=made) * 20

    def dpo(c: torch.Tensor) -> torch.Tensor:
        margin = beta * ((c - ref_chosen.double()) - (rejected.double() - ref_rejected.double()))
        right, wrong = torch.sigmoid(margin), torch.sigmoid(-margin)
        return -((1 - smoothing) * right.log() + smoothing * wrong.log()).mean()

    assert_agree(
        lambda c: dpo_loss(
            c, rejected, ref_chosen, ref_rejected, beta=beta, label_smoothing=smoothing
        ),
        dpo,
        chosen,
    )
    assert_agree(
        lambda c: simpo_loss(c, rejected, beta=beta, gamma=gamma),
        lambda c: -torch.sigmoid(beta * (c - rejected.double()) - gamma).log().mean(),
        chosen,
    )


def test_dpo_hand_worked() -> None:
    zero = torch.zeros(3)
    assert dpo_loss(zero, zero, zero, zero).item() == pytest.approx(math.log(2))
    lead = dpo_loss(torch.tensor([2.0]), zero[:1], torch.tensor([0.5]), zero[:1], beta=0.4)
    assert lead.item() == pytest.approx(-math.log(1 / (1 + math.exp(-0.6))))


def test_simpo_loss_lower_for_better_separation() -> None:
    rejected = torch.tensor([-3.0, -3.0])
    near, far = (simpo_loss(torch.full((2,), c), rejected).item() for c in (-2.9, -1.0))
    assert far < near
    # -log σ(2·0.1 - 1)
    assert near == pytest.approx(math.log1p(math.exp(0.8)), rel=1e-5)


def test_simpo_loss_differentiable() -> None:
    chosen, rejected = (torch.tensor([-2.0, -1.0], requires_grad=True) for _ in range(2))
    simpo_loss(chosen, rejected).backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert (chosen.grad < 0).all()
    assert (rejected.grad > 0).all()


def test_simpo_loss_shape_mismatch_raises() -> None:
    with pytest.raises(ValueError, match=r"\(3,\), not \(2,\)"):
        simpo_loss(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("position", [1, 2, 3])
def test_dpo_refuses_shapes_that_would_broadcast(position: int) -> None:
    given = [torch.zeros(2) for _ in range(4)]
    given[position] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"\(1,\), not \(2,\)"):
        dpo_loss(*given)


def test_dpo_refuses_smoothing_of_a_half() -> None:
    with pytest.raises(ValueError, match=r"label_smoothing is 0\.5"):
        dpo_loss(*[torch.zeros(2)] * 4, label_smoothing=0.5)


@settings(max_examples=30)
@given(case=cases, masked=st.booleans())
def test_token_logprobs_equal_log_softmax(case: Case, masked: bool) -> None:
    made = torch.Generator().manual_seed(case.seed)
    ids = torch.randint(case.vocabulary, (case.batch, case.length), generator=made)
    mask = case.mask if masked else None

    def expected(logits: torch.Tensor) -> torch.Tensor:
        every = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        return every if mask is None else torch.where(mask != 0, every, 0.0)

    with blocks_of(case.block):
        assert_agree(lambda s: token_logprobs(s, ids, mask), expected, case.student)


def test_sequence_logprobs_predict_each_token_from_the_one_before() -> None:
    logits, ids = torch.randn(2, 4, 6, requires_grad=True), torch.randint(6, (2, 4))
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0]])
    cross_entropy = F.cross_entropy(logits[0, 1:3], ids[0, 2:4], reduction="sum")
    sums = sequence_logprobs(logits, ids, mask)
    torch.testing.assert_close(sums, torch.stack([-cross_entropy, torch.zeros(())]))
    (gradient,) = torch.autograd.grad(sums.sum(), logits)
    assert (gradient[0, [0, 3]] == 0).all()
    assert (gradient[1] == 0).all()


def test_avg_sequence_logprob_means_over_response_tokens() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -4.0], [-1.0, -math.inf, -5.0], [-1.0, -1.0, -1.0]])
    logprobs.requires_grad_(True)
    mask = torch.tensor([[0, 1, 1], [1, 0, 1], [0, 0, 0]])
    means = avg_sequence_logprob(logprobs, mask)
    assert means.tolist() == [-3.0, -3.0, 0.0]
    (gradient,) = torch.autograd.grad(means.sum(), logprobs)
    assert torch.equal(gradient, mask * 0.5)


def test_logprobs_refuse_shapes_that_do_not_fit() -> None:
    logits, ids = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"response_mask has shape \(2, 2\)"):
        avg_sequence_logprob(torch.zeros(2, 3), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="token ids"):
        token_logprobs(logits, ids[:, 1:])
    with pytest.raises(ValueError, match="the response mask has shape"):
        sequence_logprobs(logits, ids, ids[:, 1:])
    with pytest.raises(ValueError, match="token ids"):
        sequence_logprobs(logits[:, 1:], ids, ids)
