"""Adapted blocks as compiled functions: fewer, larger kernels, and in a replay no idle product.

Owns the compiled functions, one set a model geometry and set of adapters. Knows nothing of where
weights come from. Compiled kernels round otherwise than PyTorch's own, so whether blocks are
compiled belongs to a run's recipe; the invariant is that of `trainer.model.compiled`: a forward
pass is always the one that autograd would keep.

A block is cut in front of its last product. That one is added to the output and goes nowhere else:
who computes the block again for its gradients has no use for it.
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
from trainer.model import low_rank
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
        leaves = {name: leaf(tensor) for name, tensor in params.items()}
        matrix = weights.pop(functions.last_name)
        at_last = [leaves.pop(name) for name in functions.last_adapter]
        inputs = ([*weights.values()], [*leaves.values()], leaf(x), *block.angles(x))
        parts = with_history(functions.first, *inputs)
        ended = (functions, stage.binding.is_replay, *parts, matrix, *at_last)
        output: Tensor = _Ended.apply(*ended)  # type: ignore[no-untyped-call]
        return output


@dataclass(frozen=True, kw_only=True, slots=True)
class _Functions:
    """What comes before a block's last product, and that product both ways.

    last_adapter: the names of its adapter's two matrices, where it has one.
    """

    first: Callable[..., Any]
    last_name: str
    last_adapter: Sequence[str]
    last: Callable[..., Tensor]
    last_back: Callable[..., tuple[Tensor, ...]]


class _Ended(torch.autograd.Function):
    """The end of a block."""

    @staticmethod
    def forward(
        ctx: Any, functions: _Functions, is_replay: bool, x: Tensor, *others: Tensor
    ) -> Tensor:
        ctx.functions = functions
        ctx.save_for_backward(*others)
        if is_replay:
            return x.new_zeros(()).expand(x.shape)
        x, gate, up, matrix, *adapter = (each.detach() for each in (x, *others))
        return functions.last(x, gate, up, matrix, adapter)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        [gradient] = gradients
        gate, up, matrix, *adapter = (each.detach() for each in ctx.saved_tensors)
        found = ctx.functions.last_back(gate, up, matrix, adapter, gradient.contiguous())
        return None, None, gradient, found[0], found[1], None, *found[2:]


def _functions(
    stage: AdaptedStage, block: Block, weights: Sequence[str], names: Sequence[str]
) -> _Functions:
    last = block.added_last
    assert last is not None
    module = last.removesuffix(".weight")
    adapter = [name for name in (module + A_ENDS, module + B_ENDS) if name in names]
    before = [name for name in weights if name != last]
    others = [name for name in names if name not in adapter]
    forward, backward = _last_product(stage.lora.scale, rounds_first=stage.is_packed)
    return _Functions(
        first=_compiled(stage, block.gated_turned, before, others),
        last_name=last,
        last_adapter=adapter,
        last=compiled(forward),
        last_back=compiled(backward),
    )


def _last_product(
    scale: float, *, rounds_first: bool
) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, ...]]]:
    """Give x + product of what the gate lets through, and its way back; `adapter` is A, B or none.

    Back, what went through the gate is made again, and the value of the product is not.
    """

    def forward(
        x: Tensor, gate: Tensor, up: Tensor, matrix: Tensor, adapter: list[Tensor]
    ) -> Tensor:
        through = F.silu(gate) * up
        product = linear(through, matrix)
        if adapter:
            a_RI, b_OR = adapter
            if low_rank.takes(through):
                low = low_rank.low_of(through, a_RI)
                return x + low_rank.added_low(
                    product, low, b_OR, scale=scale, rounds_first=rounds_first
                )
            beside = Adapter(a_RI=a_RI, b_OR=b_OR, scale=scale, rounds_first=rounds_first)
            product = beside.added_to(product, through)
        return x + product

    def backward(
        gate: Tensor, up: Tensor, matrix: Tensor, adapter: list[Tensor], gradient: Tensor
    ) -> tuple[Tensor, ...]:
        inner = gradient @ matrix
        found: Sequence[Tensor] = ()
        if adapter and low_rank.takes(gradient):
            of_x, *found = low_rank.back_through(F.silu(gate) * up, adapter, gradient, scale)
            inner = inner + of_x
        elif adapter:
            a_RI, b_OR = adapter
            through = (F.silu(gate) * up).to(a_RI.dtype).flatten(0, -2)
            wide = (gradient.to(a_RI.dtype) * scale).flatten(0, -2)
            low = wide @ b_OR
            found = low.t() @ through, wide.t() @ F.linear(through, a_RI)
            inner = inner + (low @ a_RI).to(inner.dtype).view(inner.shape)
        return torch.ops.aten.silu_backward(inner * up, gate), inner * F.silu(gate), *found

    return forward, backward


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
            in_parts = low_rank.takes(x)
            if module not in lows:  # modules that take the same input share one product with it
                a_RI = torch.cat([params[each + A_ENDS] for each in group])
                low = low_rank.low_of(x, a_RI) if in_parts else F.linear(x.to(a_RI.dtype), a_RI)
                parts = torch.split(low, lora.rank, dim=-1)
                lows.update(dict(zip(group, parts, strict=True)))
            if in_parts:
                b_OR = params[module + B_ENDS]
                return low_rank.added_low(
                    output, lows[module], b_OR, scale=lora.scale, rounds_first=rounds_first
                )
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
    assert sum(map(len, found)) == len(adapted), "an adapter was passed by"
    return [group for group in found if group]
