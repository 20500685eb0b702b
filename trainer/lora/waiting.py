"""What the first pass leaves for the replay, in host memory while a device computes.

Owns the host's memory, the order of copies both ways, and the device's slots, which are there while
something is coming back. One micro-batch of one stage is a few tensors; they go out one by one, and
come back in one copy, laid out as they were. Knows nothing of stages. Invariants: what comes back
has the bits that went out; of what goes out the tensors of the last `GOING` visits are on the
device, whatever the host has asked for since; at most `slots` visits' are there ahead.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trainer.device import Device
from trainer.device_lanes import Lane, Lanes, Mark
from trainer.pipeline.slots import Ring, Slot

# Visits whose tensors may still be on their way out while the next one computes.
GOING = 1
# A piece begins where any tensor may.
APART = 512

Key = tuple[int, int]


class Waiting(Protocol):
    """A few tensors by stage and micro-batch."""

    def reset(self) -> None:
        """Forget everything, whether the step before came to its end or not."""
        ...

    def keep(self, stage: int, batch: int, pieces: Sequence[Tensor]) -> None:
        """Keep the tensors of one visit."""
        ...

    def begin_replay(self, order: Sequence[Key]) -> None:
        """Say in which order what was kept is wanted."""
        ...

    def take(self, stage: int, batch: int) -> list[Tensor]:
        """Give what was kept, the next of the order; it is dropped at the next `done`."""
        ...

    def done(self) -> None:
        """Say that what was taken last is not wanted any more."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """How one tensor lies in memory, in bytes and elements."""

    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Give its size."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """Give the tensor of memory that holds it."""
        flat = memory[self.offset : self.offset + self.bytes].view(self.dtype)
        return flat.as_strided(self.shape, self.strides)


def laid_out(pieces: Sequence[Tensor]) -> tuple[tuple[Piece, ...], int]:
    """Give how tensors lie one behind the other, and the bytes they take."""
    found, end = [], 0
    for each in pieces:
        piece = Piece(offset=end, shape=each.shape, strides=each.stride(), dtype=each.dtype)
        found.append(piece)
        end += -(-piece.bytes // APART) * APART
    return tuple(found), end


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """The pieces of a visit in host memory; good once `arrived` is reached."""

    memory: Tensor
    pieces: tuple[Piece, ...]
    arrived: Mark | None


class OnHost(Waiting):
    """Keeps them in page-locked host memory."""

    def __init__(self, lanes: Lanes, device: Device, *, slots: int, poison: bool) -> None:
        self._lanes = lanes
        self._device = device
        self._slots = slots
        self._poison = poison
        self._ring: Ring | None = None
        self._memory: dict[Key, Tensor] = {}
        self._kept: dict[Key, _Kept] = {}
        self._going: deque[tuple[Sequence[Tensor], Mark | None]] = deque()
        self._wanted: deque[Key] = deque()
        self._ahead: deque[tuple[Key, Slot, _Kept, Mark | None]] = deque()
        self._taken: Slot | None = None

    def reset(self) -> None:
        """See `Waiting`."""
        if self._ring is not None:
            self._device.wait()  # its slots may still be copied into
        self._ring = None
        self._gone(0)
        for each in (self._kept, self._wanted, self._ahead):
            each.clear()
        self._taken = None

    def keep(self, stage: int, batch: int, pieces: Sequence[Tensor]) -> None:
        """See `Waiting`."""
        forms, size = laid_out(pieces)
        memory = self._host_memory((stage, batch), size)
        self._lanes.wait(Lane.OUT, self._lanes.mark(Lane.COMPUTE))
        with self._lanes.on(Lane.OUT, f"activations {stage}"):
            for form, each in zip(forms, pieces, strict=True):
                form.of(memory).copy_(each, non_blocking=True)
        arrived = self._lanes.mark(Lane.OUT)
        self._kept[stage, batch] = _Kept(memory=memory, pieces=forms, arrived=arrived)
        self._going.append((pieces, arrived))
        self._gone(GOING)

    def begin_replay(self, order: Sequence[Key]) -> None:
        """See `Waiting`."""
        assert set(order) == set(self._kept)
        self._gone(0)
        self._wanted = deque(order)
        self._ring = Ring(
            self._lanes,
            name="activations",
            slots=self._slots,
            count=max(kept.memory.nbytes for kept in self._kept.values()) // 2,
            dtype=torch.bfloat16,  # so that poison is NaN in fp32 too
            device=self._device.torch_device,
            poison=self._poison,
        )
        self._fetch(self._ring)

    def take(self, stage: int, batch: int) -> list[Tensor]:
        """See `Waiting`."""
        key, slot, kept, mark = self._ahead.popleft()
        assert key == (stage, batch), (key, stage, batch)
        self._lanes.wait(Lane.COMPUTE, mark)
        self._taken = slot
        memory = slot.buffer.view(torch.uint8)
        return [piece.of(memory) for piece in kept.pieces]

    def done(self) -> None:
        """See `Waiting`."""
        assert self._ring is not None
        assert self._taken is not None
        self._ring.give_back(self._taken, Lane.COMPUTE)
        self._taken = None
        self._fetch(self._ring)
        if not self._ahead:  # everything that was copied in was waited for, and used
            self._ring = None

    def _fetch(self, ring: Ring) -> None:
        while self._wanted and ring.has_room:
            key = self._wanted.popleft()
            kept = self._kept.pop(key)
            slot = ring.take(Lane.ACTIVATIONS_IN)
            self._lanes.wait(Lane.ACTIVATIONS_IN, kept.arrived)
            with self._lanes.on(Lane.ACTIVATIONS_IN, f"activations {key[0]}"):
                target = slot.buffer.view(torch.uint8)[: kept.memory.nbytes]
                target.copy_(kept.memory, non_blocking=True)
            self._ahead.append((key, slot, kept, self._lanes.mark(Lane.ACTIVATIONS_IN)))

    def _gone(self, count: int) -> None:
        """Let the tensors of all visits but the last `count` go, behind their copies."""
        while len(self._going) > count:
            self._lanes.wait(Lane.COMPUTE, self._going.popleft()[1])

    def _host_memory(self, key: Key, size: int) -> Tensor:
        known = self._memory.get(key)
        if known is None or known.nbytes != size:
            known = self._device.host_buffer(size, "activations between stages")
            self._memory[key] = known
        return known
