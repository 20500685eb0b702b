"""Causal attention each way by itself, so that what its first pass gave can be kept.

Owns which kernel computes it and what that one's way back needs: queries, keys, values, the output
and the sums behind it. Knows nothing of blocks. Invariants: a kernel gives the same bits each time
it is called; the way back of a kernel is fed by that kernel alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.device import has_tensor_copies
from trainer.lora.cudnn_graph import CudnnBack, NoKernelError
from trainer.model.layers import causal_attention

# What a fused kernel can take of a head.
WIDTH_MULTIPLE, WIDTH_MAX, CUDNN_WIDTH_MAX = 8, 256, 128
CPU_FUSED = 1


class Attention(Protocol):
    """One kernel; heads [B, H, T, K], those of keys and values may be fewer."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Give the output and its sums."""
        ...

    def back(
        self, gradient: Tensor, heads: tuple[Tensor, Tensor, Tensor], mixed: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Give the gradients of queries, keys and values."""
        ...


class HostFused:
    """A processor's kernel."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention`."""
        call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mixed, sums = call(query, key, value, 0.0, True)
        return mixed, sums

    def back(
        self, gradient: Tensor, heads: tuple[Tensor, Tensor, Tensor], mixed: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention`."""
        call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query, key, value = call(gradient, *heads, mixed, sums, 0.0, True)
        return query, key, value


class Flash:
    """PyTorch's own kernel in half precision."""

    def __init__(self) -> None:
        self._rest: dict[torch.Size, tuple[Any, ...]] = {}

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention`."""
        call = torch.ops.aten._scaled_dot_product_flash_attention
        mixed, sums, cum_q, cum_k, max_q, max_k, *seeds = call(query, key, value, 0.0, True)[:8]
        # Nothing is drawn without dropout: what a call gives beside is the same for each.
        self._rest.setdefault(query.shape, (cum_q, cum_k, max_q, max_k, 0.0, True, *seeds))
        return mixed, sums

    def back(
        self, gradient: Tensor, heads: tuple[Tensor, Tensor, Tensor], mixed: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention`."""
        call = torch.ops.aten._scaled_dot_product_flash_attention_backward
        rest = self._rest[heads[0].shape]
        query, key, value = call(gradient, *heads, mixed, sums, *rest)
        return query, key, value


class CudnnThere(Flash):
    """cuDNN's kernel there, which takes half the time, and PyTorch's own back.

    What cuDNN adds up on its way back comes out otherwise from time to time. PyTorch's kernel needs
    the output and the logarithms of sums alone, which are the same of both.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unable: set[torch.Size] = set()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention`; heads that cuDNN has no kernel for go PyTorch's way."""
        if query.shape not in self._rest:  # what the way back takes beside
            super().forward(query, key, value)
        call = torch.ops.aten._scaled_dot_product_cudnn_attention
        if query.shape not in self._unable:
            try:
                mixed, sums = call(query, key, value, None, True, 0.0, True)[:2]
                return mixed, sums.view(query.shape[:3])
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                self._unable.add(query.shape)
        return super().forward(query, key, value)


class CudnnBoth(CudnnThere):
    """cuDNN's kernels both ways, where its own interface is there to ask for a fixed order."""

    def __init__(self) -> None:
        super().__init__()
        self._back = CudnnBack()
        self._without: set[torch.Size] = set()

    def back(
        self, gradient: Tensor, heads: tuple[Tensor, Tensor, Tensor], mixed: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention`."""
        if mixed.shape not in self._without:
            try:
                return self._back(gradient, heads, mixed, sums)
            except NoKernelError:
                self._without.add(mixed.shape)
        return super().back(gradient, heads, mixed, sums)


class Chosen:
    """What PyTorch itself chooses: its way back computes the output again, and has no sums."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention`."""
        return causal_attention(query, key, value), query.new_empty(0)

    def back(
        self, gradient: Tensor, heads: tuple[Tensor, Tensor, Tensor], mixed: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention`."""
        leaves = [each.detach().requires_grad_() for each in heads]
        with torch.enable_grad():
            again = causal_attention(*leaves)
        query, key, value = torch.autograd.grad(again, leaves, gradient)
        return query, key, value


def attention_for(query: Tensor, key: Tensor, value: Tensor) -> Attention:
    """Give what computes attention for heads of this form, on their device."""
    width = query.shape[-1]
    if query.device.type == "cpu":
        given = (query, key, value, None, 0.0, True)
        choice = torch._fused_sdp_choice(*given, enable_gqa=query.shape[1] != key.shape[1])
        return HostFused() if choice == CPU_FUSED else Chosen()
    if query.dtype.itemsize == 2 and width % WIDTH_MULTIPLE == 0 and width <= WIDTH_MAX:
        by_cudnn = width <= CUDNN_WIDTH_MAX and has_tensor_copies(query.device)
        return CudnnBoth() if by_cudnn else Flash()
    return Chosen()
