"""Resident training of a run's model on a GPU: what the product is measured against.

Owns the arms: ordinary autograd with compiled blocks, with every block checkpointed, and the same
with passes recorded, where no time goes into asking for single kernels. All share the stages, the
initial values and the optimizer with the run. Knows nothing of stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.resident import ResidentTrainer
from trainer.device import Device
from trainer.device_lanes import lanes_of
from trainer.gradients import PlacedSum
from trainer.model.compiled import CompiledBlocks
from trainer.model.stages import Block, Stage
from trainer.pipeline.graphs import HeadWork, Passes
from trainer.plan import Plan
from trainer.recipe_options import options_of
from trainer.tape import Compute
from trainer.timing import StepClock


class Compiled(ResidentTrainer):
    """Resident training without a wait inside a step; blocks compiled, checkpointed if asked."""

    is_checkpointed = False

    @cached_property
    def _blocks(self) -> CompiledBlocks | None:
        return CompiledBlocks() if self.options.compile_blocks else None

    def _run(self, stage: Stage, x: Tensor) -> Tensor:
        if self._blocks is not None and self._blocks.takes(stage):
            return self._blocks.run(stage, self._active(stage), x).to(self.dtype)
        return super()._run(stage, x)

    def _hidden(self, ids: Tensor) -> Tensor:
        x = ids
        for stage in self.trunk:
            if self.is_checkpointed and isinstance(stage, Block):
                x = checkpoint(self._run, stage, x, use_reentrant=False)
            else:
                x = self._run(stage, x)
        return x


class Resident(Compiled):
    """Trains a run's model, from the run's first values."""

    def __init__(self, plan: Plan, *, checkpointed: bool) -> None:
        options = options_of(plan.recipe, plan.settings)
        super().__init__(plan.recipe.model, options, plan.recipe.seed, plan.recipe.device)
        self.is_checkpointed = checkpointed


class Recorded(Resident):
    """Resident and checkpointed, its blocks and head recorded as the pipeline records its own.

    No time goes into asking for single kernels: what is left is what the device needs.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, checkpointed=True)
        device = self.place = Device.from_name(plan.recipe.device)
        self._passes = Passes(lanes_of(device))
        self._compute = Compute(
            device=device, dtype=self.dtype, clock=StepClock(), blocks=self._blocks
        )
        stages = [*self.trunk, self.head]
        self._weights = {
            kind: {
                name: torch.empty(each.shape, dtype=self.dtype, device=device.torch_device)
                for name, each in stage.parameters.items()
            }
            for kind, stage in ((_kind(stage), stage) for stage in stages)
        }
        self._sums = {
            stage.name: {n: torch.empty_like(p) for n, p in self.params[stage.name].items()}
            for stage in stages
        }
        self._steps = 0

    def _cast(self, stage: Stage) -> dict[str, Tensor]:
        masters = {n: p.detach() for n, p in self.params[stage.name].items()}
        if stage.keeps_master_dtype:
            return masters
        cast = self._weights[_kind(stage)]
        torch._foreach_copy_(list(cast.values()), list(masters.values()))
        return cast

    def _accumulate(
        self, micro_batches: Sequence[NDArray[np.int64]], valid: int, loss_scale: float
    ) -> float:
        self._passes.may_record = self._steps > 0
        self._steps += 1
        ids = [torch.from_numpy(rows[:, :-1].copy()).to(self.device) for rows in micro_batches]
        labels = [torch.from_numpy(rows[:, 1:].copy()).to(self.device) for rows in micro_batches]
        inputs, hidden = [], list(ids)
        for stage in self.trunk:
            inputs.append(list(hidden))
            weights = self._cast(stage)
            for index, x in enumerate(hidden):
                hidden[index] = self._passes.forward(self._compute, stage, weights, x)
        work = HeadWork(
            stage=self.head, valid_tokens=valid, chunk_tokens=self.options.lm_head_chunk_tokens
        )
        total = PlacedSum(self._sums[self.head.name])
        loss, gradients = self._passes.head(work, self._cast(self.head), hidden, labels, total)
        for stage in reversed(self.trunk):
            total, weights, given = (
                PlacedSum(self._sums[stage.name]),
                self._cast(stage),
                inputs.pop(),
            )
            for index, x in enumerate(given):
                gradients[index] = self._passes.backward(
                    self._compute, stage, weights, x, gradients[index], total
                )
        for name, shard in self.params.items():
            for tensor, parameter in shard.items():
                parameter.grad = self._sums[name][tensor]
        return float(loss)


def _kind(stage: Stage) -> str:
    return "block" if isinstance(stage, Block) else stage.name
