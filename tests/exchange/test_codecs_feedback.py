"""Residuals, and chunks of real layouts."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from codec_values import values_of

from diloco_cloud.errors import CorruptError
from diloco_cloud.exchange.codecs import get_codec
from diloco_cloud.exchange.codecs.chunks import Chunks, encode, settle
from diloco_cloud.exchange.codecs.feedback import Feedback
from diloco_cloud.exchange.layout import TensorLayout, byte_view
from diloco_cloud.exchange.rounds import RoundExchange
from diloco_cloud.exchange.work import Work
from diloco_cloud.store.memory import MemoryStore

CODECS = ["fp32", "bf16", "int8", "e3m0", "e2m1", "sparse"]


# -- chunks ----------------------------------------------------------------------------------------


class _Payload:
    """Tensors of every dtype as one raw payload, read chunk by chunk."""

    def __init__(self, chunk_bytes: int) -> None:
        sizes = [(torch.float32, 3000), (torch.bfloat16, 777), (torch.float64, 50)]
        sizes += [(torch.float16, 31), (torch.float32, 0), (torch.float32, 5)]
        self.tensors = [
            values_of("gaussian", numel, seed).to(dtype)
            for seed, (dtype, numel) in enumerate(sizes)
        ]
        self.chunks = Chunks(TensorLayout.of(self.tensors), chunk_bytes)
        ordered = [self.tensors[i] for i in self.chunks.layout.order]
        self.flat = torch.cat([t.float() for t in ordered])
        self.raw = torch.frombuffer(
            bytearray(b"".join(byte_view(t) for t in ordered)), dtype=torch.uint8
        )

    def read(self, chunk: int) -> torch.Tensor:
        start, stop = self.chunks.span(chunk)
        return self.raw[start:stop]


@pytest.mark.parametrize("chunk_bytes", [64, 200, 4096, 2**20])
def test_chunks_cover_every_element_once(chunk_bytes: int) -> None:
    payload = _Payload(chunk_bytes)
    chunks = payload.chunks
    spans = [chunks.elements(k) for k in range(len(chunks))]
    assert [low for low, _ in spans] == [0, *(high for _, high in spans[:-1])]
    assert spans[-1][1] == chunks.layout.numel
    for k, (low, high) in enumerate(spans):
        assert chunks.numel(k) == high - low
        assert torch.equal(chunks.values(k, payload.read(k)), payload.flat[low:high])


def test_chunks_are_written_back_in_every_dtype() -> None:
    payload = _Payload(200)
    out = torch.zeros_like(payload.raw)
    for k in range(len(payload.chunks)):
        payload.chunks.write(k, payload.chunks.values(k, payload.read(k)) * 2, out)
    for doubled, tensor in zip(payload.chunks.layout.unpack(out), payload.tensors, strict=True):
        expected = (tensor.float() * 2).to(tensor.dtype)
        assert torch.equal(doubled, expected)


@pytest.mark.parametrize("name", CODECS)
def test_chunks_are_encoded_alike_one_by_one_or_together(name: str) -> None:
    codec, payload, feedback = get_codec(name), _Payload(200), Feedback(3863, 0.9)
    feedback.residual.copy_(values_of("heavy", 3863))
    alone = encode(codec, payload.chunks, payload.read, feedback)
    with ThreadPoolExecutor(4) as pool:
        assert encode(codec, payload.chunks, payload.read, feedback, pool) == alone
    for k, data in enumerate(alone):
        low, high = payload.chunks.elements(k)
        total = feedback.residual[low:high] * 0.9 + payload.flat[low:high]
        assert data == codec.encode(total)


# -- residuals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
def test_residual_and_what_was_sent_are_all_there_was(name: str) -> None:
    codec, payload = get_codec(name), _Payload(1024)
    feedback = Feedback(payload.chunks.layout.numel, 0.95)
    together = Feedback(payload.chunks.layout.numel, 0.95)
    for _ in range(3):
        before = feedback.residual.clone()
        data = encode(codec, payload.chunks, payload.read, feedback)
        assert torch.equal(feedback.residual, before)
        settle(codec, payload.chunks, payload.read, data, feedback)
        sent = [codec.decode(d, payload.chunks.numel(k)) for k, d in enumerate(data)]
        assert torch.equal(feedback.residual, before * 0.95 + payload.flat - torch.cat(sent))
        with ThreadPoolExecutor(4) as pool:
            settle(codec, payload.chunks, payload.read, data, together, pool)
        assert torch.equal(together.residual, feedback.residual)


def test_means_in_the_tensors_place_leave_the_same_residuals() -> None:
    """Chunks are settled one by one, just before the mean overwrites them."""

    def rounds(*, in_place: bool) -> list[torch.Tensor]:
        name = uuid.uuid4().hex
        owns = [RoundExchange(MemoryStore(name), "run", rank, 2) for rank in range(2)]
        found = []
        for round_ in range(3):

            def work(own: RoundExchange, round_: int = round_) -> list[torch.Tensor]:
                own.codec, own.chunk_bytes, own.poll_interval_s = "sparse", 16384, 0.02
                own.contributing.overwrites_from = 0
                values = [values_of("heavy", 30_000) * (1 + own.rank + round_)]
                result = own.exchange(round_, 0, values, Work(tokens=1), in_place=in_place)
                assert result.tensors is not None
                assert (result.tensors[0].data_ptr() == values[0].data_ptr()) is in_place
                return [*result.tensors, own.contributing.residuals.tensors()[0].clone()]

            with ThreadPoolExecutor(2) as pool:
                found += [tensor for tensors in pool.map(work, owns) for tensor in tensors]
        return found

    assert all(map(torch.equal, rounds(in_place=True), rounds(in_place=False)))


def test_residual_sends_everything_in_the_end() -> None:
    """A constant update of which one sixty-fourth fits is all sent after enough rounds."""
    codec, delta, feedback = get_codec("sparse"), values_of("gaussian", 4096), Feedback(4096, 1.0)
    total = torch.zeros(4096)
    for _ in range(600):
        data = codec.encode(feedback.added_to(delta, 0))
        feedback.settle(delta, 0, codec, data)
        total += codec.decode(data, 4096)
    assert float((total / 600 - delta).norm() / delta.norm()) < 0.1


def test_residual_stays_finite_where_sums_overflow() -> None:
    codec, feedback = get_codec("fp32"), Feedback(2, 1.0)
    feedback.residual.fill_(3e38)
    feedback.settle(torch.tensor([3e38, 1.0]), 0, codec, codec.encode(torch.zeros(2)))
    assert feedback.residual.tolist() == [0, torch.tensor(3e38).item()]


def test_residual_is_restored() -> None:
    feedback = Feedback(100, 0.95)
    stored = values_of("gaussian", 100)
    feedback.load(stored)
    stored.zero_()
    assert torch.equal(feedback.residual, values_of("gaussian", 100))


@pytest.mark.parametrize(
    "stored", [torch.zeros(99), torch.zeros(100).double(), torch.full((100,), float("nan"))]
)
def test_residual_of_something_else_is_refused(stored: torch.Tensor) -> None:
    feedback = Feedback(100, 0.95)
    with pytest.raises(CorruptError):
        feedback.load(stored)
    assert not feedback.residual.any()
