"""Attention's way back by cuDNN's own interface, which can be asked for sums in a fixed order.

Owns every use of `cudnn` (the package `nvidia-cudnn-frontend`, extra `cudnn`): PyTorch calls the
same library without asking. Knows nothing of blocks. Invariants: a graph is made once for a form of
heads and computes the same bits each time; where the package is not there, or its library has no
such kernel, nobody is told of a failure but the caller, who has another way.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.device import stream_address

Form = tuple[tuple[int, ...], ...]


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
        self, gradient: Tensor, heads: tuple[Tensor, Tensor, Tensor], mixed: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Give the gradients of queries, keys and values, laid out as those are."""
        tensors = (*heads, mixed, gradient, sums[..., None])
        graph = self._known(tensors)
        self._library.set_stream(self._handle, stream_address(mixed.device))
        query, key, value = found = tuple(torch.empty_like(each) for each in heads)
        named = dict(zip((*graph.inputs, *graph.outputs), (*tensors, *found), strict=True))
        room = mixed.new_empty(graph.workspace_bytes, dtype=torch.uint8)
        graph.graph.execute(named, room, handle=self._handle)
        return query, key, value

    def _known(self, tensors: tuple[Tensor, ...]) -> _Graph:
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

    def _made(self, tensors: tuple[Tensor, ...]) -> _Graph:
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
