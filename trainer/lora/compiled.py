"""Adapted blocks as compiled functions: fewer, larger kernels, and in a replay no idle product.

Owns the compiled functions, one set a model geometry and set of adapters. Knows nothing of where
weights come from. Compiled kernels round otherwise than PyTorch's own, so whether blocks are
compiled belongs to a run's recipe; the invariant is that of `trainer.model.compiled`: a forward
pass is always the one that autograd would keep.

A block without an adapter on its last matrix is cut in front of it. That product is added to the
output and goes nowhere else: who computes the block again for its gradients has no use for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.lora.stages import AdaptedStage
from trainer.model.adapters import A_ENDS, B_ENDS, Adapter
from trainer.model.compiled import Blocks, compiled, leaf, with_history
from trainer.model.layers import AdaptedWeight, linear
from trainer.model.stages import Block, Stage

# Modules of a native block that take the same input.
INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT = ("self_attn.o_proj",)
GATES = ("mlp.gate_proj", "mlp.up_proj")


class CompiledAdapted(Blocks):
    """Runs native blocks with adapters; a block whose weights are bound packed is left out."""

    def __init__(self) -> None:
        self._functions: dict[tuple[object, ...], _Functions] = {}

    def takes(self, stage: Stage) -> bool:
        """Say whether a stage runs compiled."""
        return isinstance(stage, AdaptedStage) and isinstance(stage.inner, Block)

    def run(self, stage: Stage, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Compute a block's output, with its history where gradients are wanted.

        In a replay the output has its shape and its history alone.

        Raises:
            InputError: this machine cannot compile (no C compiler, no Triton).
        """
        assert isinstance(stage, AdaptedStage)
        block = stage.inner
        assert isinstance(block, Block)
        weights = dict(stage.binding.weights())
        key = (block.config, tuple(params), stage.lora)
        if key not in self._functions:
            self._functions[key] = _functions(stage, block, list(weights), list(params))
        functions = self._functions[key]
        leaves = [leaf(tensor) for tensor in params.values()]
        if functions.last is None:
            matrices = list(weights.values())
            output: Tensor = with_history(
                functions.first, matrices, leaves, leaf(x), *block.angles(x)
            )
            return output
        matrix = weights.pop(functions.last.name)
        matrices = list(weights.values())
        parts = with_history(functions.first, matrices, leaves, leaf(x), *block.angles(x))
        ended = (*parts, matrix, functions.last, stage.binding.is_replay)
        found: Tensor = _Ended.apply(*ended)  # type: ignore[no-untyped-call]
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Last:
    """The last product: its matrix, x + product of what the gate lets through, and the way back."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Functions:
    """A whole block, or what comes before its last product."""

    first: Callable[..., Any]
    last: _Last | None


class _Ended(torch.autograd.Function):
    """The end of a block that was cut."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, up: Tensor, matrix: Tensor, last: _Last, is_replay: bool
    ) -> Tensor:
        ctx.save_for_backward(gate, up, matrix)
        ctx.last = last
        if is_replay:
            return x.new_zeros(()).expand(x.shape)
        return last.forward(x.detach(), gate.detach(), up.detach(), matrix)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        [gradient] = gradients
        return gradient, *ctx.last.backward(*ctx.saved_tensors, gradient), None, None, None


def _functions(
    stage: AdaptedStage, block: Block, weights: Sequence[str], names: Sequence[str]
) -> _Functions:
    last = block.added_last
    assert last is not None
    if last.removesuffix(".weight") + A_ENDS in names:
        return _Functions(first=_compiled(stage, block.forward_turned, weights, names), last=None)
    before = [name for name in weights if name != last]
    return _Functions(
        first=_compiled(stage, block.gated_turned, before, names),
        last=_Last(name=last, forward=compiled(_ended), backward=compiled(_back)),
    )


def _ended(x: Tensor, gate: Tensor, up: Tensor, matrix: Tensor) -> Tensor:
    return x + linear(F.silu(gate) * up, matrix)


def _back(gate: Tensor, up: Tensor, matrix: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    inner = gradient @ matrix
    return torch.ops.aten.silu_backward(inner * up, gate), inner * F.silu(gate)


def _compiled(
    stage: AdaptedStage,
    function: Callable[..., Any],
    weight_names: Sequence[str],
    names: Sequence[str],
) -> Callable[..., Any]:
    groups = _groups(names)
    lora, rounds_first = stage.lora, stage.is_packed

    def forward(
        weights: list[Tensor], leaves: list[Tensor], x: Tensor, cos_TK: Tensor, sin_TK: Tensor
    ) -> Any:
        bound: dict[str, Any] = dict(zip(weight_names, weights, strict=True))
        params = dict(zip(names, leaves, strict=True))
        lows: dict[str, Tensor] = {}

        def added(module: str, group: Sequence[str], output: Tensor, x: Tensor) -> Tensor:
            if module not in lows:  # modules that take the same input share one product with it
                a_RI = torch.cat([params[each + A_ENDS] for each in group])
                low = F.linear(x.to(a_RI.dtype), a_RI)
                parts = torch.split(low, lora.rank, dim=-1)
                lows.update(dict(zip(group, parts, strict=True)))
            adapter = Adapter(
                a_RI=params[module + A_ENDS],
                b_OR=params[module + B_ENDS],
                scale=lora.scale,
                rounds_first=rounds_first,
            )
            return adapter.added_low(output, lows[module])

        for group in groups:
            for module in group:
                matrix = bound[f"{module}.weight"]
                bound[f"{module}.weight"] = AdaptedWeight(matrix, partial(added, module, group))
        return function(bound, x, (cos_TK, sin_TK))

    return compiled(forward)


def _groups(names: Sequence[str]) -> list[list[str]]:
    """Give the modules that have adapters, those together that take the same input."""
    adapted = [name.removesuffix(A_ENDS) for name in names if name.endswith(A_ENDS)]
    found = [[each for each in adapted if each in group] for group in (INPUTS, OUTPUT, GATES)]
    alone = [[each] for each in adapted if not any(each in group for group in found)]
    return [group for group in (*found, *alone) if group]
