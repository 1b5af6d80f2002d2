"""The losses against those that others published: recorded figures, and TRL's own kernels.

``goldens/upstream_losses.json`` holds what the authors' code of TAID (SakanaAI/TAID at a062892)
and of OPSD (siyan-zhao/OPSD at 590ec26) gave on the inputs below: losses and gradients.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco_cloud.composer import (
    TAIDScheduler,
    fused_jsd_loss,
    generalized_jsd_loss,
    simpo_loss,
    taid_loss,
    token_logprobs,
)

GOLDENS: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "goldens" / "upstream_losses.json").read_text()
)
MASK = torch.tensor([[1, 0, 1], [1, 1, 0]])


def inputs() -> tuple[Tensor, Tensor]:
    """(2, 3, 5) student and teacher logits that need no random numbers."""
    n = torch.arange(30, dtype=torch.float32).view(2, 3, 5)
    return 2 * torch.sin(1.3 * n), 3 * torch.cos(0.7 * n + 0.2)


def assert_recorded(loss: Tensor, student: Tensor, recorded: dict[str, Any]) -> None:
    (gradient,) = torch.autograd.grad(loss, student)
    wanted = torch.tensor(recorded["grad"]).view_as(gradient)
    torch.testing.assert_close(loss, torch.tensor(recorded["loss"]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recorded", GOLDENS["taid"], ids=lambda r: f"{r['t']}-{r['masked']}")
def test_taid_equals_the_authors_code(recorded: dict[str, Any]) -> None:
    student, teacher = inputs()
    student.requires_grad_(True)
    loss = taid_loss(student, teacher, MASK if recorded["masked"] else None, t=recorded["t"])
    assert_recorded(loss, student, recorded)


def test_jsd_equals_opsds_code() -> None:
    assert len(GOLDENS["opsd"]) > 50
    for recorded in GOLDENS["opsd"]:
        student, teacher = inputs()
        if recorded["probs"]:
            student, teacher = student.softmax(-1), teacher.softmax(-1)
        student.requires_grad_(True)
        loss = generalized_jsd_loss(
            student,
            teacher,
            torch.where(MASK == 1, 7, -100) if recorded["masked"] else None,
            recorded["beta"],
            recorded["temperature"],
            recorded["reduction"],
            recorded["probs"],
            recorded["top_k"],
        )
        assert_recorded(loss, student, recorded)


@pytest.mark.parametrize("recorded", GOLDENS["schedule"], ids=["adaptive", "linear"])
def test_schedule_equals_the_authors_code(recorded: dict[str, Any]) -> None:
    schedule = TAIDScheduler(
        recorded["steps"],
        alpha=recorded["alpha"],
        beta=recorded["beta"],
        disable_adaptive=not recorded["adaptive"],
    )
    ts, increments = [], []
    for step, loss in enumerate(recorded["losses"]):
        increment = schedule.update_t(torch.tensor(loss), step)
        increments.append(None if increment is None else increment.item())
        ts.append(schedule.t)
    assert ts == pytest.approx(recorded["t"], abs=1e-6)
    assert increments[0] is None
    assert increments[1:] == pytest.approx(recorded["increment"][1:], abs=1e-6)


@pytest.fixture
def silent_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.mark.usefixtures("silent_trl")
@pytest.mark.parametrize("beta", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("reduction", ["batchmean", "sum"])
@pytest.mark.parametrize("masked", [False, True])
def test_jsd_equals_trls_kernel(
    beta: float, temperature: float, reduction: str, masked: bool
) -> None:
    from trl.experimental.gkd import GKDTrainer

    student, teacher = torch.randn(2, 3, 17), torch.randn(2, 3, 17)
    student.requires_grad_(True)
    labels = torch.where(MASK == 1, 7, -100) if masked else None
    arguments = (student, teacher, labels, beta, temperature, reduction)
    ours = generalized_jsd_loss(*arguments)
    theirs = GKDTrainer.generalized_jsd_loss(*arguments)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(ours, student),
        torch.autograd.grad(theirs, student),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_fused_jsd_equals_trls_chunked_divergence(beta: float) -> None:
    from trl.kernels import chunked_divergence

    head, other = nn.Linear(6, 23), nn.Linear(7, 23)
    student, teacher = torch.randn(1, 5, 6, requires_grad=True), torch.randn(1, 5, 7)
    ours = fused_jsd_loss(student, teacher, head, beta=beta, temperature=0.8, teacher_lm_head=other)
    weights = (head.weight, head.bias, teacher[0], other.weight.detach(), other.bias.detach())
    theirs, _ = chunked_divergence.ChunkedDivergenceFunction.apply(student[0], *weights, beta, 0.8)
    torch.testing.assert_close(ours, theirs.mean(), rtol=1e-5, atol=1e-5)
    wanted = [student, head.weight, head.bias]
    torch.testing.assert_close(
        torch.autograd.grad(ours, wanted),
        torch.autograd.grad(theirs.mean(), wanted),
        rtol=1e-5,
        atol=1e-5,
    )


def test_token_logprobs_equal_trls_selective_log_softmax() -> None:
    from trl.trainer.utils import selective_log_softmax

    logits, ids = torch.randn(2, 5, 31, requires_grad=True), torch.randint(31, (2, 5))
    ours, theirs = token_logprobs(logits, ids), selective_log_softmax(logits, ids)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), logits), torch.autograd.grad(theirs.sum(), logits)
    )


@pytest.mark.usefixtures("silent_trl")
def test_simpo_equals_trls() -> None:
    from trl.experimental.cpo import CPOTrainer

    chosen, rejected = torch.randn(2, 6)
    settings = SimpleNamespace(
        alpha=0.0,
        beta=2.5,
        simpo_gamma=0.7,
        loss_type="simpo",
        label_smoothing=0.0,
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )
    theirs, _, _ = CPOTrainer.cpo_loss(settings, chosen, rejected)
    torch.testing.assert_close(simpo_loss(chosen, rejected, beta=2.5, gamma=0.7), theirs.mean())
