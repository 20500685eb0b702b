"""Boundaries of a device in host memory, in buffers that are kept from step to step.

Owns the buffers: page-locked as far as the budget of page locks goes, plain beyond it. Knows
nothing of steps. Invariant: copies are put on the device's stream that computes, in order, so that
neither a buffer nor the memory of a device tensor is used again before its copy is done.
"""

from __future__ import annotations

from torch import Tensor

from trainer.device import Device
from trainer.placement import Put, whole_pages


class HostShelf:
    """Tensors of a device in host memory."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[int, list[Tensor]] = {}

    def put(self, tensor: Tensor) -> Put:
        """Copy a tensor to a free buffer, or to a new one."""
        put = Put(place=self._buffer(tensor.nbytes), shape=tensor.shape, dtype=tensor.dtype)
        _seen_as(put).copy_(tensor, non_blocking=True)
        return put

    def get(self, put: Put) -> Tensor:
        """Give a copy on the device."""
        return _seen_as(put).to(self._device.torch_device, non_blocking=True, copy=True)

    def drop(self, put: Put) -> None:
        """Keep the buffer for what comes next."""
        assert isinstance(put.place, Tensor), "another shelf's"
        self._free.setdefault(put.place.nbytes, []).append(put.place)

    def _buffer(self, size: int) -> Tensor:
        size = whole_pages(size)
        free = self._free.get(size)
        if free:
            return free.pop()
        return self._device.host_buffer(size, "boundary activations")


def _seen_as(put: Put) -> Tensor:
    assert isinstance(put.place, Tensor), "another shelf's"
    return put.place[: put.bytes].view(put.dtype).view(put.shape)
