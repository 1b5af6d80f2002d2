"""Tensors' way to the host and back; what needs an accelerator is tried where there is one."""

from __future__ import annotations

import pytest
import torch

from diloco_cloud.exchange.host import HostCopies, to_host, write_back

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def test_what_is_on_the_host_is_not_copied() -> None:
    tensor = torch.randn(3, 4, requires_grad=True)
    (host,) = to_host([tensor])
    assert host.data_ptr() == tensor.data_ptr()
    assert not host.requires_grad


def test_a_strided_tensor_becomes_contiguous() -> None:
    tensor = torch.randn(3, 4).t()
    (host,) = to_host([tensor])
    assert host.is_contiguous()
    assert torch.equal(host, tensor)


def test_values_are_written_into_the_tensors_themselves() -> None:
    tensors = [torch.zeros(4, 3).t(), torch.zeros(2, dtype=torch.bfloat16)]
    values = [torch.randn(3, 4), torch.tensor([1.0, 2.0], dtype=torch.bfloat16)]
    write_back(tensors, values)
    assert all(map(torch.equal, tensors, values))


def test_as_many_values_as_tensors_are_needed() -> None:
    with pytest.raises(ValueError, match="zip"):
        write_back([torch.zeros(1)], [])


@cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_has_what_the_stream_was_to_compute(dtype: torch.dtype) -> None:
    copies = HostCopies()
    factor = torch.randn(2000, 2000, device="cuda")
    result = (factor @ factor @ factor).to(dtype)  # still under way when it is to be copied
    host = copies.add(result)
    assert host.is_pinned()
    later = torch.zeros_like(result)  # given to the stream after it
    copies.wait()
    assert torch.equal(host, result.cpu())
    assert not later.any()


@cuda
def test_a_tensor_that_is_freed_while_it_is_copied_is_copied_whole() -> None:
    copies = HostCopies()
    tensor = torch.full((64, 2**20), 3.0, device="cuda")
    host = copies.add(tensor)
    del tensor
    torch.full((64, 2**20), 5.0, device="cuda")  # would take its memory
    copies.wait()
    assert torch.equal(host, torch.full((64, 2**20), 3.0))


@cuda
def test_means_come_back_in_the_order_of_the_stream() -> None:
    tensor = torch.zeros(2**20, device="cuda")
    (host,) = to_host([tensor + 1.0])
    write_back([tensor], [host])
    doubled = tensor * 2
    del host
    torch.empty(2**20, pin_memory=True).fill_(9.0)
    assert torch.equal(doubled.cpu(), torch.full((2**20,), 2.0))
