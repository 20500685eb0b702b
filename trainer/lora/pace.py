"""What a visit to a block takes where there is next to nothing to compute, and what a value takes.

Owns the two short measurements that forecasts of small steps need: the time in which an operation
is asked for, of a block with adapters so small that nothing else takes time, through the code that
trains; and the time in which a value passes through an operation that is no product. Knows nothing
of runs. They are the least of a few repeats, and a step's own are never less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.ceiling import shortest_seconds
from trainer.device import Device
from trainer.gradients import GradientSum
from trainer.lora import nf4
from trainer.lora.forms import form_of
from trainer.lora.slots import Lease
from trainer.lora.stages import AdaptedStage, adapted, leased
from trainer.lora.targets import linear_modules
from trainer.lora.work import block_calls
from trainer.model import layers
from trainer.model.adapter_settings import LoraSettings
from trainer.model.config import ModelConfig
from trainer.model.stages import Block, build_trunk
from trainer.options import EngineOptions
from trainer.tape import Compute, ReplayTape
from trainer.timing import StepClock
from trainer.vram import StepShape

# The smallest matrices that can be packed.
SMALL = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=64,
    max_position_embeddings=4,
)
VISITS = 4
HOST_VALUES, DEVICE_VALUES = 4 << 20, 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """call_seconds: to ask for an operation; value_seconds: of an fp32 value in one."""

    call_seconds: float
    value_seconds: float


def measure_pace(shape: StepShape, lora: LoraSettings, device: Device) -> Pace:
    """Measure both for steps of a model; some hundredths of a second."""
    small = small_lora(shape.model, lora)
    options = EngineOptions(dtype=shape.options.dtype, activations=shape.options.activations)
    if options.activations == "attention":
        options = replace(options, activations="recompute")
    visited = StepShape(
        model=SMALL,
        options=options,
        micro_batch_size=1,
        accumulation=1,
        seq_len=SMALL.max_position_embeddings,
    )
    visit = _Visit(adapted(Block(SMALL, 0), small), device, options.torch_dtype)
    visit.both_ways()
    seconds = shortest_seconds(visit.several, device) / VISITS
    found = Pace(
        call_seconds=seconds / block_calls(visited, small), value_seconds=_value_seconds(device)
    )
    device.drop_workspaces()  # of autograd's thread, which a step may have no use for
    layers.rotary_angles.cache_clear()  # a step has no use for the small block's tables
    return found


def small_lora(model: ModelConfig, lora: LoraSettings) -> LoraSettings:
    """Give settings with as many targets in a small block as there are in a model's."""
    blocks = [linear_modules(stage) for stage in build_trunk(model)]
    count = max(sum(lora.is_target(module) for module in block) for block in blocks)
    known = [name.rpartition(".")[2] for name in linear_modules(Block(SMALL, 0))]
    targets = tuple(known[: max(1, count)])
    return LoraSettings(rank=1, alpha=1.0, targets=targets, base_quant=lora.base_quant)


class _Visit:
    """A block on a device, and its two visits in a step."""

    def __init__(self, stage: AdaptedStage, device: Device, dtype: torch.dtype) -> None:
        self._stage = stage
        self._dtype = dtype
        self._compute = Compute(device=device, dtype=dtype, clock=StepClock())
        place = device.torch_device
        weights = {
            name: torch.ones(each.shape, dtype=torch.bfloat16, device=place)
            for name, each in stage.inner.parameters.items()
        }
        if stage.is_packed:
            weights = nf4.quantise(stage.inner, weights, place)
        self._brought = {
            name: each.to(place, form_of(name, each, dtype)) for name, each in weights.items()
        }
        self._params = {
            name: torch.ones(each.shape, device=place) for name, each in stage.parameters.items()
        }
        self._x = torch.ones(
            1, SMALL.max_position_embeddings, SMALL.hidden_size, dtype=dtype, device=place
        )

    def several(self) -> None:
        """Make several of both visits: a device is asked for one after the other."""
        for _ in range(VISITS):
            self.both_ways()

    def both_ways(self) -> None:
        """Go forward through the block, and compute it again and go back."""
        with self._visited():
            tape = ReplayTape(self._stage, self._compute, self._params, [self._x])
        with self._visited(), self._stage.binding.replaying():
            tape.backward(self._params, [self._x], GradientSum())

    @contextmanager
    def _visited(self) -> Iterator[None]:
        brought: Mapping[str, Tensor] = self._brought
        if self._stage.is_packed and self._dtype == torch.bfloat16:
            brought = nf4.unpacked(self._stage.inner, brought, self._dtype)
        with leased(self._stage, Lease(brought, None)):
            yield


def _value_seconds(device: Device) -> float:
    count = HOST_VALUES if device.is_host else DEVICE_VALUES
    values = torch.ones(count, device=device.torch_device)
    found = torch.empty_like(values)
    return shortest_seconds(lambda: torch.exp(values, out=found), device) / count
