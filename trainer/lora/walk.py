"""How much memory the tensors of a step with adapters take at their fullest moment.

Owns the walk through such a step on tensors without content, in the order of `trainer.lora.step`
and with what it holds at the same time. Knows nothing of stores or of what is free. Invariant:
nothing is allocated. Weights are counted as brought into slots, as they are where their stored form
is not the one that computes; where it is, a host needs less.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import ClassVar

import torch
from torch import Tensor

from trainer.clipping import tensor_norms, total_norm
from trainer.device import Device
from trainer.gradients import GradientSum, taken
from trainer.head import head_backward
from trainer.host_walk import SCALARS_BYTES
from trainer.lora import compiled_head
from trainer.lora.away import AwayTape
from trainer.lora.compiled_head import WalkedHead
from trainer.lora.compiled_walk import WalkedBlocks
from trainer.lora.exact_trace import ExactTrace
from trainer.lora.feeding import SLOTS
from trainer.lora.forms import whole
from trainer.lora.ledger_tape import tape_of
from trainer.lora.model import backward_order, brought_bytes, slot_bytes
from trainer.lora.recorded_walk import with_recordings
from trainer.lora.slots import Lease
from trainer.lora.stages import AdaptedStage, adapted, leased
from trainer.lora.targets import linear_modules
from trainer.lora.update_walk import walk_update
from trainer.lora.waiting_walk import WalkedWaiting
from trainer.model.adapter_settings import LoraSettings
from trainer.model.handed import handed_bytes
from trainer.model.micro_batch import drop_keys, stand_ins
from trainer.model.stages import build_head, build_trunk
from trainer.placement import Boundary
from trainer.step_walk import away_boundary, kind_of
from trainer.tape import Compute, Tape
from trainer.timing import StepClock
from trainer.vram import WORKSPACE_BYTES, StepShape, carried_on, make_tables
from trainer.vram_trace import META, FusedAttention, HostAttention, MemoryTrace

# Of 4-bit values, of their scales, and the library's own copy of those: a process has them as soon
# as it packs, whatever it trains.
CODE_TABLES = (4 * 16, 4 * 256, 4 * 256)


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
    found = {phase: held + WORKSPACE_BYTES for phase, held in phases.items()}
    return with_recordings(found, shape, lora, ExactTrace)


@lru_cache(maxsize=4096)
def _walked(
    shape: StepShape, blocks: int, *, lora: LoraSettings, is_host: bool
) -> Mapping[str, int]:
    trace = MemoryTrace(block_bytes=lambda size: size) if is_host else ExactTrace()
    lasting = walk_through(shape, blocks, lora, trace, is_host=is_host)
    return {phase: held + lasting for phase, held in trace.peaks.items()}


def walk_through(
    shape: StepShape, blocks: int, lora: LoraSettings, trace: MemoryTrace, *, is_host: bool
) -> int:
    """Walk through a step with so many blocks; give what lasts and `trace` has not seen."""
    config = replace(shape.model, num_layers=blocks)
    dtype = shape.options.torch_dtype
    make_tables(shape, angles_on_device=True)
    trunk = [adapted(stage, lora) for stage in build_trunk(config)]
    walk_of = _HostWalk if is_host else _DeviceWalk
    walk = walk_of(trace, shape, trunk, adapted(build_head(config), lora))
    with trace, trace.left_out():  # a host's are numpy's
        ids = [
            torch.empty(shape.micro_batch_size, shape.seq_len, dtype=torch.int64, device=META)
            for _ in range(shape.accumulation)
        ]
    # What layers of transformers are handed lasts as well; it is made before counting begins.
    is_apart = shape.options.records_apart  # then it is made for each micro-batch, and counted
    handed = 0 if is_apart else handed_bytes(config, shape.micro_batch_size, shape.seq_len, dtype)
    with trace, HostAttention() if is_host else FusedAttention():
        walk.step(ids)
    return handed


class _AdapterWalk(ABC):
    """One step; `trace` has what it holds, phase by phase."""

    is_host: ClassVar[bool]

    def __init__(
        self,
        trace: MemoryTrace,
        shape: StepShape,
        trunk: Sequence[AdaptedStage],
        head: AdaptedStage,
    ) -> None:
        self._trace = trace
        self._shape = shape
        self._trunk = trunk
        self._backward = backward_order(trunk)
        self._head = head
        self._dtype = shape.options.torch_dtype
        self._kept = shape.options.activations
        keys = drop_keys(trunk[0].lora.dropout, seed=0, step=1, count=shape.accumulation)
        placement = shape.options.activation_placement
        self._spills = placement == "spill" and not self.is_host
        self._away = WalkedWaiting(trace) if placement == "host" and not self.is_host else None
        compute = Compute(
            device=Device(META),
            dtype=self._dtype,
            clock=StepClock(),
            new_boundary=away_boundary if self._spills else list,
        )
        if shape.options.compile_blocks:
            compute = replace(compute, blocks=WalkedBlocks(is_host=self.is_host))
        self._compute = compute.knowing(keys)
        self._slots: list[Tensor] = []

    def step(self, ids: Sequence[Tensor]) -> None:
        """Walk through a step on ids [B, T], one a micro-batch."""
        if self._shape.options.records_apart:
            on_host = bool(self._shape.model.hf_config)
            self._compute = self._compute.knowing(documents=stand_ins(ids, on_host=on_host))
        self.begin()
        adapters = self.adapters()
        first = len(self._trunk) - len(self._backward)
        tapes: list[Tape] = []
        hidden = list(ids)
        for place, stage in enumerate(self._trunk):
            with self._trace.phase(f"forward {kind_of(stage)}"), self._visit(stage):
                params = adapters[stage.name]
                if self._away is None:
                    inputs = tapes[-1].outputs if tapes else ids
                    given = (stage, self._compute, params, inputs)
                    kept = self._kept if place >= first else "recompute"
                    tapes.append(tape_of(*given, activations=kept))
                else:
                    to = place if place >= first else None
                    leaves = self._kept == "attention" and stage.is_block
                    away = (stage, self._compute, params, hidden, self._away, to)
                    tapes.append(AwayTape(*away, leaves=leaves))
        if self._away is not None:
            self._away.begin_replay([])
        gradients = self._through_head(tapes, ids)
        held: dict[str, dict[str, Tensor]] = {}
        norms: list[Tensor] = []
        for stage in self._backward:
            total = GradientSum()
            with self._trace.phase(f"backward {kind_of(stage)}"):
                with self._visit(stage), stage.binding.replaying():
                    tapes.pop().backward(adapters[stage.name], gradients, total)
                if stage.parameters:
                    held[stage.name] = taken(total.gradients)
                    norms.append(tensor_norms(held[stage.name]))
                    norms.append(total_norm(norms[-1:]))
        with self._trace.phase("update"):
            self.update(held)

    @abstractmethod
    def begin(self) -> None:
        """Take what is there during the whole step."""

    @abstractmethod
    def adapters(self) -> dict[str, dict[str, Tensor]]:
        """Give the adapters as they compute."""

    @abstractmethod
    def update(self, gradients: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go through the update of everything; gradients: by stage."""

    @abstractmethod
    def weights(self, stage: AdaptedStage) -> dict[str, Tensor]:
        """Give a stage's weights as they compute; what has memory of its own is counted."""

    @abstractmethod
    def own(self, stage: AdaptedStage) -> list[Tensor]:
        """Take what a stage has for a visit where it has no slot."""

    def left_out_weights(self, stage: AdaptedStage) -> dict[str, Tensor]:
        """Give weights that are counted elsewhere, or that are not this memory's."""
        with self._trace.left_out():
            return self.empty_weights(stage)

    def empty_weights(self, stage: AdaptedStage) -> dict[str, Tensor]:
        """Give weights of a stage's shapes."""
        return {
            name: torch.empty(parameter.shape, dtype=self._dtype, device=META)
            for name, parameter in stage.inner.parameters.items()
        }

    def _through_head(self, tapes: list[Tape], ids: Sequence[Tensor]) -> Boundary:
        with self._trace.phase("head"), self._visit(self._head):
            found = head_backward(
                self._head,
                {},
                tapes[-1].outputs,
                ids,
                valid_tokens=1,
                chunk_tokens=self._shape.options.lm_head_chunk_tokens,
                into=self._compute.new_boundary(),
                work=WalkedHead() if self._is_head_compiled else None,
            )
            tapes[-1].outputs.clear()
        self._loss = found.loss_sum  # a device is asked for it behind the way back
        return found.hidden

    @property
    def _is_head_compiled(self) -> bool:
        is_asked = self._shape.options.compile_blocks and not self.is_host
        return is_asked and compiled_head.takes(self._head.inner)

    @contextmanager
    def _visit(self, stage: AdaptedStage) -> Iterator[None]:
        own, weights = self.own(stage), self.weights(stage)
        with leased(stage, Lease(weights, None)):
            del weights
            yield
        own.clear()


