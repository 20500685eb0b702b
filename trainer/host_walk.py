"""How much host memory the tensors of a step take at their fullest moment, on a CPU.

Owns the walk through a step whose parameters are the store's own memory: no copy of what computes
as it is stored, no tiles, and gradients that wait for the model's norm where it is wanted. Knows
nothing of stores, whose images come on top, nor of the C library's heap. Invariant: nothing is
allocated.

Counted is what PyTorch's CPU allocator hands out, kernels' scratch included. Its blocks have the
size that was asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from shardb import TensorSpec, torch_adaptor
from shardb.layout import build
from trainer.device import ALIGNMENT_BYTES, Device
from trainer.host_updates import PENDING_MAX
from trainer.model.stages import Stage, build_head, build_trunk
from trainer.optimizers.bf16_masters import stored_specs
from trainer.optimizers.tiles import ShardUpdate
from trainer.options import EngineOptions
from trainer.step_walk import StepWalk
from trainer.vram import StepShape, carried_on, make_tables
from trainer.vram_trace import META, HostAttention, MemoryTrace

# Numbers that stand alone, such as steps, sums and norms of each tensor.
SCALARS_BYTES = 4096


def predicted_host_bytes(shape: StepShape) -> int:
    """Give the most bytes that tensors of a step hold on a CPU."""
    return max(predicted_host_phases(shape).values())


def predicted_host_phases(shape: StepShape) -> dict[str, int]:
    """Give the most bytes that each phase of a step holds."""
    phases = carried_on(shape, shape.model.num_layers, shape.accumulation, _walked)
    return {phase: held + SCALARS_BYTES for phase, held in phases.items()}


@lru_cache(maxsize=4096)
def _walked(shape: StepShape, blocks: int) -> Mapping[str, int]:
    config = replace(shape.model, num_layers=blocks)
    make_tables(shape)
    trace = MemoryTrace(block_bytes=lambda size: size)
    with trace, trace.left_out():  # token ids are numpy's
        ids = [
            torch.empty(shape.micro_batch_size, shape.seq_len, dtype=torch.int64, device=META)
            for _ in range(shape.accumulation)
        ]
    walk = _HostWalk(trace, shape.options, build_trunk(config), build_head(config))
    with trace, HostAttention():
        walk.step(ids)
        walk.update_held()
    return trace.peaks


class _HostWalk(StepWalk):
    """A step on a CPU."""

    def __init__(
        self, trace: MemoryTrace, options: EngineOptions, trunk: list[Stage], head: Stage
    ) -> None:
        super().__init__(trace, options, trunk, head)
        self._rule = options.update_rule()
        self._waiting: list[tuple[Stage, dict[str, Tensor]]] = []
        # Updates in a thread of their own hold their gradients while the step goes on.
        self._given: deque[dict[str, Tensor]] = deque(maxlen=PENDING_MAX)

    def bring_in(self, stage: Stage) -> dict[str, Tensor]:
        """Cast what is not stored as it computes, or lies where kernels would round otherwise."""
        dtype = torch.float32 if stage.keeps_master_dtype else self.compute.dtype
        layout = build(stored_specs(stage.specs, self.options.master_weight_dtype))
        stored = torch.float32 if self.options.master_weight_dtype == "fp32" else torch.bfloat16
        found = {}
        for name, parameter in stage.parameters.items():
            is_stored_so = dtype == stored and layout.offsets[name] % ALIGNMENT_BYTES == 0
            with self.trace.left_out() if is_stored_so else nullcontext():
                found[name] = torch.empty(parameter.shape, dtype=dtype, device=META)
        return found

    def update(self, stage: Stage, gradients: dict[str, Tensor]) -> None:
        """Update at once, or hold back until the model's norm is known."""
        if self.options.grad_clip_mode == "global":
            self._waiting.append((stage, gradients))
        else:
            self._update_now(stage, gradients)

    def update_held(self) -> None:
        """Update what waited for the model's norm."""
        self._waiting.reverse()
        with self.trace.phase("update"):
            while self._waiting:
                self._update_now(*self._waiting.pop())

    def _update_now(self, stage: Stage, gradients: dict[str, Tensor]) -> None:
        """Run the rule on old and new values that are the store's memory."""
        if self.options.updates_on_host(stage.name):
            self._given.append(gradients)
        specs = stored_specs(stage.specs, self.options.master_weight_dtype)
        with self.trace.left_out():
            params, new_params = _images(specs), _images(specs)
            state_specs = self._rule.state_specs(stage.specs)
            state, new_state = _images(state_specs), _images(state_specs)
        self._rule.update(
            _HostOnMeta(),
            ShardUpdate(
                name=stage.name,
                params=params,
                state=state,
                new_params=new_params,
                new_state=new_state,
                gradients=gradients,
                gradient_scale=0.5,
                learning_rate=1e-3,
                step=1,
            ),
        )


class _HostOnMeta(Device):
    """A host whose memory has no content."""

    is_host = True

    def __init__(self) -> None:
        super().__init__(META)


def _images(specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    return {
        name: torch.empty(spec.shape, dtype=torch_adaptor.DTYPES[spec.dtype], device=META)
        for name, spec in specs.items()
    }
