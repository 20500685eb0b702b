"""How much memory of a CUDA device a step will take at its fullest moment.

Owns the course of a step as memory sees it: the code that trains is walked through on tensors
without content (`vram_trace`), in the engine's order and with what it holds at the same time. Knows
nothing of stores or of what is free. Invariant: nothing is allocated on any device.

Stages alike are walked through once: with more than three blocks or micro-batches, what two and
three hold is carried on, phase by phase, since each phase holds so much more for each one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from trainer.meta_kernels import without_compiler
from trainer.model.config import ModelConfig
from trainer.model.stages import Block, Stage, build_head, build_trunk
from trainer.options import EngineOptions
from trainer.step_walk import StepWalk
from trainer.vram_trace import META, FusedAttention, MemoryTrace, block_bytes

# cuBLAS keeps eight buffers of 4 MiB for each thread that computes: this one and autograd's.
WORKSPACE_BYTES = 2 * (32 << 20)
TILE_BYTES = 4 << 20
# Tiles of fp32 that an update holds at a time: values, gradient, and what the rule makes of them.
TILES = {"adamw": 4, "lion": 5}
# Tensors of the largest tensor's size that Adafactor holds: value, gradient and three of its own.
ADAFACTOR_TENSORS = 5
# Decoding to fp32 and roots in float64 of encoded state; hashes of stochastic rounding.
ENCODED_TILES = 12
# What small products take beside their workspace: at most 4.1 MB more than the walk said, on an
# H200 over the grid of `tools/bench/vram_grid.py`.
LEFT_OUT_BYTES = 5 << 20
WALKED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """What decides a step's memory on a device."""

    model: ModelConfig
    options: EngineOptions
    micro_batch_size: int
    accumulation: int
    seq_len: int


# Gives the most that each phase holds, of a step with so many blocks.
Walker = Callable[[StepShape, int], Mapping[str, int]]


def predicted_bytes(shape: StepShape) -> int:
    """Give the most bytes that tensors of a step hold on a CUDA device, a little above."""
    return max(predicted_phases(shape).values())


def predicted_phases(shape: StepShape) -> dict[str, int]:
    """Give the most bytes that each phase of a step holds."""
    phases = carried_on(shape, shape.model.num_layers, shape.accumulation, _walked)
    lasting = WORKSPACE_BYTES + LEFT_OUT_BYTES + lasting_bytes(shape)
    return {name: held + lasting for name, held in phases.items()}


def carried_on(
    shape: StepShape, blocks: int, batches: int, walked: Walker, blocks_walked: int = WALKED
) -> dict[str, int]:
    """Walk through what is small enough; carry each phase on in a straight line beyond it."""
    if blocks > blocks_walked:
        two, three = (
            carried_on(shape, n, batches, walked, blocks_walked)
            for n in (blocks_walked - 1, blocks_walked)
        )
        return _line(two, three, blocks - blocks_walked)
    if batches > WALKED:
        two, three = (
            carried_on(shape, blocks, n, walked, blocks_walked) for n in (WALKED - 1, WALKED)
        )
        return _line(two, three, batches - WALKED)
    # A chunk is never longer than a micro-batch: then both are one walk.
    chunk = min(shape.options.lm_head_chunk_tokens, shape.micro_batch_size * shape.seq_len)
    options = replace(shape.options, lm_head_chunk_tokens=chunk)
    with without_compiler():
        return dict(walked(replace(shape, options=options, accumulation=batches), blocks))


def _line(two: Mapping[str, int], three: Mapping[str, int], more: int) -> dict[str, int]:
    return {phase: held + more * max(0, held - two[phase]) for phase, held in three.items()}


def lasting_bytes(shape: StepShape) -> int:
    """Tables of angles, token ids and labels: there during the whole step."""
    ids = block_bytes(8 * shape.micro_batch_size * shape.seq_len)
    return table_bytes(shape) + 2 * shape.accumulation * ids + _ahead_bytes(shape)


def table_bytes(shape: StepShape) -> int:
    """Tables of angles."""
    item = shape.options.torch_dtype.itemsize
    return 2 * block_bytes(shape.seq_len * shape.model.head_dim * item)


def make_tables(shape: StepShape, *, angles_on_device: bool = False) -> None:
    """Let a block make the tables of angles before counting begins: they last, and count as such.

    angles_on_device: as the blocks of the walk have it; others would make tables of their own.
    """
    size = 1, shape.seq_len, shape.model.hidden_size
    x = torch.empty(size, dtype=shape.options.torch_dtype, device=META)
    Block(shape.model, 0, angles_on_device=angles_on_device).angles(x)


def _ahead_bytes(shape: StepShape) -> int:
    """Parameter shards that were copied ahead to the device."""
    if shape.options.prefetch != "gpu":
        return 0
    sizes = [_stored_bytes(stage) for stage in (*build_trunk(shape.model), build_head(shape.model))]
    return shape.options.prefetch_window * max(sizes)


def _stored_bytes(stage: Stage) -> int:
    return sum(4 * _count(parameter.shape) for parameter in stage.parameters.values())


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


@lru_cache(maxsize=4096)
def _walked(shape: StepShape, blocks: int) -> Mapping[str, int]:
    """Walk through a step with so many blocks; give the peak of each phase."""
    config = replace(shape.model, num_layers=blocks)
    make_tables(shape)
    ids = [
        torch.empty(shape.micro_batch_size, shape.seq_len, dtype=torch.int64, device=META)
        for _ in range(shape.accumulation)
    ]
    walk = _DeviceWalk(MemoryTrace(), shape.options, build_trunk(config), build_head(config))
    with walk.trace, FusedAttention():
        walk.step(ids)
    return walk.trace.peaks


class _DeviceWalk(StepWalk):
    """A step on a CUDA device, stage by stage, the plain way."""

    def bring_in(self, stage: Stage) -> dict[str, Tensor]:
        """Copy stored fp32 to the device, one tensor after the other, then cast it."""
        dtype = torch.float32 if stage.keeps_master_dtype else self.compute.dtype
        found = {}
        stored_dtype = (
            torch.float32 if self.options.master_weight_dtype == "fp32" else torch.bfloat16
        )
        for name, parameter in stage.parameters.items():
            stored = torch.empty(parameter.shape, dtype=stored_dtype, device=META)
            found[name] = stored.to(dtype)
        return found

    def update(self, stage: Stage, gradients: dict[str, Tensor]) -> None:
        """Note the tiles of an update; with one norm for all it comes later, when less is held."""
        largest = max(4 * g.numel() for g in gradients.values())
        if self.options.optimizer == "adafactor":
            self.trace.moment(ADAFACTOR_TENSORS * largest)
            return
        tiles = TILES[self.options.optimizer]
        if self.options.optimizer_state_dtype != "fp32":
            tiles += ENCODED_TILES
        if self.options.master_weight_dtype != "fp32":
            tiles += ENCODED_TILES
        self.trace.moment(tiles * TILE_BYTES)
