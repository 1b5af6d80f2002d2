"""The same bits whoever encodes, decodes and averages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from codec_values import values_of
from processors import output_on

from diloco_cloud.exchange.codecs import blocks, get_codec

CODECS = ["fp32", "bf16", "int8", "e3m0", "e2m1", "sparse"]

DIGEST = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from blake3 import blake3
from codec_values import KINDS, values_of
from diloco_cloud.exchange.codecs import get_codec
from diloco_cloud.exchange.codecs.feedback import Feedback

torch.set_num_threads(int(sys.argv[1]))
# torch shares work between threads from 32768 elements on.
SAMPLES = [(kind, 5001) for kind in KINDS] + [("spread", 70_001), ("any bits", 70_001)]
hasher = blake3()
for name in {CODECS}:
    codec = get_codec(name)
    for kind, numel in SAMPLES:
        mean, feedback = codec.mean(numel), Feedback(numel, 0.95)
        for seed, weight in enumerate((1.0, 0.3, 0.7)):
            delta = values_of(kind, numel, seed)
            data = codec.encode(feedback.added_to(delta, 0))
            feedback.settle(delta, 0, codec, data)
            mean.add(data, weight)
            hasher.update(data)
        hasher.update(mean.result().numpy().tobytes())
        hasher.update(feedback.residual.numpy().tobytes())
    print(name, hasher.hexdigest())
"""


def test_codecs_do_not_depend_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = {output_on(torch.backends.cpu.get_cpu_capability().lower(), DIGEST, "2")}
    outputs.add(output_on("avx2", DIGEST, "2"))
    # numpy too, with nothing but what it was built for.
    features = np._core._multiarray_umath.__cpu_features__
    optional = np._core._multiarray_umath.__cpu_dispatch__
    missing = " ".join(name for name in optional if features[name])
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", missing)
    outputs.add(output_on("default", DIGEST, "1"))
    assert len(outputs) == 1


@pytest.mark.parametrize("name", CODECS)
def test_codec_is_used_from_several_threads(name: str) -> None:
    codec = get_codec(name)
    chunks = [values_of("heavy", 20_000 + seed, seed) for seed in range(24)]

    def there_and_back(values: torch.Tensor) -> tuple[bytes, bytes]:
        data = bytes(codec.encode(values))
        return data, codec.decode(data, len(values)).numpy().tobytes()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(there_and_back, chunks)) == list(map(there_and_back, chunks))


@pytest.mark.parametrize("name", ["e3m0", "e2m1", "int8"])
def test_encode_looks_at_some_blocks_at_a_time_and_writes_the_same(name: str) -> None:
    codec, at_once = get_codec(name), blocks.AT_ONCE
    values = torch.randn(at_once + 77, generator=torch.Generator().manual_seed(1))
    whole = bytes(codec.encode(values))
    first, rest = (bytes(codec.encode(part)) for part in (values[:at_once], values[at_once:]))
    cuts = blocks.scale_bytes(at_once), blocks.scale_bytes(77)
    scales, codes = first[: cuts[0]] + rest[: cuts[1]], first[cuts[0] :] + rest[cuts[1] :]
    assert whole == scales + codes
