"""Counts what a computation holds at its fullest moment, without a byte of memory behind it.

Owns the counting: tensors on torch's `meta` device have shapes and lifetimes, but no content, so a
step can be walked through in milliseconds and every storage that lives is known. Knows nothing of
steps. Invariants: a storage counts from its making until its last holder is gone, autograd's saved
tensors included; attention counts as the fused kernel that a CUDA device runs, not as its formula.

Sizes are those of PyTorch's caching allocator: multiples of 512 bytes; a block of 10 MiB and more
ends on 2 MiB where less than 1 MiB would be left of it.
Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

META = torch.device("meta")
ROUNDED_TO, LARGE_BLOCK, SEGMENT = 512, 10 << 20, 2 << 20
# Positions in a fused kernel's sums are padded to this, heads to that.
POSITIONS_PADDED_TO, HEAD_PADDED_TO = 128, 32
# Multiprocessors of the largest device known: a deterministic backward pass sums in as many parts
# as it needs to keep them busy.
MULTIPROCESSORS = 132


def block_bytes(size: int) -> int:
    """Give what the allocator takes for a tensor of `size` bytes."""
    size = -(-size // ROUNDED_TO) * ROUNDED_TO
    left = -size % SEGMENT
    return size + left if size >= LARGE_BLOCK and left <= SEGMENT // 2 else size


class MemoryTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages on `meta`; `peaks` has the most bytes by phase."""

    def __init__(self, block_bytes: Callable[[int], int] = block_bytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self._block_bytes = block_bytes
        self._counts = True
        self.peaks: dict[str, int] = {}
        self._phase = ""
        self._known: dict[int, weakref.finalize[Any, Any]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what follows under a name."""
        outer, self._phase = self._phase, name
        self.moment(0)
        try:
            yield
        finally:
            self._phase = outer

    @property
    def current(self) -> str:
        """Give the name of the phase that is counted."""
        return self._phase

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Do not count what is made inside: it is somebody else's memory."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def moment(self, extra_bytes: int) -> None:
        """Note that so many bytes more than what lives are held for a moment."""
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.live_bytes + extra_bytes)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # any number: what is computed has no say in what is held
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.device == META:
                self._meet(value.untyped_storage())
        self.moment(_inside(func, args))
        return result

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = self._block_bytes(storage.nbytes()) if self._counts else 0
        self.live_bytes += size
        self._known[key] = weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.live_bytes -= size
        del self._known[key]


class FusedKernel(TorchFunctionMode, ABC):
    """Puts the memory of a fused kernel in the place of a formula."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = self.in_place_of(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if found is None else found

    @abstractmethod
    def in_place_of(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Give what the kernel makes of a call; None: the call is computed as it is."""


class HostAttention(FusedKernel):
    """The CPU's kernel of attention."""

    def in_place_of(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See `FusedKernel`."""
        if func is F.scaled_dot_product_attention:
            mask = _mask_of(args, kwargs)
            return _HostFused.apply(*args[:3], mask)  # type: ignore[no-untyped-call]
        return None


def _mask_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Give a mask as kernels take it: one of bools becomes numbers of the queries' dtype first."""
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.empty(mask.shape, dtype=args[0].dtype, device=mask.device)


class _HostFused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        rows, heads, positions, _ = query.shape
        # Laid out as the queries are: merging heads copies where those are laid out by head.
        output = torch.empty_like(query)
        sums = query.new_empty(rows, positions, heads, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums, mask)
        return output

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, _output, _sums, _mask = ctx.saved_tensors
        return *host_attention_back(query, key, value), None


def host_attention_back(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hold what the CPU's kernel holds on its way back."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class FusedAttention(FusedKernel):
    """A CUDA device's kernel of attention."""

    def in_place_of(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See `FusedKernel`."""
        if func is F.scaled_dot_product_attention:
            query, key, value = args[:3]
            if is_fused(query, key):
                return _Fused.apply(query, key, value)  # type: ignore[no-untyped-call]
        return None  # PyTorch computes the formula


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, positions, width = query.shape
        # The half-precision kernel lays its output out as the queries are, the other one as the
        # projections are: then merging heads makes no copy.
        output = (
            torch.empty_like(query)
            if query.dtype.itemsize == 2
            else query.new_empty(rows, positions, heads, width).transpose(1, 2)
        )
        sums = query.new_empty(rows, heads, _padded(positions, 32), dtype=torch.float32)
        # The state of random numbers, where there are none too.
        seeds = query.new_empty(2, dtype=torch.int64), query.new_empty(1, dtype=torch.int64)
        ctx.save_for_backward(query, key, value, output, sums, *seeds)
        return output

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_others = ctx.saved_tensors
        return attention_back(query, key, value)


def is_fused(query: Tensor, key: Tensor) -> bool:
    """Say whether a CUDA device has a kernel: in fp32 none shares key heads."""
    return query.dtype.itemsize == 2 or query.shape[1] == key.shape[1]


def attention_back(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hold what a CUDA device's kernel holds on its way back."""
    beside = [query.new_empty(size, dtype=torch.uint8) for size in _back_sizes(query, key)]
    found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    del beside
    return found


def attention_back_bytes(query: Tensor, key: Tensor) -> int:
    """Give the bytes that a CUDA device's kernel holds on its way back, beside its results."""
    return sum(_back_sizes(query, key))


def _back_sizes(query: Tensor, key: Tensor) -> list[int]:
    rows, heads, positions, width = query.shape
    padded = _padded(positions, POSITIONS_PADDED_TO)
    parts = 1
    if query.dtype.itemsize == 2:
        parts = max(1, math.ceil(MULTIPROCESSORS / (rows * heads)))
    deltas = rows * heads * padded * 4
    sizes = [parts * deltas * _padded(width, HEAD_PADDED_TO), deltas]
    if heads != key.shape[1]:  # keys and values have a gradient a query head, then a sum
        sizes += [query.numel() * query.element_size()] * 2
    return sizes


def _inside(func: Any, args: tuple[Any, ...]) -> int:
    """Give the bytes that a kernel holds while it runs, beside its inputs and outputs."""
    if func is torch.ops.aten.embedding_dense_backward.default:
        gradient, ids, entries = args[0], args[1], args[2]
        tokens, width = ids.numel(), gradient.shape[-1]
        # Sorted ids, their places, and partial sums: one a distinct id, one in ten tokens.
        return int(6 * 8 * tokens + 4 * width * (min(tokens, entries) + tokens // 10))
    return 0


def _padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
