"""Stages whose parameters and state stay on the device between steps.

Owns their buffers and the proof that they hold what the store holds: the number of the step that
wrote them and the address that it wrote them to. Knows nothing of how many fit. Invariant: after a
step that was not committed, or a base that is another one, a resident is brought in again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardb.views import TensorImage
from trainer.pipeline.shapes import StageShape


def address_of(image: TensorImage) -> int:
    """Give where an image lies."""
    address: int = image.image.__array_interface__["data"][0]
    return address


@dataclass(kw_only=True)
class Resident:
    """One stage's images on the device, and which version they hold."""

    params: Tensor
    state: Tensor
    step: int | None = None
    addresses: tuple[int, int] = (0, 0)

    def holds(self, step: int, addresses: tuple[int, int]) -> bool:
        """Say whether this is what step `step` staged, and the images of it lie there."""
        return self.step == step and self.addresses == addresses

    def holds_staged(self, step: int, params: TensorImage, state: TensorImage) -> None:
        """Note that it holds what was copied into these staged images."""
        self.step = step
        self.addresses = (address_of(params), address_of(state))


def new_resident(shape: StageShape, device: torch.device) -> Resident:
    """Take the memory of a stage."""
    return Resident(
        params=torch.empty(shape.params.count, device=device),
        state=torch.empty(shape.state.count, dtype=shape.state.dtype, device=device),
    )
