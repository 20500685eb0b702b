"""What stages hand to one another, kept from the forward pass for the replay.

Owns where it waits: on the device, or in host memory, copied out behind the forward pass and in
again ahead of the replay. Both keep the same bytes. Knows nothing of stages. Invariant: the host's
buffers and the device's slots are made once; a micro-batch is fetched at most `len(ring)` ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from trainer.device import Device
from trainer.device_lanes import Lane, Lanes, Mark
from trainer.pipeline.slots import Ring, Slot


class Boundaries(Protocol):
    """The outputs of each stage, by stage and micro-batch."""

    def reset(self) -> None:
        """Forget everything, whether the step before came to its end or not."""
        ...

    def keep(self, stage: int, batch: int, x: Tensor) -> None:
        """Keep one output."""
        ...

    def begin_replay(self, order: Sequence[tuple[int, int]]) -> None:
        """Say in which order what was kept is wanted."""
        ...

    def take(self, stage: int, batch: int) -> Tensor:
        """Give what was kept, the next of the order; it is dropped at the next `done`."""
        ...

    def done(self) -> None:
        """Say that what was taken last is not wanted any more."""
        ...


class OnDevice:
    """Keeps the tensors themselves."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Tensor] = {}

    def reset(self) -> None:
        self._kept.clear()

    def keep(self, stage: int, batch: int, x: Tensor) -> None:
        self._kept[stage, batch] = x

    def begin_replay(self, order: Sequence[tuple[int, int]]) -> None:
        """Everything is here."""
        assert set(order) == set(self._kept)

    def take(self, stage: int, batch: int) -> Tensor:
        return self._kept.pop((stage, batch))

    def done(self) -> None:
        """It was dropped when it was taken."""

    @property
    def slot_bytes(self) -> int:
        """There are no slots."""
        return 0

    def grow(self, slots: int) -> None:
        """There are none."""


class OnHost:
    """Keeps them in page-locked host memory."""

    def __init__(self, lanes: Lanes, device: Device, *, slots: int, poison: bool) -> None:
        self._lanes = lanes
        self._device = device
        self._slots = slots
        self._poison = poison
        self._ring: Ring | None = None
        self._host: dict[tuple[int, int], Tensor] = {}
        self._kept: dict[tuple[int, int], Mark | None] = {}
        self._wanted: deque[tuple[int, int]] = deque()
        self._ahead: deque[tuple[tuple[int, int], Slot, Mark | None]] = deque()
        self._taken: Slot | None = None

    def reset(self) -> None:
        self._kept.clear()
        self._wanted.clear()
        self._ahead.clear()
        self._taken = None
        if self._ring is not None:
            self._ring.reset()

    def keep(self, stage: int, batch: int, x: Tensor) -> None:
        target = self._host_memory((stage, batch), x)
        self._lanes.wait(Lane.OUT, self._lanes.mark(Lane.COMPUTE))
        with self._lanes.on(Lane.OUT, f"activations {stage}"):
            target.copy_(x, non_blocking=True)
        self._lanes.hold(x, Lane.OUT)
        self._kept[stage, batch] = self._lanes.mark(Lane.OUT)

    def begin_replay(self, order: Sequence[tuple[int, int]]) -> None:
        assert set(order) == set(self._kept)
        self._wanted = deque(order)
        if self._ring is not None and self._ring.slot_bytes != self._host[order[0]].nbytes:
            self._device.wait()  # slots of another size may still be copied into
            self._ring = None
        self._fetch()

    def take(self, stage: int, batch: int) -> Tensor:
        key, slot, mark = self._ahead.popleft()
        assert key == (stage, batch), (key, stage, batch)
        self._lanes.wait(Lane.COMPUTE, mark)
        self._taken = slot
        return slot.buffer.view(self._host[key].shape)

    def done(self) -> None:
        assert self._ring is not None
        assert self._taken is not None
        self._ring.give_back(self._taken, Lane.COMPUTE)
        self._taken = None
        self._fetch()

    @property
    def slot_bytes(self) -> int:
        """Give what one more slot takes, once it is known."""
        return 0 if self._ring is None else self._ring.slot_bytes

    def grow(self, slots: int) -> None:
        """Have at least so many slots, once it is known how large they are."""
        assert self._ring is not None, "slots are as large as what is kept in them"
        self._ring.grow(slots)

    def _fetch(self) -> None:
        while self._wanted and self._opened(self._wanted[0]).has_room:
            key = self._wanted.popleft()
            slot = self._opened(key).take(Lane.ACTIVATIONS_IN)
            self._lanes.wait(Lane.ACTIVATIONS_IN, self._kept.pop(key))
            with self._lanes.on(Lane.ACTIVATIONS_IN, f"activations {key[0]}"):
                slot.buffer.copy_(self._host[key].view(-1), non_blocking=True)
            self._ahead.append((key, slot, self._lanes.mark(Lane.ACTIVATIONS_IN)))

    def _opened(self, key: tuple[int, int]) -> Ring:
        if self._ring is None:
            example = self._host[key]
            self._ring = Ring(
                self._lanes,
                name="activations",
                slots=self._slots,
                count=example.numel(),
                dtype=example.dtype,
                device=self._device.torch_device,
                poison=self._poison,
            )
        return self._ring

    def _host_memory(self, key: tuple[int, int], x: Tensor) -> Tensor:
        known = self._host.get(key)
        if known is None or known.shape != x.shape:
            size = x.numel() * x.element_size()
            memory = self._device.host_buffer(size, "activations between stages")
            known = memory.view(x.dtype).view(x.shape)
            self._host[key] = known
        return known


def new_boundaries(
    lanes: Lanes, device: Device, *, on_host: bool, slots: int, poison: bool
) -> OnDevice | OnHost:
    """Give where activations wait."""
    if on_host:
        return OnHost(lanes, device, slots=slots, poison=poison)
    return OnDevice()
