"""Attention's way back by cuDNN's own interface, which can be asked for sums in a fixed order.

Owns every use of `cudnn` (the package `nvidia-cudnn-frontend`, extra `cudnn`): PyTorch calls the
same library without asking. Knows nothing of blocks. Invariants: a graph is made once for a form of
heads and computes the same bits each time; where the package is not there, or its library has no
such kernel, nobody is told of a failure but the caller, who has another way.

A fixed order takes memory: a sum of its own for each 256 keys, which grows with the square of the
positions. So rows, and groups of heads that share a key head, are gone through a few at a time,
within what PyTorch's own kernel takes; where one group is too much, that one is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.device import stream_address
from trainer.vram_trace import attention_back_bytes

Form = tuple[tuple[int, ...], ...]
Heads = tuple[Tensor, Tensor, Tensor]
# A call takes a few bytes more.
BESIDE_BYTES = 4096
KEYS_A_SUM, PADDED_TO = 256, 128


class NoKernelError(Exception):
    """There is no such kernel here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Graph:
    """One form of heads; `inputs` and `outputs` are the library's names of tensors."""

    graph: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    workspace_bytes: int


class CudnnBack:
    """The way back; `NoKernelError` where there is none."""

    def __init__(self) -> None:
        self._library: Any = None
        self._handle: Any = None
        self._graphs: dict[tuple[Form, Form, torch.dtype], _Graph] = {}

    def __call__(
        self, gradient: Tensor, heads: Heads, mixed: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Give the gradients of queries, keys and values, laid out as those are."""
        parts = parts_of(*heads[:2])
        query, key, value = found = tuple(torch.empty_like(each) for each in heads)
        given = (*heads, mixed, gradient, sums[..., None], *found)
        room = mixed.new_empty(parts.workspace_bytes, dtype=torch.uint8)
        for tensors in parts.cut(given):
            graph = self._known(tensors[:6])
            if graph.workspace_bytes > room.nbytes:
                raise NoKernelError(f"it takes {graph.workspace_bytes:,} bytes")
            self._library.set_stream(self._handle, stream_address(mixed.device))
            named = dict(zip((*graph.inputs, *graph.outputs), tensors, strict=True))
            graph.graph.execute(named, room, handle=self._handle)
        return query, key, value

    def _known(self, tensors: Sequence[Tensor]) -> _Graph:
        shapes = tuple(tuple(each.shape) for each in tensors)
        key = (shapes, tuple(each.stride() for each in tensors), tensors[0].dtype)
        if key not in self._graphs:
            self._open()
            try:
                self._graphs[key] = self._made(tensors)
            except (RuntimeError, self._library.cudnnGraphNotSupportedError) as error:
                raise NoKernelError(str(error)) from error
        return self._graphs[key]

    def _open(self) -> None:
        if self._library is not None:
            return
        self._library = library()
        self._handle = self._library.create_handle()

    def _made(self, tensors: Sequence[Tensor]) -> _Graph:
        library = self._library
        types = {
            torch.bfloat16: library.data_type.BFLOAT16,
            torch.float16: library.data_type.HALF,
            torch.float32: library.data_type.FLOAT,
        }
        half = types[tensors[0].dtype]
        graph = library.pygraph(
            io_data_type=half,
            intermediate_data_type=library.data_type.FLOAT,
            compute_data_type=library.data_type.FLOAT,
            handle=self._handle,
        )
        inputs = tuple(
            graph.tensor(
                dim=list(each.shape), stride=list(each.stride()), data_type=types[each.dtype]
            )
            for each in tensors
        )
        names = dict(zip(("q", "k", "v", "o", "dO", "stats"), inputs, strict=True))
        outputs = tuple(
            graph.sdpa_backward(
                **names,
                attn_scale=tensors[0].shape[-1] ** -0.5,
                use_causal_mask=True,
                use_deterministic_algorithm=True,
            )
        )
        for output, each in zip(outputs, tensors, strict=False):
            output.set_output(True).set_dim(list(each.shape)).set_stride(list(each.stride()))
            output.set_data_type(half)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([library.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        size = graph.get_workspace_size()
        return _Graph(graph=graph, inputs=inputs, outputs=outputs, workspace_bytes=size)


def library() -> Any:
    """Give the package; `NoKernelError` where it is not installed."""
    try:
        return importlib.import_module("cudnn")
    except ImportError as error:
        raise NoKernelError(str(error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """How attention's way back is cut: rows a time, and key heads a time."""

    rows: int
    keys: int
    workspace_bytes: int

    def cut(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Give the parts of tensors [B, H, ...], whose heads are those of queries or of keys."""
        rows, keys = tensors[1].shape[:2]
        for row in range(0, rows, self.rows):
            for key in range(0, keys, self.keys):
                yield [
                    each[
                        row : row + self.rows,
                        key * each.shape[1] // keys : (key + self.keys) * each.shape[1] // keys,
                    ]
                    for each in tensors
                ]


def parts_of(query: Tensor, key: Tensor) -> Parts:
    """Give as few parts as `room_bytes` has room for; `NoKernelError` where one is too much."""
    rows, heads, positions, width = query.shape
    keys = key.shape[1]
    limit = room_bytes(query, key) - BESIDE_BYTES
    group = _workspace_bytes(heads // keys, positions, width)
    if group > limit:
        raise NoKernelError(f"one group of heads takes {group:,} of {limit:,} bytes")
    at_once = _evenly(rows, limit // (group * keys)) if group * keys <= limit else 1
    keys_at_once = _evenly(keys, limit // group)
    size = group * keys_at_once * at_once + BESIDE_BYTES
    return Parts(rows=at_once, keys=keys_at_once, workspace_bytes=size)


def room_bytes(query: Tensor, key: Tensor) -> int:
    """Give the most that the way back takes: what PyTorch's own kernel does, and a little."""
    return attention_back_bytes(query, key) + 2 * BESIDE_BYTES


def _evenly(count: int, most: int) -> int:
    """Give how many of `count` go at once where at most so many can."""
    return -(-count // -(-count // min(count, most)))


def _workspace_bytes(heads: int, positions: int, width: int) -> int:
    """Give what the way back of some heads of a row takes: sums of queries, in fp32, and theirs."""
    padded = -(-positions // PADDED_TO) * PADDED_TO
    sums = heads * padded * 4
    return sums * width * (padded + KEYS_A_SUM) // KEYS_A_SUM + sums
