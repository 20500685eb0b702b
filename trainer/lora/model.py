"""A model with adapters as a step sees it: its stages, and the order in which a pass visits them.

Owns that order. Knows nothing of transactions or batches. The embeddings are visited on the way
forward alone, since nothing below the first block is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trainer.head import HeadWork
from trainer.lora import compiled_head, nf4
from trainer.lora.compiled import CompiledAdapted
from trainer.lora.compiled_head import CompiledHead
from trainer.lora.feeding import DeviceBase
from trainer.lora.host_base import HostBase
from trainer.lora.recorded import is_worth_recording
from trainer.lora.slots import SlotPool, placed_bytes
from trainer.lora.stages import AdaptedStage, adapted
from trainer.lora.targets import check_targets
from trainer.model.adapter_settings import LoraSettings
from trainer.step_model import StepModel


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedModel:
    """The stages of a model with adapters, and the slots that their weights pass through."""

    step: StepModel
    trunk: Sequence[AdaptedStage]
    head: AdaptedStage
    pool: SlotPool
    base: DeviceBase | None = None
    head_work: HeadWork | None = None

    @classmethod
    def of(
        cls,
        model: StepModel,
        lora: LoraSettings,
        *,
        poison: bool = False,
        base: DeviceBase | None = None,
        copies: HostBase | None = None,
    ) -> AdaptedModel:
        """Give a model adapters; InputError where a target is no module of it.

        base: what brings frozen stages to a device ahead of their use; one after the other without.
        copies: as of `SlotPool`.
        """
        check_targets(model.trunk, lora)
        trunk = [adapted(stage, lora) for stage in model.trunk]
        head = adapted(model.head, lora)
        recorder = None if base is None else base.recorder
        blocks = CompiledAdapted(recorder) if model.options.compile_blocks else None
        return cls(
            step=replace(model, trunk=trunk, head=head, blocks=blocks),
            trunk=trunk,
            head=head,
            pool=slot_pool(model, trunk, poison=poison, copies=copies),
            base=base,
            head_work=CompiledHead() if is_head_compiled(model, is_host=base is None) else None,
        )

    @property
    def owners(self) -> list[AdaptedStage]:
        """Give the stages that have adapters, in forward order."""
        return [stage for stage in self.trunk if stage.parameters]

    @property
    def backward(self) -> list[AdaptedStage]:
        """Give the stages that gradients pass through, the last first."""
        return backward_order(self.trunk)

    def gradient_order(self) -> list[AdaptedStage]:
        """Give the visits of a pass that takes gradients."""
        return [*self.trunk, self.head, *self.backward]

    def begin_pass(self, tokens: int) -> None:
        """Say how large micro-batches are; passes may be recorded once one was made without."""
        blocks, base = self.step.blocks, self.base
        if base is None or not isinstance(blocks, CompiledAdapted) or blocks.recorder is None:
            return
        block = next(stage for stage in self.trunk if stage.is_block)
        is_worth = is_worth_recording(block.inner, tokens)
        blocks.recorder.tokens_max = tokens if is_worth else 0
        blocks.recorder.may_record = is_worth and base.passes > 0
        is_unpacked = block.is_packed and self.step.options.torch_dtype == torch.bfloat16
        base.unpacked.keep(block if is_worth and is_unpacked else None)
        base.passes += 1

    def form(self, stage: AdaptedStage) -> torch.dtype | None:
        """Give the dtype in which a stage's weights are brought in; None is as they are stored."""
        return None if stage.is_table else self.step.options.torch_dtype


def is_head_compiled(model: StepModel, *, is_host: bool) -> bool:
    """Say whether the head's loss is compiled beside blocks: on a device, where it is native."""
    return not is_host and model.options.compile_blocks and compiled_head.takes(model.head)


def backward_order(trunk: Sequence[AdaptedStage]) -> list[AdaptedStage]:
    """Give the stages of a trunk that gradients pass through, the last first."""
    first = next(i for i, stage in enumerate(trunk) if stage.parameters)
    return list(reversed(trunk[first:]))


def slot_pool(
    model: StepModel,
    trunk: Sequence[AdaptedStage],
    *,
    poison: bool = False,
    copies: HostBase | None = None,
) -> SlotPool:
    """Give a slot for a model's largest block."""
    size = slot_bytes(trunk, model.options.torch_dtype)
    return SlotPool(model.device, slot_bytes=size, poison=poison, copies=copies)


def slot_bytes(trunk: Sequence[AdaptedStage], dtype: torch.dtype) -> int:
    """Give what the largest block takes in a slot."""
    return max(brought_bytes(stage, dtype) for stage in trunk if stage.is_block)


def brought_bytes(stage: AdaptedStage, dtype: torch.dtype) -> int:
    """Give what a stage's weights take in a slot."""
    if stage.is_packed:
        return placed_bytes(nf4.packed_shapes(stage.inner), dtype.itemsize)
    shapes = {name: (each.shape, 0) for name, each in stage.inner.parameters.items()}
    return placed_bytes(shapes, dtype.itemsize)
