"""Channels 2 and 3 as functions of tensors: masks, pairing, counters, refusals."""

from __future__ import annotations

import pytest
import torch
from loss_references import blocks_of
from torch import Tensor

from diloco_cloud.composer import (
    ReplayOptions,
    SDPOOptions,
    avg_sequence_logprob,
    dpo_loss,
    entropy_aware_opd_loss,
    generalized_jsd_loss,
    replay_loss,
    sdpo_loss,
    simpo_loss,
    taid_loss,
)
from diloco_cloud.composer.losses.logprobs import sequence_logprobs, token_logprobs

MASK = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1]])


def logits() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    student, teacher = torch.randn(2, 3, 4, 6, generator=made)
    return student.requires_grad_(True), teacher


def test_sdpo_runs_the_loss_that_its_options_name() -> None:
    student, teacher = logits()
    labels = torch.where(MASK == 1, 0, -100)
    jsd = generalized_jsd_loss(student, teacher, labels, 0.3, 2.0, token_clip=0.1)
    expected = {
        SDPOOptions(jsd_beta=0.3, temperature=2.0, token_clip=0.1): jsd,
        # Temperature and β are not TAID's.
        SDPOOptions(wrapper="taid", taid_t=0.7, temperature=2.0, jsd_beta=1.0): taid_loss(
            student, teacher, MASK, t=0.7
        ),
        SDPOOptions(
            wrapper="entropy_opd", entropy_opd_h_max=0.9, temperature=2.0
        ): entropy_aware_opd_loss(student, teacher, labels=MASK, h_max=0.9, temperature=2.0),
        SDPOOptions(wrapper="entropy_opd", entropy_opd_mode="paper"): entropy_aware_opd_loss(
            student, teacher, labels=MASK, mode="paper"
        ),
    }
    for options, loss in expected.items():
        torch.testing.assert_close(sdpo_loss(student, teacher, MASK, options).loss, loss)


def test_sdpo_counts_what_it_did() -> None:
    student, teacher = logits()
    found = sdpo_loss(student, teacher, MASK, SDPOOptions(token_clip=0.05))
    assert (found.active, found.tokens, found.skipped, found.idle) == (4, 4, 1, None)
    assert found.metrics["clipped"] == 1.0


def test_sdpo_with_an_empty_mask_says_so() -> None:
    student, teacher = logits()
    found = sdpo_loss(student, teacher, torch.zeros_like(MASK))
    assert found.idle == "its mask marks no token"
    assert (found.active, found.skipped) == (0, 3)
    assert torch.equal(found.loss, torch.zeros(()))


def test_sdpo_gradient_stays_on_masked_tokens() -> None:
    student, teacher = logits()
    (gradient,) = torch.autograd.grad(sdpo_loss(student, teacher, MASK).loss, student)
    assert ((gradient.abs().sum(-1) > 0).long() == MASK).all()


def test_sdpo_pairs_the_same_tokens_at_other_positions() -> None:
    """The hint makes the teacher's sequence longer; the answer is the same."""
    student, teacher = logits()
    longer = torch.randn(3, 7, 6)
    places = torch.zeros(3, 7, dtype=torch.long)
    for row, columns in enumerate([(4, 6), (), (0, 5)]):
        for column, own in zip(columns, MASK[row].nonzero().flatten(), strict=True):
            longer[row, column] = teacher[row, own]
            places[row, column] = 1
    with blocks_of(6):
        apart = sdpo_loss(student, longer, places, student_mask=MASK)
    together = sdpo_loss(student, teacher, MASK)
    assert torch.equal(apart.loss, together.loss)
    assert torch.equal(
        *(torch.autograd.grad(found.loss, student)[0] for found in (apart, together))
    )


def test_num_items_replaces_the_count() -> None:
    """Micro-batches of unequal size add up to the whole batch's mean."""
    student, teacher = logits()
    whole = sdpo_loss(student, teacher, MASK).loss
    parts = [
        sdpo_loss(student[i : i + 1], teacher[i : i + 1], MASK[i : i + 1], num_items=4)
        for i in (0, 2)
    ]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole)


