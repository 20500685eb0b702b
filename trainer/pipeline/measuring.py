"""What a step measures on the device, and how the host learns of it: once, at its end.

Owns norms, scales and the loss as tensors on the device. The formulas are those of
`trainer.clipping`. Knows nothing of passes or updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.clipping import total_norm


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What the host learned of a step. scale: the smallest that was or is to be applied."""

    is_finite: bool
    loss_sum: float
    norm: float
    scale: float
    shard_norms: dict[str, float]


class Measures:
    """Norms of each stage's tensors, the loss, and the factors that clip."""

    def __init__(self, max_norm: float) -> None:
        self.norms: dict[str, Tensor] = {}
        self.scales: dict[str, Tensor] = {}
        self.loss_sum: Tensor | None = None
        self._max_norm = max_norm

    def take_norms(self, name: str, gradients: Mapping[str, Tensor]) -> Tensor:
        """Take the norms of a stage's tensors."""
        norms = torch.stack(list(torch._foreach_norm(list(gradients.values()), 2.0)))
        self.norms[name] = norms
        return norms

    def scale_of(self, name: str, norm: Tensor) -> Tensor:
        """Give the factor that brings a norm down to the limit, as a tensor on the device."""
        self.scales[name] = torch.clamp(self._max_norm / (norm + 1e-6), max=1.0)
        return self.scales[name]

    def read(self, names: Sequence[str], *, clips_model: bool) -> Told:
        """Wait for everything that was measured, and read it in one copy.

        names: of the stages, in the order in which norms are summed.
        """
        norms = [self.norms[name] for name in names]
        norm = total_norm(norms)
        if clips_model:
            self.scale_of("model", norm)
        scales = [*self.scales.values()] or [torch.ones_like(norm)]
        assert self.loss_sum is not None
        finite = torch.isfinite(torch.cat(norms)).all()
        parts = [
            torch.stack([finite.double(), self.loss_sum, norm.double()]),
            torch.stack(scales).double(),
            torch.stack([total_norm([each]) for each in norms]).double(),
        ]
        values = torch.cat(parts).tolist()
        rest = values[3:]
        return Told(
            is_finite=bool(values[0]) and math.isfinite(values[1]),
            loss_sum=values[1],
            norm=values[2],
            scale=min(rest[: len(scales)]),
            shard_norms=dict(zip(names, rest[len(scales) :], strict=True)),
        )
