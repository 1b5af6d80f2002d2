"""The way of tensors from an accelerator to the host and back, beside what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class HostCopies:
    """Copies of tensors on the host.

    A CPU tensor is its own copy. A CUDA tensor goes into page-locked memory on a stream of this
    object's, after what the current stream has been given so far, so that what it is given next
    runs meanwhile. torch keeps page-locked memory for the next round.
    """

    _streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict, init=False)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of ``tensor`` on the host, to be read after :meth:`wait`.

        Args:
            tensor: any device; must not change before :meth:`wait` has returned.
        """
        tensor = tensor.detach()
        if tensor.device.type != "cuda":
            return tensor.cpu().contiguous()
        device = tensor.device
        stream = self._streams.get(device)
        if stream is None:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device] = stream
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            # A strided tensor is first made contiguous there, where that is cheap.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor.contiguous(), non_blocking=True)
        tensor.record_stream(stream)  # whoever frees it does not have its memory used again yet
        return host

    def wait(self) -> None:
        """Block until all copies are whole."""
        for stream in self._streams.values():
            stream.synchronize()


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies of ``tensors`` on the host; those that are there already are themselves."""
    copies = HostCopies()
    found = [copies.add(tensor) for tensor in tensors]
    copies.wait()
    return found


def write_back(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Replace ``tensors``, on any device, by ``values`` on the host.

    On an accelerator it is done in the order of the current stream, which this does not wait for:
    torch keeps page-locked memory until it has been read.
    """
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value, non_blocking=value.is_pinned() if tensor.is_cuda else False)
