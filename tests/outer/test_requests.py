"""What a sync costs the store: objects and requests, counted."""

from __future__ import annotations

import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from diloco_cloud.exchange.allreduce import ObjectStoreAllReduce
from diloco_cloud.outer import MockManager, make_diloco_outer_loop
from diloco_cloud.store import open_store


def qwen2_with_290_tensors() -> nn.Module:
    """The tensors of Qwen2.5-0.5B (24 layers, tied head), each as small as can be."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=16,
        hidden_size=4,
        intermediate_size=8,
        num_hidden_layers=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


@pytest.mark.parametrize(
    ("build", "tensors"), [(lambda: nn.Linear(2, 2), 2), (qwen2_with_290_tensors, 290)]
)
def test_a_sync_is_one_object_and_as_many_requests_whatever_the_tensors(
    build: object, tensors: int
) -> None:
    uri = f"memory://{uuid.uuid4().hex}"
    torch.manual_seed(0)
    models: list[nn.Module] = [build(), build()]  # type: ignore[operator]
    assert [len(list(m.parameters())) for m in models] == [tensors, tensors]

    def sync(rank: int) -> Counter[str]:
        door = ObjectStoreAllReduce(uri, rank, 2, timeout_s=30, poll_interval_s=0.02)
        manager = MockManager(door, snapshot_every=1000)
        model = models[rank]
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = make_diloco_outer_loop(manager, [model], opt, sync_every=1)
        before = door.usage
        with outer:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            opt.step()
        used = (door.usage - before).requests
        manager.shutdown()
        return used

    with ThreadPoolExecutor(2) as pool:
        used = list(pool.map(sync, range(2)))
    puts = [i.key for i in open_store(uri).list("rounds/") if "/put/" in i.key]
    assert puts == ["rounds/00000000.0/put/0000.0000", "rounds/00000000.0/put/0001.0000"]
    for requests in used:
        # Own object, perhaps the commit; the peer's header and its payload's only chunk. Looks at
        # the directory, and reading the commit, depend on who is faster.
        assert 1 <= requests["create"] <= 2
        assert requests["get_range"] == 2
        assert set(requests) <= {"create", "get_range", "list", "get"}
