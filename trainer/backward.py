"""The reverse replay: each stage computed again with autograd, from its kept inputs.

Owns the order of the backward pass and the gradients between stages. Knows nothing of clipping or
optimizers: it hands out each stage's gradients while that stage is still in. Layer-major, like the
forward trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardb.views import ShardView
from trainer.forward import Compute, Trace, bring_in
from trainer.gradients import GradientSum
from trainer.model.stages import Stage
from trainer.residency import ShardWindow


@dataclass(frozen=True, kw_only=True, slots=True)
class StageGradients:
    """The finished gradients of a stage, and the view of the parameters they belong to."""

    stage: Stage
    view: ShardView
    gradients: dict[str, Tensor]


def replay_backward(
    trunk: Sequence[Stage],
    window: ShardWindow,
    compute: Compute,
    trace: Trace,
    output_gradients: list[Tensor],
    start: dict[str, Tensor] | None,
) -> Iterator[StageGradients]:
    """Yield each stage's gradients from the last stage to the first.

    `start` is what the first stage's gradients are added to: those of a head that shares its
    weight. The trace is used up: inputs are dropped as soon as their stage is done.
    """
    for stage in reversed(trunk):
        inputs = trace.inputs.pop()
        total = GradientSum(start if not trace.inputs else None)
        with window.take(f"params/{stage.name}") as view:
            params = bring_in(stage, view, compute)
            with compute.clock.measure("backward_kernel_seconds"):
                output_gradients = [
                    replay_stage(stage, params, compute, x, gradient, total)
                    for x, gradient in zip(inputs, output_gradients, strict=True)
                ]
            del params, inputs
            yield StageGradients(stage=stage, view=view, gradients=total.gradients)


def replay_stage(
    stage: Stage,
    params: dict[str, Tensor],
    compute: Compute,
    x: Tensor,
    output_gradient: Tensor,
    total: GradientSum,
) -> Tensor:
    """Compute one stage again on one micro-batch, add its gradients, give that of its input.

    Token ids have no gradient: the first stage gives `output_gradient` back, unused.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    x = x.detach().requires_grad_(x.is_floating_point())
    with torch.enable_grad():
        output = compute.run(stage, leaves, x)
    wanted = [*leaves.values(), *([x] if x.requires_grad else [])]
    found = torch.autograd.grad(output, wanted, grad_outputs=output_gradient)
    total.add(dict(zip(leaves, found, strict=False)))
    return found[-1] if x.requires_grad else output_gradient