@pytest.mark.parametrize(
    ("mask", "student_mask", "message"),
    [
        (MASK[:, 1:], None, r"the mask has shape \(3, 3\)"),
        (MASK[:2], None, r"the mask has shape \(2, 4\)"),
        (MASK.unsqueeze(-1), None, "the mask has shape"),
        (MASK, MASK[:, 1:], "the student's mask has shape"),
        (MASK, MASK.flip(0), r"mark \[2, 0, 2\]|the masks mark"),
    ],
)
def test_sdpo_refuses_masks_that_do_not_fit(
    mask: Tensor, student_mask: Tensor | None, message: str
) -> None:
    student, teacher = logits()
    if student_mask is not None and student_mask.shape == MASK.shape:
        student_mask = torch.ones_like(MASK)
    with pytest.raises(ValueError, match=message):
        sdpo_loss(student, teacher, mask, student_mask=student_mask)


def test_sdpo_refuses_unaligned_sequences_and_vocabularies() -> None:
    student, teacher = logits()
    with pytest.raises(ValueError, match=r"cover \(3, 4\) positions, the teacher's \(3, 3\)"):
        sdpo_loss(student, teacher[:, 1:], MASK[:, 1:])
    with pytest.raises(ValueError, match="vocabulary has 6 entries, the teacher's 5"):
        sdpo_loss(student, teacher[..., 1:], MASK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"wrapper": "opsd"}, "sdpo_wrapper is 'opsd'"),
        ({"wrapper": "taid"}, "needs taid_t"),
        ({"wrapper": "taid", "taid_t": 1.2}, "t is 1.2"),
        ({"wrapper": "taid", "taid_t": 0.5, "jsd_beta": 7.0}, "sdpo_jsd_beta is 7.0"),
        ({"wrapper": "taid", "taid_t": 0.5, "temperature": -1.0}, "sdpo_temperature is -1.0"),
        ({"taid_t": 0.3}, "sdpo_wrapper='none' does not read it"),
        ({"entropy_opd_mode": "hard"}, "entropy_opd_mode is 'hard'"),
        ({"entropy_opd_h_max": -3.0}, "entropy_opd_h_max is -3.0"),
        ({"token_clip": float("inf")}, "sdpo_token_clip is inf"),
        ({"jsd_beta": "0.5"}, "sdpo_jsd_beta is 0.5"),
        ({"wrapper": "entropy_opd", "entropy_opd_mode": "hard"}, "mode is 'hard'"),
        ({"wrapper": "entropy_opd", "entropy_opd_h_max": -1.0}, "h_max is -1.0"),
        ({"jsd_beta": -0.1}, "beta is -0.1"),
        ({"temperature": 0.0}, "sdpo_temperature is 0.0"),
        ({"token_clip": 0.0}, "token_clip is 0.0"),
    ],
)
def test_sdpo_options_refuse_what_cannot_be(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SDPOOptions(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variant": "ipo"}, "dpo_variant is 'ipo'"),
        ({"dpo_beta": 0.0}, "replay_dpo_beta is 0.0"),
        ({"simpo_beta": -2.0}, "simpo_beta is -2.0"),
        ({"simpo_gamma": float("nan")}, "simpo_gamma is nan"),
    ],
)
def test_replay_options_refuse_what_cannot_be(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayOptions(**arguments)  # type: ignore[arg-type]


def pairs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(5)
    chosen = -torch.rand(3, 4, generator=made)
    rejected = -2 * torch.rand(3, 5, generator=made)
    chosen_mask = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0]])
    rejected_mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]])
    return chosen.requires_grad_(True), chosen_mask, rejected.requires_grad_(True), rejected_mask


REFERENCES = {
    "ref_chosen_logprobs": torch.tensor([-1.0, -9.0, -0.2]),
    "ref_rejected_logprobs": torch.tensor([-2.0, -9.0, -0.1]),
}


