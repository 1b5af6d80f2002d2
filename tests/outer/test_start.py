"""A run that begins with given weights."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from replicas import Job, TinyNet, build, inner_optimizer
from safetensors.torch import save

from diloco_cloud.errors import ConfigError, CorruptError, LayoutMismatchError
from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.outer import MockManager, make_diloco_outer_loop
from diloco_cloud.outer.result import export
from diloco_cloud.outer.state import FragmentState
from diloco_cloud.store import open_store


def weights_file(where: Path) -> str:
    torch.manual_seed(42)
    tensors = TinyNet().state_dict() | {"something.else": torch.zeros(1)}
    path = where / "model.safetensors"
    path.write_bytes(save(tensors))
    return str(path)


def begin(name: str, rank: int, init_from: str, job: Job) -> MockManager:
    door = ObjectStoreAllReduce(
        f"memory://{name}", rank, job.world_size, timeout_s=30, poll_interval_s=0.02
    )
    manager = MockManager(door, init_from=init_from)
    model, fragments = build(job, seed=rank)
    make_diloco_outer_loop(
        manager, fragments, inner_optimizer(model), sync_every=job.sync_every, model=model
    )
    return manager


@pytest.mark.parametrize("job", [Job(), Job(fragments=3), Job(dtype=torch.bfloat16)], ids=str)
def test_every_replica_begins_with_the_weights_of_the_file(tmp_path: Path, job: Job) -> None:
    uri, name = weights_file(tmp_path), uuid.uuid4().hex
    torch.manual_seed(42)
    expected = dict(TinyNet().named_parameters())
    with ThreadPoolExecutor(2) as pool:
        managers = list(pool.map(lambda r: begin(name, r, uri, job), range(2)))
    for manager in managers:
        for state in manager.fragments.states():
            for own, parameter in zip(state.names, state.parameters, strict=True):
                assert parameter.dtype == job.dtype
                assert torch.equal(parameter, expected[own].detach().to(job.dtype))


def test_a_run_begins_with_the_newest_result_of_another(tmp_path: Path) -> None:
    job, run = Job(world_size=1), open_store(str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="does not exist"):
        begin(uuid.uuid4().hex, 0, f"{tmp_path}/run/result/", job)
    for round_ in (3, 4):
        model = TinyNet()
        named = dict(model.named_parameters())
        states = [FragmentState("f", tuple(named), tuple(p.detach() for p in named.values()), {})]
        export(run, states, round_=round_, step=round_)
    manager = begin(uuid.uuid4().hex, 0, f"{tmp_path}/run/result/", job)
    for state in manager.fragments.states():
        for own, parameter in zip(state.names, state.parameters, strict=True):
            assert torch.equal(parameter, named[own].detach())


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    job = Job(world_size=1)
    with pytest.raises(ConfigError, match="does not exist"):
        begin(uuid.uuid4().hex, 0, str(tmp_path / "none.safetensors"), job)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"not weights")
    with pytest.raises(CorruptError, match="not a safetensors file"):
        begin(uuid.uuid4().hex, 0, str(path), job)
    path.write_bytes(save({"a.weight": torch.zeros(3, 3)}))
    with pytest.raises(LayoutMismatchError, match=r"a\.weight is \(32, 8\) here and \(3, 3\)"):
        begin(uuid.uuid4().hex, 0, str(path), job)
    path.write_bytes(save({"a.weight": torch.zeros(32, 8)}))
    with pytest.raises(LayoutMismatchError, match=r"a\.bias .* missing"):
        begin(uuid.uuid4().hex, 0, str(path), job)
