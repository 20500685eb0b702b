"""The forward trace: every stage once, keeping what its backward pass will need.

Owns the order of the forward pass. Knows nothing of gradients or the head. Layer-major: all
micro-batches pass a stage before the next stage is brought in, so a stage is brought in once
however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardb import ShardView
from trainer.model.stages import Stage
from trainer.placement import Boundary
from trainer.residency import ShardWindow
from trainer.tape import Compute, KeptTape, ReplayTape, Tape


def trace_forward(
    trunk: Sequence[Stage],
    window: ShardWindow,
    compute: Compute,
    ids: Sequence[Tensor],
    *,
    keep_activations: bool,
) -> list[Tape]:
    """Pass every micro-batch through every stage; give a tape a stage."""
    record = KeptTape if keep_activations else ReplayTape
    tapes: list[Tape] = []
    inputs: Sequence[Tensor] | Boundary = ids
    for stage in trunk:
        with window.take(f"params/{stage.name}") as view:
            params = bring_in(stage, view, compute)
            with compute.clock.measure("forward_kernel_seconds"):
                tapes.append(record(stage, compute, params, inputs))
            inputs = tapes[-1].outputs
    return tapes


def pass_through(
    trunk: Sequence[Stage], window: ShardWindow, compute: Compute, ids: Sequence[Tensor]
) -> Boundary:
    """Pass every batch through every stage and keep nothing; give the last stage's outputs."""
    outputs = compute.new_boundary()
    for stage in trunk:
        with torch.no_grad(), window.take(f"params/{stage.name}") as view:
            params = bring_in(stage, view, compute)
            with compute.clock.measure("forward_kernel_seconds"):
                for index, each in enumerate(ids):
                    if index == len(outputs):
                        outputs.append(compute.run(stage, params, each, index))
                    else:
                        outputs[index] = compute.run(stage, params, outputs[index], index)
    return outputs


def bring_in(stage: Stage, view: ShardView, compute: Compute) -> dict[str, Tensor]:
    """Give the stage's parameters as it computes with them, in the stage's own order.

    An object orders tensors by size; norms and sums over them must not depend on that.
    """
    with compute.clock.measure("h2d_seconds"):
        # Looked up in fp32, whatever the stored form is.
        dtype = torch.float32 if stage.keeps_master_dtype else compute.dtype
        tensors = compute.device.bring_in(view, dtype)
    return {name: tensors[name] for name in stage.parameters}