def test_replay_dpo_leaves_out_pairs_with_an_empty_side() -> None:
    chosen, chosen_mask, rejected, rejected_mask = pairs()
    found = replay_loss(
        chosen, chosen_mask, rejected, rejected_mask, ReplayOptions(dpo_beta=0.3), **REFERENCES
    )
    keep = torch.tensor([0, 2])
    expected = dpo_loss(
        (chosen * chosen_mask).sum(-1)[keep],
        (rejected * rejected_mask).sum(-1)[keep],
        *(reference[keep] for reference in REFERENCES.values()),
        beta=0.3,
    )
    torch.testing.assert_close(found.loss, expected)
    assert (found.active, found.tokens, found.skipped, found.idle) == (2, 8, 1, None)
    (gradient,) = torch.autograd.grad(found.loss, chosen)
    assert (gradient[1] == 0).all()
    assert ((gradient[keep] != 0).long() == chosen_mask[keep]).all()


def test_replay_simpo_ignores_references() -> None:
    chosen, chosen_mask, rejected, rejected_mask = pairs()
    options = ReplayOptions(variant="simpo", simpo_beta=1.5, simpo_gamma=0.2)
    found = replay_loss(chosen, chosen_mask, rejected, rejected_mask, options)
    other = replay_loss(chosen, chosen_mask, rejected, rejected_mask, options, **REFERENCES)
    keep = torch.tensor([0, 2])
    expected = simpo_loss(
        avg_sequence_logprob(chosen, chosen_mask)[keep],
        avg_sequence_logprob(rejected, rejected_mask)[keep],
        beta=1.5,
        gamma=0.2,
    )
    torch.testing.assert_close(found.loss, expected)
    assert torch.equal(found.loss, other.loss)


def test_replay_metrics_are_the_implicit_rewards() -> None:
    chosen, rejected = torch.tensor([[-1.0], [-4.0]]), torch.tensor([[-3.0], [-3.0]])
    ones = torch.ones(2, 1)
    zero = torch.zeros(2)
    found = replay_loss(
        chosen, ones, rejected, ones, ref_chosen_logprobs=zero, ref_rejected_logprobs=zero
    )
    assert found.metrics["margin"].item() == pytest.approx(0.1 * (2 - 1) / 2)
    assert found.metrics["accuracy"].item() == 0.5


def test_replay_without_a_usable_pair_says_so() -> None:
    chosen, chosen_mask, rejected, rejected_mask = pairs()
    found = replay_loss(
        chosen, chosen_mask, rejected, torch.zeros_like(rejected_mask), **REFERENCES
    )
    assert found.idle == "no pair has a response on both sides"
    assert (found.active, found.skipped) == (0, 3)


def test_replay_refuses_what_does_not_fit() -> None:
    chosen, chosen_mask, rejected, rejected_mask = pairs()
    with pytest.raises(ValueError, match="DPO needs the reference"):
        replay_loss(chosen, chosen_mask, rejected, rejected_mask)
    with pytest.raises(ValueError, match=r"dpo_chosen_response_mask has shape \(3, 3\)"):
        replay_loss(chosen, chosen_mask[:, 1:], rejected, rejected_mask, **REFERENCES)
    short = {key: value[:1] for key, value in REFERENCES.items()}
    with pytest.raises(ValueError, match=r"dpo_chosen_ref_logprobs has shape \(1,\), not \(3,\)"):
        replay_loss(chosen, chosen_mask, rejected, rejected_mask, **short)


def test_masks_of_other_values_than_0_and_1_are_refused() -> None:
    """Labels with -100 would mark every token."""
    student, teacher = logits()
    labels = torch.where(MASK == 1, 0, -100)
    values = torch.zeros(MASK.shape)
    for call in (
        lambda: sdpo_loss(student, teacher, labels),
        lambda: sdpo_loss(student, teacher, MASK, student_mask=labels),
        lambda: taid_loss(student, teacher, labels, t=0.5),
        lambda: avg_sequence_logprob(values, labels),
        lambda: replay_loss(values, MASK, values, labels, ReplayOptions(variant="simpo")),
        lambda: token_logprobs(student, MASK, labels),
        lambda: sequence_logprobs(student, MASK, labels),
    ):
        with pytest.raises(ValueError, match="is not a mask of 0 and 1"):
            call()
    # A mask may be bool, or floating.
    whole = sdpo_loss(student, teacher, MASK).loss
    assert torch.equal(sdpo_loss(student, teacher, MASK.bool()).loss, whole)
    assert torch.equal(sdpo_loss(student, teacher, MASK.float()).loss, whole)
