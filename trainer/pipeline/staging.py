"""The host's side of copies: images of shards as flat tensors, page-locked once.

Owns which mappings are page-locked. Only mappings of a store in memory are: they live as long as
the store and a rename keeps them, so a registration is good for every later version that lands in
the same file. Other images are copied through pageable memory: slower, the same bytes. Knows
nothing of streams or of stages. Invariant: a locked mapping is held, so that its address can never
come to mean other memory; `close` unlocks before it lets go.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from shardb.views import StagedShard, TensorImage
from trainer.device_lanes import Lanes
from trainer.page_locks import PageLocks
from trainer.pipeline.shapes import ImageShape

WHAT = "shards of the active store"


class HostImages:
    """Gives the elements of an image as a tensor on the host."""

    def __init__(self, lanes: Lanes, page_locks: PageLocks) -> None:
        self._lanes = lanes
        self._page_locks = page_locks
        self._locked: dict[int, mmap.mmap] = {}
        self._refused = False
        self._known: dict[tuple[int, int, int], Tensor] = {}

    @property
    def locked_bytes(self) -> int:
        """Bytes that are page-locked."""
        return sum(len(mapping) for mapping in self._locked.values())

    def elements(self, image: TensorImage, shape: ImageShape) -> Tensor:
        """Give the image's elements, [count], in its own memory.

        The tensor does not keep the memory: the caller keeps the image, or the transaction does.
        """
        address = image.image.__array_interface__["data"][0]
        key = (address, shape.start_bytes, shape.count)
        known = self._known.get(key)
        if known is not None:
            return known
        found = _tensor_at(address + shape.start_bytes, shape)
        if address in self._locked:
            self._known[key] = found
        return found

    def lock(self, staged: StagedShard) -> None:
        """Page-lock the mapping of a staged image, the first time that it is met."""
        mapping = staged.mapping
        if mapping is None or self._refused:
            return
        address = staged.image.__array_interface__["data"][0]
        if address not in self._locked:
            # What cannot be locked is copied the slow way.
            self._refused = not self._page_locks.take(len(mapping), WHAT)
            if self._refused:
                return
            if self._lanes.page_lock(address, len(mapping)):
                self._locked[address] = mapping
            else:
                self._refused = True
                self._page_locks.give_back(len(mapping), f"{WHAT}: the driver did not lock it")

    def close(self) -> None:
        """Unlock everything; nothing may be copied any more."""
        self._known.clear()
        while self._locked:
            address, mapping = self._locked.popitem()
            self._lanes.page_unlock(address)
            self._page_locks.give_back(len(mapping))


def _tensor_at(address: int, shape: ImageShape) -> Tensor:
    memory = (ctypes.c_char * shape.bytes).from_address(address)
    return torch.frombuffer(memory, dtype=shape.dtype)
