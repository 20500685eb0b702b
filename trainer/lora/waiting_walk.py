"""What `trainer.lora.waiting` holds of a device, on tensors without content.

Owns that: tensors that go out are there for a visit more, and slots while something comes back.
Knows nothing of steps. Host memory is not counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.lora.away import AHEAD
from trainer.lora.waiting import GOING, Key, Piece, Waiting, laid_out
from trainer.vram_trace import META, MemoryTrace


class WalkedWaiting(Waiting):
    """Keeps the forms of what is kept."""

    def __init__(self, trace: MemoryTrace) -> None:
        self._trace = trace
        self._kept: dict[Key, tuple[Piece, ...]] = {}
        self._most = 0
        self._going: deque[Sequence[Tensor]] = deque(maxlen=GOING)
        self._slots: list[Tensor] = []

    def reset(self) -> None:
        """It is made for one step."""

    def keep(self, stage: int, batch: int, pieces: Sequence[Tensor]) -> None:
        """See `Waiting`."""
        self._kept[stage, batch], size = laid_out(pieces)
        self._most = max(self._most, size)
        self._going.append(pieces)

    def begin_replay(self, order: Sequence[Key]) -> None:
        """See `Waiting`; they come in the order in which they are asked for."""
        self._going.clear()
        self._slots = [
            torch.empty(self._most, dtype=torch.uint8, device=META) for _ in range(AHEAD)
        ]

    def take(self, stage: int, batch: int) -> list[Tensor]:
        """Give tensors of the same form, whose memory is that of a slot."""
        pieces = self._kept.pop((stage, batch))
        with self._trace.left_out():
            memory = torch.empty(self._most, dtype=torch.uint8, device=META)
            return [piece.of(memory) for piece in pieces]

    def done(self) -> None:
        """See `Waiting`."""
        if not self._kept:
            self._slots.clear()
