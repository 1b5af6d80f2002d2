"""What torchft would accept in silence, or answer with an assertion, is refused in words."""

from __future__ import annotations

import subprocess
import sys
import uuid
from typing import Any

import pytest
import torch
from replicas import TinyNet
from torch import nn

from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.outer import MockManager, make_diloco_outer_loop
from diloco_cloud.outer.make import unwrap_optimizer
from diloco_cloud.outer.work import _ImmediateWork


def manager(world_size: int = 1) -> MockManager:
    return MockManager(ObjectStoreAllReduce(f"memory://{uuid.uuid4().hex}", 0, world_size))


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync_every": 4}, "multiple of the 3 fragments"),
        ({"sync_every": 0}, "multiple of the 3 fragments"),
        ({"sync_every": 6, "fragment_sync_delay": 2}, "below the 2 inner steps"),
        ({"sync_every": 6, "fragment_sync_delay": -1}, "at least 0"),
        ({"sync_every": 6, "fragment_update_alpha": 1.5}, "between 0 and 1"),
    ],
)
def test_impossible_schedules_are_refused(settings: dict[str, Any], message: str) -> None:
    net = TinyNet()
    with pytest.raises(ValueError, match=message):
        make_diloco_outer_loop(manager(), [net.a, net.b, net.c], sgd(net), **settings)


def test_a_trained_parameter_outside_every_fragment_is_refused() -> None:
    net = TinyNet()
    with pytest.raises(ValueError, match=r"2 trained parameters .* never be synchronised"):
        make_diloco_outer_loop(manager(), [net.a, net.b], sgd(net), sync_every=2)


def test_tied_weights_in_two_fragments_are_refused() -> None:
    net = TinyNet()
    net.b.bias = net.c.weight = nn.Parameter(torch.zeros(16))
    with pytest.raises(ValueError, match=r"fragments 1 and 2 .*one fragment"):
        make_diloco_outer_loop(manager(), [net.a, net.b, net.c], sgd(net), sync_every=3)


def test_a_fragment_without_trainable_parameters_is_refused() -> None:
    net = TinyNet()
    net.b.requires_grad_(False)
    with pytest.raises(ValueError, match="fragment 1 has no trainable parameters"):
        make_diloco_outer_loop(manager(), [net.a, net.b, net.c], sgd(net), sync_every=3)
    with pytest.raises(ValueError, match="no model fragment"):
        make_diloco_outer_loop(manager(), [], sgd(net))


def test_frozen_parameters_take_no_part() -> None:
    net = TinyNet()
    net.a.requires_grad_(False)
    mine = manager()
    make_diloco_outer_loop(mine, [net], sgd(net))
    assert mine.fragments.states()[0].names == ("b.weight", "b.bias", "c.weight", "c.bias")


def test_a_bare_module_is_one_fragment() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mine = manager()
    make_diloco_outer_loop(mine, net, sgd(net))
    assert len(mine.fragments) == 1


def test_running_statistics_are_pointed_out() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.warns(UserWarning, match="running statistics of 1 are not exchanged"):
        make_diloco_outer_loop(manager(), [net], sgd(net))


def test_bucketization_stays_off_whatever_the_environment(monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCHFT_USE_BUCKETIZATION", "True")
    net = TinyNet()
    outer = make_diloco_outer_loop(manager(), [net], sgd(net))
    assert [f.use_bucketization for f in outer._fragments] == [False]


def test_each_fragment_has_an_outer_optimizer_of_its_own() -> None:
    net = TinyNet()
    outer = make_diloco_outer_loop(manager(), [net.a, net.b, net.c], sgd(net), sync_every=3)
    owned = [
        {id(p) for g in f._outer_optimizer.param_groups for p in g["params"]}
        for f in outer._fragments
    ]
    assert [len(ids) for ids in owned] == [2, 2, 2]
    assert not (owned[0] & owned[1] | owned[1] & owned[2])


def test_accelerates_optimizer_is_looked_through() -> None:
    from accelerate import Accelerator

    inner = sgd(TinyNet())
    assert unwrap_optimizer(Accelerator(cpu=True).prepare(inner)) is inner
    with pytest.raises(TypeError, match="int is not a torch optimizer"):
        unwrap_optimizer(3)


def test_manager_has_torchfts_shape() -> None:
    mine = manager()
    assert mine._use_async_quorum is False
    assert (mine.rank, mine.num_participants(), mine.current_step()) == (0, 1, 0)
    assert mine.is_leader()
    mine.register_state_dict_fn("k", lambda _: None, dict)
    with pytest.raises(AssertionError):
        mine.register_state_dict_fn("k", lambda _: None, dict)
    assert mine.wait_quorum() is None


def test_manager_accepts_what_newer_torchfts_may_pass() -> None:
    mine = manager()
    mine.start_quorum()
    assert mine.allreduce(torch.ones(1), should_quantize=False, reduce_op="avg").wait()
    assert mine.should_commit()


def test_manager_refuses_what_it_would_have_to_ignore() -> None:
    with pytest.raises(ValueError, match="should_quantize"):
        manager().allreduce(torch.ones(1), should_quantize=True)
    with pytest.raises(TypeError, match="needs an ObjectStoreAllReduce"):
        MockManager()


def test_step_advances_on_commit_only() -> None:
    mine = manager()
    mine.start_quorum()
    work = mine.allreduce(torch.full((2,), float("nan")))
    assert mine.current_step() == 0
    work.wait()
    assert mine.should_commit() is False
    assert (mine.current_step(), mine.current_round()) == (0, 1)
    mine.start_quorum()
    tensor = torch.full((2,), 3.0)
    mine.allreduce(tensor).wait()
    assert mine.should_commit() is True
    assert (mine.current_step(), mine.current_round()) == (1, 2)
    assert torch.equal(tensor, torch.full((2,), 3.0))
    mine.shutdown()


def test_immediate_work_runs_its_callbacks_before_wait_returns() -> None:
    seen: list[str] = []
    work = _ImmediateWork(lambda: seen.append("finish"))
    work.get_future().then(lambda _: seen.append("then"))
    assert work.wait() is True
    assert seen == ["finish", "then"]
    work.get_future().then(lambda _: seen.append("late"))
    assert seen[-1] == "late"
    assert work.wait() is True
    assert seen.count("finish") == 1
    assert _ImmediateWork().get_future().done()


def test_without_torchft_the_package_says_what_to_install() -> None:
    code = """
import sys
sys.modules["torchft"] = None
sys.modules["torchft.local_sgd"] = None
import diloco_cloud, torch
assert diloco_cloud._DILOCO_AVAILABLE is False
assert diloco_cloud.make_diloco_outer_loop is None
from diloco_cloud import outer
assert outer.DiLoCo is None and outer.Manager is None and outer._TORCHFT_AVAILABLE is False
net = torch.nn.Linear(1, 1)
try:
    outer.make_diloco_outer_loop(None, [net], torch.optim.SGD(net.parameters()))
except RuntimeError as error:
    assert "pip install 'diloco-cloud[diloco]'" in str(error), error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
