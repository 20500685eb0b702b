"""The memory that frozen weights pass through, one stage after the other.

Owns a buffer that is filled again and again, and the check that nobody computes with what was
there before: a lease carries the generation of its slot, and a slot that was given back has
another one. Knows nothing of stages or adapters. Invariants: weights travel one way, nothing is
copied back; a lease that ended gives no tensor any more.

Two further defences: a slot is filled by ordinary in-place copies, so that autograd refuses a graph
that still holds what was overwritten; and with `poison` a slot that is given back holds NaN alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from shardb import torch_adaptor
from shardb.views import ShardView, TensorImage
from trainer.device import ALIGNMENT_BYTES, Device
from trainer.device_lanes import Mark
from trainer.lora.forms import SlotForm, form_of, whole
from trainer.lora.host_base import HostBase

# Every element of these bytes is NaN, in each form of floating point that weights have.
POISON = 0xFF


LookUp = Callable[[Tensor, Tensor], Tensor]


class StaleSlotError(AssertionError):
    """Weights were asked for after their slot was given back: a mistake of this program."""


class Slot:
    """One buffer; `generation` counts how often it was given back, `free` is behind its last use.

    Where nothing runs behind the caller's back there is no such mark.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.generation = 0
        self.is_free = True
        self.free: Mark | None = None

    def give_back(self, *, poison: bool) -> None:
        """End whatever lease there is."""
        self.generation += 1
        self.is_free = True
        if poison:
            self.buffer.fill_(POISON)


class Lease:
    """One stage's weights; slot is None where they are the store's own memory.

    owned: they were made for this lease, by unpacking what lay in a slot. rows_of: looks rows of a
    table in host memory up for a device.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        slot: Slot | None,
        *,
        owned: bool = False,
        rows_of: LookUp | None = None,
    ) -> None:
        self.rows_of = rows_of
        self._tensors = tensors
        self._slot = slot
        self._owned = owned
        self._generation = slot.generation if slot is not None else 0
        self.is_over = False

    def tensors(self) -> Mapping[str, Tensor]:
        """Give the weights by name; StaleSlotError when they are not there any more."""
        slot = self._slot
        if self.is_over or (slot is not None and slot.generation != self._generation):
            raise StaleSlotError("weights were used after their slot was given back")
        return self._tensors

    def end(self, *, poison: bool = False) -> None:
        """Give no tensor any more; with `poison` what was made for this lease is NaN from here."""
        self.is_over = True
        if poison and self._owned:
            for tensor in self._tensors.values():
                tensor.view(torch.uint8).fill_(POISON)


class SlotPool:
    """Brings shards into slots on a device, in the dtype that computes.

    slot_bytes: of the slot that is kept; what is larger gets memory of its own for one lease.
    copies: keeps every shard in the dtype that computes, where the device is the host and there is
    room; none passes through a slot then.
    """

    def __init__(
        self,
        device: Device,
        *,
        slot_bytes: int,
        poison: bool = False,
        copies: HostBase | None = None,
    ) -> None:
        self.poison = poison
        self.filled_bytes = 0
        self._device = device
        self._slot_bytes = slot_bytes
        self._slot: Slot | None = None
        self._copies = copies

    @contextmanager
    def lease(self, view: TensorImage, dtype: torch.dtype | None) -> Iterator[Lease]:
        """Give a shard's tensors for a block, in `dtype`; with None the store's own memory."""
        stored = torch_adaptor.tensors(view)
        ready = stored if self._is_usable(stored, dtype) else self._copied(view)
        if ready is not None:
            found = Lease(ready, None)
            try:
                yield found
            finally:
                found.is_over = True
            return
        form = SlotForm.of(stored, dtype)
        slot = self._free_slot(form.bytes)
        slot.is_free = False
        tensors = form.fill(slot.buffer, stored)
        self.filled_bytes += sum(tensor.nbytes for tensor in tensors.values())
        found = Lease(tensors, slot)
        try:
            yield found
        finally:
            found.is_over = True
            slot.give_back(poison=self.poison)

    def _copied(self, view: TensorImage) -> Mapping[str, Tensor] | None:
        if self._copies is None:
            return None
        assert isinstance(view, ShardView), "a copy is told by its digest"
        shard = self._copies.shard(view)
        return shard.form.tensors(shard.image)

    def _is_usable(self, stored: Mapping[str, Tensor], dtype: torch.dtype | None) -> bool:
        """Say whether what was read needs no slot: it is looked up, or computes as it is."""
        if dtype is None:
            return True
        ready = all(_is_ready(name, tensor, dtype) for name, tensor in stored.items())
        return self._device.is_host and not self.poison and ready

    def _free_slot(self, needed_bytes: int) -> Slot:
        if needed_bytes > self._slot_bytes:
            return Slot(self._memory(needed_bytes))
        if self._slot is None:
            self._slot = Slot(self._memory(self._slot_bytes))
        assert self._slot.is_free, "two leases at once of one slot"
        return self._slot

    def _memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device.torch_device)


def placed_bytes(tensors: Mapping[str, tuple[tuple[int, ...], int]], item_bytes: int) -> int:
    """Give what tensors take in a slot: shape and bytes an element, 0 for `item_bytes`."""
    return sum(
        whole(torch.Size(shape).numel() * (own_bytes or item_bytes))
        for shape, own_bytes in tensors.values()
    )


def _is_ready(name: str, tensor: Tensor, dtype: torch.dtype | None) -> bool:
    """Say whether a tensor of the store computes as it lies there."""
    is_aligned = tensor.data_ptr() % ALIGNMENT_BYTES == 0
    return form_of(name, tensor, dtype) == tensor.dtype and is_aligned
