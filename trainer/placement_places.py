"""The place of boundary activations that an engine's options ask for, kept from step to step.

Owns which place that is, and what it needs before a step begins. Knows nothing of the choice
between places, which is made with the budgets (`placement_choice`). Invariant: what a place keeps
between steps is its own; no tensor of a step is in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.device import Device
from trainer.errors import InputError
from trainer.options import EngineOptions
from trainer.placement import AwayBoundary, Boundary, Shelf, whole_pages
from trainer.placement_host import HostShelf
from trainer.placement_spill import SpillFile, SpillShelf


class ActivationPlaces:
    """Makes boundaries where the options want them.

    spill_folder: where a file may be made; InputError if one is asked for and there is none.
    """

    def __init__(
        self, options: EngineOptions, device: Device, spill_folder: str | None = None
    ) -> None:
        device.page_locks.limit_bytes = options.pinned_budget_bytes
        self._shelf: Shelf | None = None
        self._file: SpillFile | None = None
        placement = options.activation_placement
        if placement == "spill":
            if spill_folder is None:
                raise InputError(
                    "--activation-placement spill: there is no store to make a file in: choose vram"
                    " or host"
                )
            self._file = SpillFile(spill_folder)
            self._shelf = SpillShelf(device, self._file)
        elif placement == "host" and not device.is_host:
            # Where the host computes its tensors are in host memory as they are.
            self._shelf = HostShelf(device)

    def new_boundary(self) -> Boundary:
        """Give an empty boundary."""
        return [] if self._shelf is None else AwayBoundary(self._shelf)

    def prepare(
        self, stages: int, ids: Sequence[Tensor], *, width: int, dtype: torch.dtype
    ) -> None:
        """Take what a step needs before it begins; StorageFullError where the disk lacks it.

        stages: before the head; ids: [B, T] a micro-batch; width: of the model.
        """
        if self._file is not None:
            self._file.reserve(
                boundary_bytes(stages, [x.numel() for x in ids], width * dtype.itemsize)
            )


def boundary_bytes(stages: int, tokens: Sequence[int], token_bytes: int) -> int:
    """Give what a step's boundaries take: every stage's outputs, and gradients of one stage.

    tokens: of each micro-batch; token_bytes: of one token's hidden state.
    """
    return (stages + 1) * sum(whole_pages(count * token_bytes) for count in tokens)
