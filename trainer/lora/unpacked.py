"""The memory that a block's weights are unpacked into, the same for every block.

Owns it, and when it makes room. Recordings read weights where they lay when they were recorded, so
that it has to lie where it lay. The head computes with more memory than blocks do, and has no use
for this: while it computes, the memory is the allocator's, which gives the same back behind it, as
long as nothing of the head's stays there. Knows nothing of unpacking. Invariant: whoever finds it
elsewhere finds other addresses, and computes right all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer.lora.stages import AdaptedStage
from trainer.lora.waiting import Piece, laid_out
from trainer.model.config import ModelConfig


class UnpackedMemory:
    """Gives places while `is_kept`; else whoever unpacks takes memory of its own."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._is_kept = False
        self._memory: Tensor | None = None
        self._tensors: dict[str, Tensor] = {}
        self._forms: dict[ModelConfig, tuple[dict[str, Piece], int]] = {}

    @property
    def is_there(self) -> bool:
        """Say whether it takes memory now."""
        return self._memory is not None

    def keep(self, *, is_kept: bool) -> None:
        """Say whether it is kept from here on; no weights may be bound."""
        self._is_kept = is_kept
        if not is_kept:
            self._drop()

    def places(self, stage: AdaptedStage) -> Mapping[str, Tensor] | None:
        """Give where a block's weights go; None where nothing is kept."""
        if not self._is_kept:
            return None
        if stage.config not in self._forms:
            self._forms[stage.config] = unpacked_form(stage, self._dtype)
        pieces, size = self._forms[stage.config]
        if self._memory is None or self._memory.nbytes != size:
            self._drop()
            self._take(size, pieces)
        return self._tensors

    @contextmanager
    def giving_way(self) -> Iterator[None]:
        """Be the allocator's for a block of code, in which no weights are bound."""
        if self._memory is None:
            yield
            return
        size, pieces = self._memory.nbytes, self._pieces
        self._drop()
        try:
            yield
        finally:
            self._take(size, pieces)

    def _take(self, size: int, pieces: Mapping[str, Piece]) -> None:
        self._pieces = pieces
        self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._tensors = {name: piece.of(self._memory) for name, piece in pieces.items()}

    def _drop(self) -> None:
        self._memory, self._tensors = None, {}


class PlacedList(list[Tensor]):
    """Takes the content of what is appended into places that are there already."""

    def __init__(self, places: Sequence[Tensor]) -> None:
        super().__init__()
        self._places = iter(places)

    def append(self, tensor: Tensor, /) -> None:
        """Copy a tensor to the next place."""
        super().append(next(self._places).copy_(tensor))


def unpacked_form(stage: AdaptedStage, dtype: torch.dtype) -> tuple[dict[str, Piece], int]:
    """Give how a block's weights lie as they compute, and the bytes they take."""
    shapes = {name: each.shape for name, each in stage.inner.parameters.items()}
    empty = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes.values()]
    pieces, size = laid_out(empty)
    return dict(zip(shapes, pieces, strict=True)), size
