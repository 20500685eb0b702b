"""Where the tensors of a frozen shard lie in a slot.

Owns offsets and forms: floating point in the dtype that computes, everything packed as it is, each
tensor on an aligned place, because kernels may round differently elsewhere. Knows nothing of
devices or stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.model.packed import MARK

# Of every tensor in a slot: what the allocators of both kinds of memory give at least.
PLACED_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One tensor in a slot."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        """Give the first byte behind it."""
        return self.start + torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotForm:
    """The places of a shard's tensors, one behind the other."""

    places: tuple[Place, ...]
    bytes: int

    @classmethod
    def of(cls, stored: Mapping[str, Tensor], dtype: torch.dtype | None) -> SlotForm:
        """Give the form of a shard as it is stored; floating point becomes `dtype`."""
        places, start = [], 0
        for name, tensor in stored.items():
            form = form_of(name, tensor, dtype)
            place = Place(name=name, dtype=form, shape=tuple(tensor.shape), start=start)
            places.append(place)
            start = whole(place.end)
        return cls(places=tuple(places), bytes=start)

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Give the tensors as views of a buffer of bytes."""
        return {
            place.name: buffer[place.start : place.end].view(place.dtype).view(place.shape)
            for place in self.places
        }

    def fill(self, buffer: Tensor, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy a shard's tensors to their places, by ordinary copies; give them there."""
        found = self.tensors(buffer)
        for name, tensor in found.items():
            tensor.copy_(stored[name])
        return found


def form_of(name: str, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Give the dtype that a stored tensor has in a slot; what is packed keeps its own."""
    is_cast = dtype is not None and tensor.is_floating_point() and MARK not in name
    return dtype if dtype is not None and is_cast else tensor.dtype


def whole(size: int) -> int:
    """Give a size in whole places."""
    return -(-size // PLACED_BYTES) * PLACED_BYTES
