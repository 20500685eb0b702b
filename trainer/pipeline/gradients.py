"""The bank: every stage's finished gradients, kept until the model's norm is known.

Knows nothing of norms or updates.
Invariant: what comes out of the bank is what went in, bit for bit: a stage whose gradients are one
bf16 term is kept in bf16, every other in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.device import Device
from trainer.device_lanes import Lane, Lanes, Mark
from trainer.pipeline.shapes import StageShape


class GradientBank:
    """Every stage's gradients, on the device or in host memory."""

    def __init__(self, lanes: Lanes, device: Device, *, on_host: bool) -> None:
        self._lanes = lanes
        self._device = device
        self._on_host = on_host
        self._memory: dict[str, Tensor] = {}
        self._kept: dict[str, Mark | None] = {}

    def keep(self, name: str, shape: StageShape, slot: Tensor, *, half: bool) -> None:
        """Keep a slot's gradients, which COMPUTE has finished; `is_kept` marks when they are."""
        target = self._memory_of(name, shape, torch.bfloat16 if half else torch.float32)
        source = slot[: shape.count]
        if not self._on_host:
            target.copy_(source)
            self._kept[name] = self._lanes.mark(Lane.COMPUTE)
            return
        if half:
            source = source.to(torch.bfloat16)
        self._lanes.wait(Lane.OUT, self._lanes.mark(Lane.COMPUTE))
        with self._lanes.on(Lane.OUT, f"gradients {name}"):
            target.copy_(source, non_blocking=True)
        self._lanes.hold(source, Lane.OUT)
        self._kept[name] = self._lanes.mark(Lane.OUT)

    @property
    def lane(self) -> Lane:
        """The lane that is the last to use a slot when it was kept."""
        return Lane.OUT if self._on_host else Lane.COMPUTE

    def bring(self, name: str, shape: StageShape, slot: Tensor) -> None:
        """Put kept gradients back into a slot, in UPDATE."""
        self._lanes.wait(Lane.UPDATE, self._kept[name])
        with self._lanes.on(Lane.UPDATE, f"gradients {name}"):
            kept = self._memory[name]
            if self._on_host and kept.dtype != torch.float32:
                kept = kept.to(slot.device, non_blocking=True)
            slot[: shape.count].copy_(kept, non_blocking=True)

    def _memory_of(self, name: str, shape: StageShape, dtype: torch.dtype) -> Tensor:
        known = self._memory.get(name)
        if known is not None and known.dtype == dtype:
            return known
        if self._on_host:
            size = shape.count * dtype.itemsize
            memory = self._device.host_buffer(size, "gradients until the norm is known").view(dtype)
        else:
            memory = torch.empty(shape.count, dtype=dtype, device=self._device.torch_device)
        self._memory[name] = memory
        return memory
