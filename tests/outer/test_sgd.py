"""The outer optimizer: torch's SGD, in bits that do not depend on the machine."""

from __future__ import annotations

import pytest
import torch
from processors import output_on

from diloco_cloud.outer import OuterSGD

STEPS = """
import sys, numpy, torch
from diloco_cloud.exchange.layout import digest_tensors
from diloco_cloud.outer import OuterSGD
draw = numpy.random.default_rng(0)
parameter = torch.nn.Parameter(torch.from_numpy(draw.standard_normal(10_000, "f")))
kind = OuterSGD if sys.argv[1] == "ours" else torch.optim.SGD
optimizer = kind([parameter], lr=0.7, momentum=0.9, nesterov=True)
for _ in range(5):
    parameter.grad = torch.from_numpy(draw.standard_normal(10_000, "f"))
    optimizer.step()
print(digest_tensors([parameter.detach()]))
"""


def test_bits_do_not_depend_on_the_kind_of_cpu() -> None:
    assert output_on("default", STEPS, "ours") == output_on("avx2", STEPS, "ours")


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.7, "momentum": 0.9, "nesterov": True},
        {"lr": 0.7, "momentum": 0.9, "nesterov": False},
        {"lr": 1.0, "momentum": 0.0, "nesterov": False},
    ],
    ids=str,
)
def test_it_is_torchs_sgd_but_for_the_last_bits(settings: dict[str, float]) -> None:
    torch.manual_seed(0)
    start = torch.randn(1000)
    mine, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    ours, torchs = OuterSGD([mine], **settings), torch.optim.SGD([theirs], **settings)
    for _ in range(10):
        mine.grad = theirs.grad = torch.randn(1000)
        ours.step()
        torchs.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_momentum_buffers_are_stored_as_torchs_are() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = OuterSGD([parameter], lr=0.5, momentum=0.9, nesterov=True)
    parameter.grad = torch.full((3,), 2.0)
    optimizer.step()
    (entry,) = optimizer.state_dict()["state"].values()
    assert torch.equal(entry["momentum_buffer"], torch.full((3,), 2.0))
    # 1 - 0.5 (2 + 0.9 * 2)
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -0.9))
