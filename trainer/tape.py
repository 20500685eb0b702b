"""What is kept of a stage's forward pass so that its backward pass can run later.

Owns the two ways: `ReplayTape` keeps the stage's inputs and computes it again; `KeptTape` keeps
the activations of autograd, but not the parameters. Both give the same bits. Knows nothing of the
order of stages. Invariant: between forward and backward no tape holds a parameter, so that its
shard can be released in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from trainer.device import Device
from trainer.gradients import GradientSum
from trainer.model.compiled import Blocks
from trainer.model.micro_batch import Documents, MicroBatch, micro_batches
from trainer.model.stages import Stage
from trainer.placement import Boundary, BoundaryMaker
from trainer.timing import StepClock


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """Where and in which dtype stages run, and where what is between them waits.

    batches: what stages have to know of each micro-batch; empty where there is nothing.
    """

    device: Device
    dtype: torch.dtype
    clock: StepClock
    new_boundary: BoundaryMaker = list
    blocks: Blocks | None = None
    batches: Sequence[MicroBatch] = ()

    def run(
        self, stage: Stage, params: Mapping[str, Tensor], x: Tensor, index: int | None = None
    ) -> Tensor:
        """Compute one stage for micro-batch `index` and give its output in the compute dtype."""
        if self.batches:
            assert index is not None, "there is something to know of each micro-batch"
            return stage.forward_of(self.batches[index], params, x).to(self.dtype)
        if self.blocks is not None and self.blocks.takes(stage):
            return self.blocks.run(stage, params, x).to(self.dtype)
        return stage.forward(params, x).to(self.dtype)

    def back(
        self,
        stage: Stage,
        params: Mapping[str, Tensor],
        x: Tensor,
        gradient: Tensor,
        total: GradientSum,
    ) -> Tensor | None:
        """Go back through a stage whose blocks know the way without autograd; None for others."""
        if self.blocks is None or self.batches or not self.blocks.takes(stage):
            return None
        return self.blocks.back(stage, params, x, gradient, total)

    def knowing(
        self,
        drop_keys: Sequence[str | None] = (),
        *,
        documents: Sequence[Documents | None] = (),
    ) -> Compute:
        """Give the same for a step's micro-batches: one key of dropout each, one set of records."""
        return replace(self, batches=micro_batches(self.batches, drop_keys, documents))


class Tape(Protocol):
    """One stage's forward pass over all micro-batches."""

    @property
    def outputs(self) -> Boundary:
        """Give the stage's outputs, one a micro-batch, without history."""
        ...

    def backward(
        self, params: Mapping[str, Tensor], gradients: Boundary, total: GradientSum
    ) -> None:
        """Add the parameters' gradients to `total`. Works once.

        `gradients` are the outputs' and become the inputs', one micro-batch after the other, so
        that both are never held for all. Token ids have none: the output's stay, unused.
        """
        ...


class ReplayTape:
    """Keeps inputs; computes the stage again, one micro-batch at a time."""

    def __init__(
        self,
        stage: Stage,
        compute: Compute,
        params: Mapping[str, Tensor],
        inputs: Boundary | Sequence[Tensor],
    ) -> None:
        self._stage = stage
        self._compute = compute
        self._inputs = inputs
        self.outputs = compute.new_boundary()
        for index, x in enumerate(inputs):
            self.outputs.append(self._forward(params, x, index))

    def _forward(self, params: Mapping[str, Tensor], x: Tensor, index: int) -> Tensor:
        with torch.no_grad():
            return self._compute.run(self._stage, params, x, index)

    def backward(
        self, params: Mapping[str, Tensor], gradients: Boundary, total: GradientSum
    ) -> None:
        leaves = leaves_of(params)
        self.outputs.clear()
        for index in range(len(self._inputs)):
            gradients[index] = self._again(index, leaves, gradients[index], total)

    def _again(
        self, index: int, leaves: dict[str, Tensor], gradient: Tensor, total: GradientSum
    ) -> Tensor:
        """Compute one micro-batch again and go back through it; nothing of it is left after."""
        return self._back(self._inputs[index], index, leaves, gradient, total)

    def _back(
        self,
        x: Tensor,
        index: int,
        leaves: dict[str, Tensor],
        gradient: Tensor,
        total: GradientSum,
    ) -> Tensor:
        found = self._compute.back(self._stage, leaves, x, gradient, total)
        if found is not None:
            return found
        leaf = _input_leaf(x)
        with torch.enable_grad():
            output = self._compute.run(self._stage, leaves, leaf, index)
        return _backward(output, leaves, leaf, gradient, total)


class KeptTape:
    """Keeps what autograd saved, with a parameter's place in its stead.

    Autograd saves two kinds of tensors: activations, which stay, and parameters or views of them,
    which are told by their address. Those are remembered as name, shape and strides, and found
    again in the parameters that are brought in for the backward pass.
    """

    def __init__(
        self,
        stage: Stage,
        compute: Compute,
        params: Mapping[str, Tensor],
        inputs: Boundary | Sequence[Tensor],
    ) -> None:
        self._leaves = leaves_of(params)
        self._inputs = [_input_leaf(x) for x in inputs]
        self._params: Mapping[str, Tensor] = {}
        self._spans = [(p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in params.items()]
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with torch.enable_grad(), hooks:
            self._results = [
                compute.run(stage, self._leaves, x, i) for i, x in enumerate(self._inputs)
            ]
        self.outputs: Boundary = [result.detach() for result in self._results]
        for leaf in self._leaves.values():
            # The graph holds its leaves: let them keep their shape and drop the memory.
            leaf.data = leaf.new_empty(()).expand(leaf.shape)

    def backward(
        self, params: Mapping[str, Tensor], gradients: Boundary, total: GradientSum
    ) -> None:
        self._params = params
        self.outputs.clear()
        self._results.reverse()
        for index, x in enumerate(self._inputs):
            result = self._results.pop()
            gradients[index] = _backward(result, self._leaves, x, gradients[index], total)
        self._params = {}

    def _pack(self, saved: Tensor) -> Tensor | Place:
        address = saved.data_ptr()
        for start, end, name in self._spans:
            if start <= address < end:
                offset = (address - start) // saved.element_size()
                return Place(name, saved.shape, saved.stride(), offset)
        return saved

    def _unpack(self, packed: Tensor | Place) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        parameter = self._params[packed.name]
        start = parameter.storage_offset() + packed.offset
        return parameter.as_strided(packed.shape, packed.strides, start)


@dataclass(frozen=True, slots=True)
class Place:
    """A view of a parameter: its name and how it lies in it, in elements."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def leaves_of(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give the same tensors, each the root of a history of its own."""
    return {name: tensor.detach().requires_grad_() for name, tensor in params.items()}


def _input_leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point())


def _backward(
    output: Tensor, leaves: dict[str, Tensor], x: Tensor, gradient: Tensor, total: GradientSum
) -> Tensor:
    wanted = [*leaves.values(), *([x] if x.requires_grad else [])]
    found = torch.autograd.grad(output, wanted, grad_outputs=gradient)
    total.add(dict(zip(leaves, found, strict=False)))
    return found[-1] if x.requires_grad else gradient
