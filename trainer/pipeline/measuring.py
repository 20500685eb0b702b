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
from trainer.device_lanes import Lane, Lanes, Mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What the host learned of a step. scale: the smallest that was or is to be applied."""

    is_finite: bool
    loss_sum: float
    norm: float
    scale: float
    shard_norms: dict[str, float]


class Measures:
    """Norms of each stage's tensors, the loss, and the factors that clip.

    host: page-locked float64 memory for them, long enough; None on the host itself.
    """

    def __init__(self, max_norm: float, host: Tensor | None) -> None:
        self._host = host
        self._mark: Mark | None = None
        self._sent = torch.empty(0)
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

    def send(self, names: Sequence[str], lanes: Lanes, *, clips_model: bool) -> None:
        """Ask for the one copy to the host of everything that was measured.

        It has a lane of its own: copies out take their turns, and what computes must not wait until
        all that were asked for before are done. names: of the stages, in the order in which norms
        are summed.
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
        self._sent = torch.cat(parts)
        lanes.wait(Lane.TOLD, lanes.mark(Lane.COMPUTE))
        if self._host is not None:
            with lanes.on(Lane.TOLD, "norms"):
                self._host[: len(self._sent)].copy_(self._sent, non_blocking=True)
            lanes.hold(self._sent, Lane.TOLD)
        self._mark = lanes.mark(Lane.TOLD, for_host=True)

    def read(self, names: Sequence[str], lanes: Lanes) -> Told:
        """Wait for that copy and read it."""
        lanes.arrive(self._mark)
        source = self._sent if self._host is None else self._host[: len(self._sent)]
        values = source.tolist()
        rest, count = values[3:], max(1, len(self.scales))
        return Told(
            is_finite=bool(values[0]) and math.isfinite(values[1]),
            loss_sum=values[1],
            norm=values[2],
            scale=min(rest[:count]),
            shard_norms=dict(zip(names, rest[count:], strict=True)),
        )
