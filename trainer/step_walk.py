"""A step as memory sees it: the code that trains, run on tensors without content.

Owns the order of a step and what is held at the same time, as in `GradientPass` and `TrainStep`.
What a kind of memory makes of parameters and updates is left to its own walk: `vram` has those of
a CUDA device, `host_walk` that of a CPU. Knows nothing of stores or of what is free. Invariant:
nothing is allocated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from trainer.device import Device
from trainer.gradients import GradientSum, taken
from trainer.head import head_backward
from trainer.model.micro_batch import stand_ins
from trainer.model.stages import Stage
from trainer.options import EngineOptions
from trainer.placement import AwayBoundary, Boundary, Put
from trainer.tape import Compute, KeptTape, Place, ReplayTape, Tape
from trainer.timing import StepClock
from trainer.vram_trace import META, MemoryTrace


class StepWalk(ABC):
    """One step; `trace` has what it holds, phase by phase."""

    def __init__(
        self, trace: MemoryTrace, options: EngineOptions, trunk: list[Stage], head: Stage
    ) -> None:
        self.trace = trace
        self.options = options
        self._trunk = trunk
        self._head = head
        self._tied = head.config.tied_embeddings
        away = options.activation_placement != "vram"
        self.compute = Compute(
            device=Device(META),
            dtype=options.torch_dtype,
            clock=StepClock(),
            new_boundary=away_boundary if away else list,
        )

    @abstractmethod
    def bring_in(self, stage: Stage) -> dict[str, Tensor]:
        """Give a stage's parameters as it computes with them."""

    @abstractmethod
    def update(self, stage: Stage, gradients: dict[str, Tensor]) -> None:
        """Take finished gradients: use them up, or hold them."""

    def step(self, ids: list[Tensor]) -> None:
        """Walk through a step on ids [B, T], one a micro-batch."""
        if self.options.records_apart:
            on_host = bool(self._head.config.hf_config)
            self.compute = self.compute.knowing(documents=stand_ins(ids, on_host=on_host))
        tapes = self._forward(ids)
        with self.trace.phase("head"):
            params = self.bring_in(self._head)
            found = head_backward(
                self._head,
                params,
                tapes[-1].outputs,
                ids,
                valid_tokens=1,
                chunk_tokens=self.options.lm_head_chunk_tokens,
                into=self.compute.new_boundary(),
            )
            del params
            tapes[-1].outputs.clear()
            if not self._tied:
                self.update(self._head, taken(found.params))
        gradients = found.hidden
        for stage in reversed(self._trunk):
            with self.trace.phase(f"backward {kind_of(stage)}"):
                tape = tapes.pop()
                total = GradientSum(found.params if self._tied and not tapes else None)
                params = self.bring_in(stage)
                tape.backward(params, gradients, total)
                del params, tape
                self.update(stage, taken(total.gradients))

    def _forward(self, ids: list[Tensor]) -> list[Tape]:
        record = _KeptOnMeta if self.options.activations == "keep" else ReplayTape
        tapes: list[Tape] = []
        inputs: Boundary = ids
        for stage in self._trunk:
            with self.trace.phase(f"forward {kind_of(stage)}"):
                params = self.bring_in(stage)
                tapes.append(record(stage, self.compute, params, inputs))
                inputs = tapes[-1].outputs
                del params
        return tapes


class _KeptOnMeta(KeptTape):
    """A tape that tells parameters by their storages: without content they have no address."""

    def _pack(self, saved: Tensor) -> Tensor | Place:
        for name, leaf in self._leaves.items():
            if saved.untyped_storage()._cdata == leaf.untyped_storage()._cdata:
                return Place(name, saved.shape, saved.stride(), int(saved.storage_offset()))
        return saved


class _Away:
    """A shelf that is not in the memory that is walked through."""

    def put(self, tensor: Tensor) -> Put:
        return Put(place=None, shape=tensor.shape, dtype=tensor.dtype)

    def get(self, put: Put) -> Tensor:
        return torch.empty(put.shape, dtype=put.dtype, device=META)

    def drop(self, put: Put) -> None:
        """It holds nothing."""


def away_boundary() -> AwayBoundary:
    """Give a boundary that is not in the memory that is walked through."""
    return AwayBoundary(_Away())


def kind_of(stage: Stage) -> str:
    """Name what a phase is called after: all blocks are alike."""
    return "block" if stage.name.startswith("block_") else stage.name
