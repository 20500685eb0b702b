"""The memory that a block's weights are unpacked into, the same for every block.

Owns it. Recordings read weights where they lay when they were recorded, so it stays where it is
from one block, pass and step to the next, also while the head computes. Knows nothing of
unpacking.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.lora.stages import AdaptedStage
from trainer.lora.waiting import Piece, laid_out


class UnpackedMemory:
    """Gives places where it is kept; else whoever unpacks takes memory of its own."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._memory: Tensor | None = None
        self._tensors: dict[str, Tensor] = {}

    def keep(self, stage: AdaptedStage | None) -> None:
        """Keep memory for blocks like this one from here on; no weights may be bound."""
        if stage is None:
            self._memory, self._tensors = None, {}
            return
        pieces, size = unpacked_form(stage, self._dtype)
        if self._memory is None or self._memory.nbytes != size:
            self._memory, self._tensors = None, {}
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._tensors = {name: piece.of(self._memory) for name, piece in pieces.items()}

    def places(self) -> Mapping[str, Tensor] | None:
        """Give where a block's weights go; None where nothing is kept."""
        return self._tensors or None

    def has_room(self, size: int) -> bool:
        """Say whether there is so much."""
        return self._memory is not None and self._memory.nbytes >= size

    def room(self, size: int) -> Tensor:
        """Give the first bytes of it, for who has them while no weights are bound."""
        assert self._memory is not None
        return self._memory[:size]


def unpacked_form(stage: AdaptedStage, dtype: torch.dtype) -> tuple[dict[str, Piece], int]:
    """Give how a block's weights lie as they compute, and the bytes they take."""
    shapes = {name: each.shape for name, each in stage.inner.parameters.items()}
    empty = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes.values()]
    pieces, size = laid_out(empty)
    return dict(zip(shapes, pieces, strict=True)), size
