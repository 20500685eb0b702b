"""The forward trace: every stage once, without autograd, keeping what crosses between stages.

Owns the boundary activations. Knows nothing of gradients or the head. Layer-major: all
micro-batches pass a stage before the next stage is brought in, so a stage is brought in once
however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardb.views import ShardView
from trainer.device import Device
from trainer.model.stages import Stage
from trainer.residency import ShardWindow
from trainer.timing import StepClock


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """Where and in which dtype stages run."""

    device: Device
    dtype: torch.dtype
    clock: StepClock

    def run(self, stage: Stage, params: dict[str, Tensor], x: Tensor) -> Tensor:
        """Compute one stage and give its output in the compute dtype."""
        return stage.forward(params, x).to(self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """`inputs[stage index][micro-batch]` of each stage, and the last stage's outputs."""

    inputs: list[list[Tensor]]
    outputs: list[Tensor]


def trace_forward(
    trunk: Sequence[Stage], window: ShardWindow, compute: Compute, inputs: list[Tensor]
) -> Trace:
    """Pass every micro-batch through every stage and keep each stage's inputs."""
    kept = []
    for stage in trunk:
        kept.append(inputs)
        inputs = run_stage(stage, window, compute, inputs)
    return Trace(inputs=kept, outputs=inputs)


def run_stage(
    stage: Stage, window: ShardWindow, compute: Compute, inputs: Sequence[Tensor]
) -> list[Tensor]:
    """Bring one stage in and pass every micro-batch through it, without autograd."""
    with torch.no_grad(), window.take(f"params/{stage.name}") as view:
        params = bring_in(stage, view, compute)
        with compute.clock.measure("forward_kernel_seconds"):
            return [compute.run(stage, params, x) for x in inputs]


def bring_in(stage: Stage, view: ShardView, compute: Compute) -> dict[str, Tensor]:
    """Give the stage's parameters as it computes with them, in the stage's own order.

    An object orders tensors by size; norms and sums over them must not depend on that.
    """
    with compute.clock.measure("h2d_seconds"):
        dtype = None if stage.keeps_master_dtype else compute.dtype
        tensors = compute.device.bring_in(view, dtype)
    return {name: tensors[name] for name in stage.parameters}
