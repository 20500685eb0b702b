"""How much memory the tensors of a step with adapters take at their fullest moment.

Owns the walk through such a step on tensors without content, in the order of `trainer.lora.step`
and with what it holds at the same time. Knows nothing of stores or of what is free. Invariant:
nothing is allocated. Weights are counted as brought into slots, as they are where their stored form
is not the one that computes; where it is, a host needs less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from trainer.device import Device
from trainer.gradients import GradientSum, taken
from trainer.head import head_backward
from trainer.host_walk import SCALARS_BYTES
from trainer.lora.model import brought_bytes, slot_bytes
from trainer.lora.slots import Lease
from trainer.lora.stages import AdaptedStage, adapted
from trainer.lora.targets import linear_modules
from trainer.model import layers
from trainer.model.adapter_settings import LoraSettings
from trainer.model.micro_batch import drop_keys, stand_ins
from trainer.model.stages import build_head, build_trunk
from trainer.step_walk import kind_of
from trainer.tape import Compute, ReplayTape, Tape
from trainer.timing import StepClock
from trainer.vram import (
    LEFT_OUT_BYTES,
    TILE_BYTES,
    TILES,
    WORKSPACE_BYTES,
    StepShape,
    carried_on,
    lasting_bytes,
)
from trainer.vram_trace import META, FusedAttention, HostAttention, MemoryTrace, block_bytes


def predicted_adapter_bytes(shape: StepShape, lora: LoraSettings, *, is_host: bool) -> int:
    """Give the most bytes that tensors of a step hold on the host or on a CUDA device."""
    return max(predicted_adapter_phases(shape, lora, is_host=is_host).values())


def predicted_adapter_phases(
    shape: StepShape, lora: LoraSettings, *, is_host: bool
) -> dict[str, int]:
    """Give the most bytes that each phase of a step holds."""
    walker = partial(_walked, lora=lora, is_host=is_host)
    phases = carried_on(shape, shape.model.num_layers, shape.accumulation, walker)
    if is_host:
        return {phase: held + SCALARS_BYTES for phase, held in phases.items()}
    lasting = WORKSPACE_BYTES + LEFT_OUT_BYTES + lasting_bytes(shape)
    return {phase: held + lasting for phase, held in phases.items()}


@lru_cache(maxsize=4096)
def _walked(
    shape: StepShape, blocks: int, *, lora: LoraSettings, is_host: bool
) -> Mapping[str, int]:
    config = replace(shape.model, num_layers=blocks)
    dtype = shape.options.torch_dtype
    # Made before counting begins, because it lasts; it is counted as such.
    layers.rotary_angles(
        shape.seq_len, config.head_dim, config.rope_theta, dtype, META, config.rope_scaling
    )
    trace = MemoryTrace(block_bytes=(lambda size: size) if is_host else block_bytes)
    # A packed base is walked through as one that is not, since its products are no torch code.
    plain = replace(lora, base_quant="none")
    trunk = [adapted(stage, plain) for stage in build_trunk(config)]
    packed = [adapted(stage.inner, lora) for stage in trunk]
    walk = _AdapterWalk(trace, shape, trunk, adapted(build_head(config), plain), is_host=is_host)
    walk.slot_bytes = slot_bytes(packed, dtype)
    ids = [
        torch.empty(shape.micro_batch_size, shape.seq_len, dtype=torch.int64, device=META)
        for _ in range(shape.accumulation)
    ]
    with trace, HostAttention() if is_host else FusedAttention():
        walk.step(ids)
    if lora.base_quant == "none":
        return trace.peaks
    unpacked = _unpacked_bytes(trunk, dtype)
    return {p: held + (unpacked if p.endswith("block") else 0) for p, held in trace.peaks.items()}


class _AdapterWalk:
    """One step; `trace` has what it holds, phase by phase."""

    def __init__(
        self,
        trace: MemoryTrace,
        shape: StepShape,
        trunk: Sequence[AdaptedStage],
        head: AdaptedStage,
        *,
        is_host: bool,
    ) -> None:
        self._trace = trace
        self._shape = shape
        self._trunk = trunk
        self._head = head
        self._is_host = is_host
        self._dtype = shape.options.torch_dtype
        keys = drop_keys(trunk[0].lora.dropout, seed=0, step=1, count=shape.accumulation)
        compute = Compute(device=Device(META), dtype=self._dtype, clock=StepClock())
        self._compute = replace(compute.knowing(keys), tracks=not is_host)
        self.slot_bytes = slot_bytes(trunk, self._dtype)
        self._slots: list[Tensor] = []

    def step(self, ids: Sequence[Tensor]) -> None:
        """Walk through a step on ids [B, T], one a micro-batch."""
        if self._shape.options.records_apart:
            on_host = bool(self._shape.model.hf_config)
            self._compute = self._compute.knowing(documents=stand_ins(ids, on_host=on_host))
        count = 1 if self._is_host else 2
        self._slots = [_memory(self.slot_bytes) for _ in range(count)]
        adapters = self._adapters()
        tapes: list[Tape] = []
        for stage in self._trunk:
            inputs = tapes[-1].outputs if tapes else ids
            with self._trace.phase(f"forward {kind_of(stage)}"), self._visit(stage):
                tapes.append(ReplayTape(stage, self._compute, adapters[stage.name], inputs))
        gradients = self._through_head(tapes, ids)
        held = []
        first = next(i for i, stage in enumerate(self._trunk) if stage.parameters)
        for stage in reversed(self._trunk[first:]):
            total = GradientSum()
            with self._trace.phase(f"backward {kind_of(stage)}"), self._visit(stage):
                tapes.pop().backward(adapters[stage.name], gradients, total)
            held.append(taken(total.gradients))
        with self._trace.phase("update"):
            if not self._is_host:  # where old and new values are the store's memory
                self._trace.moment(TILE_BYTES * TILES.get(self._shape.options.optimizer, 5))

    def _through_head(self, tapes: list[Tape], ids: Sequence[Tensor]) -> list[Tensor]:
        with self._trace.phase("head"), self._visit(self._head):
            found = head_backward(
                self._head,
                {},
                tapes[-1].outputs,
                ids,
                valid_tokens=1,
                chunk_tokens=self._shape.options.lm_head_chunk_tokens,
            )
            tapes[-1].outputs.clear()
        return list(found.hidden)

    def _adapters(self) -> dict[str, dict[str, Tensor]]:
        """On a host they are the store's memory."""
        if self._is_host:
            with self._trace.left_out():
                return {stage.name: _empty_adapters(stage) for stage in self._trunk}
        return {stage.name: _empty_adapters(stage) for stage in self._trunk}

    @contextmanager
    def _visit(self, stage: AdaptedStage) -> Iterator[None]:
        """Bind weights; what is larger than a slot takes memory of its own."""
        needed = brought_bytes(stage, self._dtype)
        is_kept = stage.is_table or stage.name.startswith("block_")
        own = [_memory(needed)] if needed > self.slot_bytes and not is_kept else []
        with self._trace.left_out():
            weights = {
                name: torch.empty(parameter.shape, dtype=self._dtype, device=META)
                for name, parameter in stage.inner.parameters.items()
            }
        if not self._is_host:
            # A copy that also casts goes through the stored form of its largest tensor.
            self._trace.moment(max(4 * tensor.numel() for tensor in weights.values()))
        with stage.binding.bound(Lease(weights, None)):
            yield
        own.clear()


def _unpacked_bytes(trunk: Sequence[AdaptedStage], dtype: torch.dtype) -> int:
    """Give what the largest matrix of a block takes while a product has it unpacked, twice over.

    It is unpacked in the form that it was packed from, and then cast to the one that computes.
    """
    shapes = [shape for stage in trunk for shape in linear_modules(stage.inner).values()]
    return max(math.prod(shape) for shape in shapes) * (4 + dtype.itemsize)


def _memory(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=META)


def _empty_adapters(stage: AdaptedStage) -> dict[str, Tensor]:
    return {n: torch.empty(each.shape, device=META) for n, each in stage.parameters.items()}
