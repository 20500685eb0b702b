"""Counts what a device's allocator hands out where it gives tensors what they ask for.

Owns the sizes of its blocks once `Device.split_exactly` was called, and what kernels of a CUDA
device hold inside that those of other devices do not. Knows nothing of steps.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.vram_trace import ROUNDED_TO, MemoryTrace

aten = torch.ops.aten
# Attention that is computed by its formula, which asks after rows of nothing but -inf.
SAFE_SOFTMAX = aten._safe_softmax.default
SOFTMAX_BACKWARD = aten._softmax_backward_data.default


def exact_bytes(size: int) -> int:
    """Give what the allocator takes for a tensor of `size` bytes."""
    return -(-size // ROUNDED_TO) * ROUNDED_TO


class ExactTrace(MemoryTrace):  # type: ignore[no-untyped-call]
    """Counts storages on `meta` as such a device has them."""

    def __init__(self) -> None:
        super().__init__(block_bytes=exact_bytes)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        inside = _inside(func, args)
        if inside:
            self.moment(inside)
        return result


def _inside(func: Any, args: tuple[Any, ...]) -> int:
    if func == SAFE_SOFTMAX:
        scores = args[0]
        rows = scores.numel() // scores.shape[-1]
        return exact_bytes(scores.numel()) + exact_bytes(rows) + 2 * ROUNDED_TO
    if func == SOFTMAX_BACKWARD:  # the product of both is made first
        return exact_bytes(args[0].numel() * args[0].element_size())
    return 0
