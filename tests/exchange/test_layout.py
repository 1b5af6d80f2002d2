"""Packing tensors of any floating dtype into one run of bytes."""

from __future__ import annotations

import pytest
import torch

from diloco_cloud.exchange.layout import TensorLayout, byte_view, digest_tensors


def some_tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(3, 5).bfloat16(),
        torch.randn(7),
        torch.tensor(2.5),
        torch.randn(2, 2).half(),
        torch.empty(0, 4),
        torch.randn(3).double(),
    ]


def pack(layout: TensorLayout, tensors: list[torch.Tensor]) -> torch.Tensor:
    data = bytearray(b"".join(layout.views(tensors)))
    return torch.frombuffer(data, dtype=torch.uint8)


def test_layout_round_trips_every_dtype_and_shape() -> None:
    tensors = some_tensors()
    layout = TensorLayout.of(tensors)
    payload = pack(layout, tensors)
    assert len(payload) == layout.nbytes == sum(t.nbytes for t in tensors)
    for before, after in zip(tensors, layout.unpack(payload), strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(after, before)


def test_layout_covers_every_byte_with_aligned_segments() -> None:
    layout = TensorLayout.of(some_tensors())
    at = 0
    for segment in layout.segments:
        assert segment.start == at
        assert segment.start % segment.dtype.itemsize == 0
        at = segment.stop
    assert at == layout.nbytes
    assert sum(s.numel for s in layout.segments) == layout.numel


def test_views_share_memory_with_contiguous_tensors() -> None:
    tensor = torch.zeros(4)
    (view,) = TensorLayout.of([tensor]).views([tensor])
    tensor[1] = 1.0
    assert bytes(view[4:8]) == b"\x00\x00\x80\x3f"


def test_views_of_a_transposed_tensor_are_in_logical_order() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    assert bytes(byte_view(tensor)) == bytes(byte_view(tensor.contiguous()))


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ([torch.zeros(2, 3)], ["b"]),
        ([torch.zeros(3, 2)], ["a"]),
        ([torch.zeros(2, 3).half()], ["a"]),
        ([torch.zeros(2, 3), torch.zeros(1)], ["a", "b"]),
    ],
)
def test_digest_tells_names_shapes_and_dtypes_apart(
    other: list[torch.Tensor], names: list[str]
) -> None:
    assert (
        TensorLayout.of(other, names).digest != TensorLayout.of([torch.zeros(2, 3)], ["a"]).digest
    )


def test_layout_refuses_what_cannot_be_averaged() -> None:
    with pytest.raises(TypeError, match=r"'1' is torch\.int64"):
        TensorLayout.of([torch.zeros(1), torch.zeros(1, dtype=torch.int64)])
    with pytest.raises(ValueError, match="empty"):
        TensorLayout.of([])
    with pytest.raises(ValueError, match="2 tensors have 1 names"):
        TensorLayout.of([torch.zeros(1), torch.zeros(1)], ["a"])


def test_digest_of_tensors_sees_one_bit() -> None:
    tensors = some_tensors()
    before = digest_tensors(tensors)
    tensors[1].view(torch.int32)[3] ^= 1
    assert digest_tensors(tensors) != before
