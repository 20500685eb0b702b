"""Where the tensors between stages wait for the backward pass: on the device, or away from it.

Owns what such a place has to do. Between its passes a step keeps each stage's outputs (its
boundary), one tensor a micro-batch, and on the way back their gradients: the part of a step's
memory that grows with rows, micro-batches and layers. `placement_host` and `placement_spill` are
two places away from the device. Knows nothing of stages or of what is computed. Invariants: what
comes back has the bits that went in; a place is used again only after what lay there was dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Boundary(Protocol):
    """Tensors of one stage, one a micro-batch; a plain list keeps them where they are."""

    def append(self, tensor: Tensor, /) -> None: ...
    def clear(self) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Tensor]: ...
    def __getitem__(self, index: int, /) -> Tensor: ...
    def __setitem__(self, index: int, tensor: Tensor, /) -> None: ...


PAGE_BYTES = 4096
BoundaryMaker = Callable[[], Boundary]


@dataclass(frozen=True, kw_only=True, slots=True)
class Put:
    """A tensor that was put away: `place` means something to its shelf alone."""

    place: object
    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Give the size of what lies there."""
        return self.shape.numel() * self.dtype.itemsize


class Shelf(Protocol):
    """Puts tensors away and brings them back."""

    def put(self, tensor: Tensor) -> Put: ...
    def get(self, put: Put) -> Tensor: ...
    def drop(self, put: Put) -> None: ...


class AwayBoundary:
    """A boundary whose tensors are elsewhere: each access brings one to the device."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._puts: list[Put] = []

    def __del__(self) -> None:
        self.clear()

    def append(self, tensor: Tensor, /) -> None:
        """Put one more tensor away."""
        self._puts.append(self._shelf.put(tensor))

    def clear(self) -> None:
        """Drop everything."""
        while self._puts:
            self._shelf.drop(self._puts.pop())

    def __len__(self) -> int:
        return len(self._puts)

    def __iter__(self) -> Iterator[Tensor]:
        for put in self._puts:
            yield self._shelf.get(put)

    def __getitem__(self, index: int, /) -> Tensor:
        return self._shelf.get(self._puts[index])

    def __setitem__(self, index: int, tensor: Tensor, /) -> None:
        self._shelf.drop(self._puts[index])
        self._puts[index] = self._shelf.put(tensor)


def whole_pages(size: int) -> int:
    """Give a size in whole pages: what a place takes, for memory is locked and files grow so."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES
