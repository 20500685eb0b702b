"""What is kept of a stage's forward pass so that its backward pass can run later.

Owns the two ways: `ReplayTape` keeps the stage's inputs and computes it again; `KeptTape` keeps
the activations of autograd, but not the parameters. Both give the same bits. Knows nothing of the
order of stages. Invariant: between forward and backward no tape holds a parameter, so that its
shard can be released in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trainer.device import Device
from trainer.gradients import GradientSum
from trainer.model.stages import Stage
from trainer.timing import StepClock


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """Where and in which dtype stages run."""

    device: Device
    dtype: torch.dtype
    clock: StepClock

    def run(self, stage: Stage, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Compute one stage and give its output in the compute dtype."""
        return stage.forward(params, x).to(self.dtype)


class Tape(Protocol):
    """One stage's forward pass over all micro-batches."""

    @property
    def outputs(self) -> list[Tensor]:
        """Give the stage's outputs, one a micro-batch, without history."""
        ...

    def backward(
        self, params: Mapping[str, Tensor], output_gradients: Sequence[Tensor], total: GradientSum
    ) -> list[Tensor]:
        """Add the parameters' gradients to `total`; give those of the inputs. Works once.

        Token ids have no gradient: for them the output's gradient comes back, unused.
        """
        ...


class ReplayTape:
    """Keeps inputs; computes the stage again, one micro-batch at a time."""

    def __init__(
        self, stage: Stage, compute: Compute, params: Mapping[str, Tensor], inputs: list[Tensor]
    ) -> None:
        self._stage = stage
        self._compute = compute
        self._inputs = inputs
        with torch.no_grad():
            self.outputs = [compute.run(stage, params, x) for x in inputs]

    def backward(
        self, params: Mapping[str, Tensor], output_gradients: Sequence[Tensor], total: GradientSum
    ) -> list[Tensor]:
        leaves = _leaves(params)
        self.outputs = []
        found = []
        for x, gradient in zip(self._inputs, output_gradients, strict=True):
            leaf = _input_leaf(x)
            with torch.enable_grad():
                output = self._compute.run(self._stage, leaves, leaf)
            found.append(_backward(output, leaves, leaf, gradient, total))
        return found


class KeptTape:
    """Keeps what autograd saved, with a parameter's place in its stead.

    Autograd saves two kinds of tensors: activations, which stay, and parameters or views of them,
    which are told by their address. Those are remembered as name, shape and strides, and found
    again in the parameters that are brought in for the backward pass.
    """

    def __init__(
        self, stage: Stage, compute: Compute, params: Mapping[str, Tensor], inputs: list[Tensor]
    ) -> None:
        self._leaves = _leaves(params)
        self._inputs = [_input_leaf(x) for x in inputs]
        self._params: Mapping[str, Tensor] = {}
        self._spans = [(p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in params.items()]
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with torch.enable_grad(), hooks:
            self._results = [compute.run(stage, self._leaves, x) for x in self._inputs]
        self.outputs = [result.detach() for result in self._results]
        for leaf in self._leaves.values():
            # The graph holds its leaves: let them keep their shape and drop the memory.
            leaf.data = leaf.new_empty(()).expand(leaf.shape)

    def backward(
        self, params: Mapping[str, Tensor], output_gradients: Sequence[Tensor], total: GradientSum
    ) -> list[Tensor]:
        self._params = params
        self.outputs = []
        found = []
        self._results.reverse()
        for x, gradient in zip(self._inputs, output_gradients, strict=True):
            found.append(_backward(self._results.pop(), self._leaves, x, gradient, total))
        self._params = {}
        return found

    def _pack(self, saved: Tensor) -> Tensor | _Place:
        address = saved.data_ptr()
        for start, end, name in self._spans:
            if start <= address < end:
                offset = (address - start) // saved.element_size()
                return _Place(name, saved.shape, saved.stride(), offset)
        return saved

    def _unpack(self, packed: Tensor | _Place) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        parameter = self._params[packed.name]
        start = parameter.storage_offset() + packed.offset
        return parameter.as_strided(packed.shape, packed.strides, start)


@dataclass(frozen=True, slots=True)
class _Place:
    """A view of a parameter: its name and how it lies in it, in elements."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def _leaves(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
