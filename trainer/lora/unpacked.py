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
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._tensors = {name: piece.of(self._memory) for name, piece in pieces.items()}
        return self._tensors

    def _drop(self) -> None:
        self._memory, self._tensors = None, {}


def unpacked_form(stage: AdaptedStage, dtype: torch.dtype) -> tuple[dict[str, Piece], int]:
    """Give how a block's weights lie as they compute, and the bytes they take."""
    shapes = {name: each.shape for name, each in stage.inner.parameters.items()}
    empty = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes.values()]
    pieces, size = laid_out(empty)
    return dict(zip(shapes, pieces, strict=True)), size
