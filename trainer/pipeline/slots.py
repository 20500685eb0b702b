"""Buffers on the device that are used in turn, made once.

Owns when a slot may be used again: behind the mark that its last user left. Knows nothing of what
is in a slot. With `poison` a slot is filled with NaN when it is given back, so that whoever reads
it too late, or before it was filled, shows in the result.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import torch
from torch import Tensor

from trainer.device_lanes import Lane, Lanes, Mark


class Slot:
    """One buffer; `free` are the marks behind which it is used by nobody."""

    def __init__(self, buffer: Tensor, name: str) -> None:
        self.buffer = buffer
        self.name = name
        self.free: tuple[Mark | None, ...] = ()


class Ring:
    """Slots of one size, handed out one after the other."""

    def __init__(
        self,
        lanes: Lanes,
        *,
        name: str,
        slots: int,
        count: int,
        dtype: torch.dtype,
        device: torch.device,
        poison: bool,
    ) -> None:
        self._lanes = lanes
        self._poison = poison
        self._name = name
        self._new_buffer = partial(torch.empty, count, dtype=dtype, device=device)
        self.slots: list[Slot] = []
        self._free: deque[Slot] = deque()
        self.grow(slots)

    def __len__(self) -> int:
        return len(self.slots)

    def grow(self, slots: int) -> None:
        """Have at least so many slots."""
        while len(self.slots) < slots:
            slot = Slot(self._new_buffer(), f"{self._name} {len(self.slots)}")
            # Its memory may be some that COMPUTE has yet to finish with: PyTorch gives what was
            # freed to the lane that asks, behind whatever that lane was asked for before.
            slot.free = (self._lanes.mark(Lane.COMPUTE),)
            self.slots.append(slot)
            self._free.append(slot)

    @property
    def slot_bytes(self) -> int:
        """Give what one more slot takes."""
        return self.slots[0].buffer.nbytes

    @property
    def has_room(self) -> bool:
        """Say whether the next slot was given back."""
        return bool(self._free)

    def take(self, lane: Lane) -> Slot:
        """Give the next slot, which must have been given back; `lane` waits until it is free."""
        assert self._free, "a slot is taken that nobody gave back"
        slot = self._free.popleft()
        for mark in slot.free:
            self._lanes.wait(lane, mark)
        return slot

    def give_back(self, slot: Slot, lane: Lane, other: Mark | None = None) -> None:
        """Say that what `lane` was asked for so far is the last use of a slot, beside `other`."""
        assert slot not in self._free
        if self._poison:
            self._lanes.wait(lane, other)
            with self._lanes.on(lane):
                slot.buffer.fill_(float("nan"))
        slot.free = (self._lanes.mark(lane), other)
        self._free.append(slot)

    def reset(self) -> None:
        """Count every slot as given back, after a step that did not come to its end."""
        for slot in self.slots:
            slot.free = ()
        self._free = deque(self.slots)