class _HostWalk(_AdapterWalk):
    """Where the host computes: adapters and values of an update are the store's own memory."""

    is_host = True

    def begin(self) -> None:
        """See `_AdapterWalk`."""
        self._slot_bytes = slot_bytes(self._trunk, self._dtype)
        self._slots = [_memory(self._slot_bytes)]

    def adapters(self) -> dict[str, dict[str, Tensor]]:
        """See `_AdapterWalk`."""
        with self._trace.left_out():
            return {stage.name: _empty_adapters(stage) for stage in self._trunk}

    def update(self, gradients: Mapping[str, Mapping[str, Tensor]]) -> None:
        """See `_AdapterWalk`."""

    def weights(self, stage: AdaptedStage) -> dict[str, Tensor]:
        """See `_AdapterWalk`."""
        return self.left_out_weights(stage)

    def own(self, stage: AdaptedStage) -> list[Tensor]:
        """What is larger than a slot takes memory of its own; so does what is unpacked."""
        needed = brought_bytes(stage, self._dtype)
        is_kept = stage.is_table or stage.is_block
        own = [_memory(needed)] if needed > self._slot_bytes and not is_kept else []
        if stage.is_packed:
            own.append(_memory(unpacked_bytes(stage, self._dtype)))
        return own


class _DeviceWalk(_AdapterWalk):
    """On a device: stages come through slots, adapters in one run of bytes each way."""

    is_host = False

    def begin(self) -> None:
        """Take what lasts, the slots of blocks, and what others have from a pass's beginning."""
        shape, config = self._shape, self._head.config
        tables = 2 * [shape.seq_len * config.head_dim * self._dtype.itemsize]
        labels = 8 * shape.micro_batch_size * shape.seq_len
        # One run of bytes; where masks are made of them, ids and labels of each micro-batch.
        is_apart, count = shape.options.records_apart, shape.accumulation
        batches = 2 * count * [labels] if is_apart else [count * labels]
        self._lasting = [_memory(size) for size in (*tables, *batches, *CODE_TABLES)]
        size = slot_bytes(self._trunk, self._dtype)
        self._slots = [_memory(size) for _ in range(SLOTS)]
        order = [*self._trunk, self._head, *self._backward]
        others = [stage for stage in order if not stage.is_block and not stage.is_table]
        self._uses = Counter(stage.shard for stage in others)
        self._others = {s.shard: _memory(brought_bytes(s, self._dtype)) for s in others}

    def adapters(self) -> dict[str, dict[str, Tensor]]:
        """See `_AdapterWalk`."""
        self._adapters = _memory(self._adapter_bytes)
        with self._trace.left_out():
            return {stage.name: _empty_adapters(stage) for stage in self._trunk}

    @property
    def _adapter_bytes(self) -> int:
        shapes = [p.shape for stage in self._trunk for p in stage.parameters.values()]
        return sum(whole(4 * math.prod(shape)) for shape in shapes)

    def update(self, gradients: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go through it; then the rows are looked up that the next step begins with."""
        shape, width = self._shape, self._head.config.hidden_size
        walk_update(self._trace, self._trunk, gradients, shape.options.update_rule())
        _memory(shape.micro_batch_size * shape.seq_len * width * self._dtype.itemsize)

    def weights(self, stage: AdaptedStage) -> dict[str, Tensor]:
        """What is unpacked has memory of its own for a visit."""
        if stage.is_packed and self._dtype == torch.bfloat16:
            return self.empty_weights(stage)
        return self.left_out_weights(stage)

    def own(self, stage: AdaptedStage) -> list[Tensor]:
        """What is no block gives its memory up behind its last visit."""
        if stage.shard in self._others and not stage.is_table:  # a tied head's is the table's
            self._uses[stage.shard] -= 1
            if not self._uses[stage.shard]:
                return [self._others.pop(stage.shard)]
        if stage.is_packed and self._dtype != torch.bfloat16:
            return [_memory(unpacked_bytes(stage, self._dtype))]
        return []


def unpacked_bytes(stage: AdaptedStage, dtype: torch.dtype) -> int:
    """Give what is unpacked of a block at a time.

    Where it was packed from the dtype that computes, the whole block; else the matrix of a product,
    in the form that it was packed from and in the one that computes.
    """
    sizes = [math.prod(shape) for shape in linear_modules(stage.inner).values()]
    return max(max(sizes) * (4 + dtype.itemsize), sum(sizes) * dtype.itemsize)


def _memory(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=META)


def _empty_adapters(stage: AdaptedStage) -> dict[str, Tensor]:
    return {n: torch.empty(each.shape, device=META) for n, each in stage.parameters.items()}
