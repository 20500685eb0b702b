"""A block's passes recorded once and done again: one call in the place of a hundred.

Owns the recording and its fixed buffers. Every block computes with the same addresses (the cast
weights, an input, a gradient), so one recording of each pass serves all of them. Knows nothing of
the order of stages. Where nothing can be recorded (on the host) passes are computed as they are;
both ways give the same bits, because they are the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.device_lanes import Lanes
from trainer.gradients import PlacedSum
from trainer.model.stages import Block, Stage
from trainer.tape import Compute


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recorded:
    x: Tensor
    gradient: Tensor
    output: Tensor
    forward: Callable[[], None]
    found: tuple[Tensor, ...]
    backward: Callable[[], None]


class Passes:
    """Computes stages forward and backward; blocks from recordings once `may_record` is set."""

    def __init__(self, lanes: Lanes) -> None:
        self.may_record = False
        self._lanes = lanes
        self._recorded: dict[tuple[object, ...], _Recorded | None] = {}

    def forward(
        self, compute: Compute, stage: Stage, weights: Mapping[str, Tensor], x: Tensor
    ) -> Tensor:
        """Give a stage's output, without history."""
        recorded = self._of(compute, stage, weights, x)
        if recorded is None:
            with torch.no_grad():
                return compute.run(stage, weights, x)
        recorded.x.copy_(x)
        recorded.forward()
        return recorded.output.clone()

    def backward(
        self,
        compute: Compute,
        stage: Stage,
        weights: Mapping[str, Tensor],
        x: Tensor,
        gradient: Tensor,
        total: PlacedSum,
    ) -> Tensor:
        """Compute a stage again and go back through it; give the gradient of `x`.

        Token ids have none: the output's gradient comes back, unused.
        """
        recorded = self._of(compute, stage, weights, x)
        if recorded is None:
            return _back(compute, stage, weights, x, gradient, total)
        recorded.x.copy_(x)
        recorded.gradient.copy_(gradient)
        recorded.backward()
        total.add(dict(zip(weights, recorded.found, strict=False)))
        return gradient.copy_(recorded.found[-1])

    def _of(
        self, compute: Compute, stage: Stage, weights: Mapping[str, Tensor], x: Tensor
    ) -> _Recorded | None:
        if not isinstance(stage, Block):
            return None
        key = (stage.config, x.shape, x.dtype)
        if key not in self._recorded:
            if not self.may_record:
                return None
            self._recorded[key] = self._record(compute, stage, weights, x)
        return self._recorded[key]

    def _record(
        self, compute: Compute, stage: Stage, weights: Mapping[str, Tensor], x: Tensor
    ) -> _Recorded | None:
        fixed, gradient = torch.empty_like(x).copy_(x), torch.zeros_like(x)

        def forward() -> Tensor:
            with torch.no_grad():
                return compute.run(stage, weights, fixed)

        def backward() -> tuple[Tensor, ...]:
            return _found(compute, stage, weights, fixed, gradient)

        first = self._lanes.capture(forward)
        second = self._lanes.capture(backward)
        if first is None or second is None:
            return None
        return _Recorded(
            x=fixed,
            gradient=gradient,
            output=first[0],
            forward=first[1],
            found=second[0],
            backward=second[1],
        )


def _back(
    compute: Compute,
    stage: Stage,
    weights: Mapping[str, Tensor],
    x: Tensor,
    gradient: Tensor,
    total: PlacedSum,
) -> Tensor:
    found = _found(compute, stage, weights, x, gradient)
    total.add(dict(zip(weights, found, strict=False)))
    return found[-1] if x.is_floating_point() else gradient


def _found(
    compute: Compute, stage: Stage, weights: Mapping[str, Tensor], x: Tensor, gradient: Tensor
) -> tuple[Tensor, ...]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
    leaf = x.detach().requires_grad_(x.is_floating_point())
    with torch.enable_grad():
        output = compute.run(stage, leaves, leaf)
    wanted = [*leaves.values(), *([leaf] if leaf.requires_grad else [])]
    return torch.autograd.grad(output, wanted, grad_outputs=gradient)
