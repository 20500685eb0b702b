"""What compiled blocks with adapters hold, on tensors without content.

Owns the order of buffers of `trainer.lora.compiled`, as the compiler plans them for a block that is
cut in front of its last product: what products take and give is there, what lies between them is
not; autograd keeps inputs, rotated queries and keys, values, attention's output, both sums, and in
fp32 what adapters multiply. Knows nothing of steps. Invariant: never less than a device was seen to
take; where the compiler writes a result over what it was made of, both are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.lora.compiled import GATES, INPUTS, OUTPUT, CompiledAdapted
from trainer.lora.stages import AdaptedStage
from trainer.lora.targets import linear_modules
from trainer.model.adapters import A_ENDS
from trainer.model.compiled import leaf, with_history
from trainer.model.layers import causal_attention, split_heads
from trainer.model.stages import Stage

LAST = "mlp.down_proj"


class WalkedBlocks(CompiledAdapted):
    """Stands for `CompiledAdapted` where memory is walked through: it takes the same stages."""

    def run(self, stage: Stage, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Hold what a block holds; give a tensor of its output's shape."""
        assert isinstance(stage, AdaptedStage)
        form = _Form(stage, x)
        at_last = [leaf(each) for name, each in params.items() if name.startswith(LAST)]
        leaves = [leaf(each) for name, each in params.items() if not name.startswith(LAST)]
        parts = with_history(_First.apply, form, leaf(x), *leaves)
        ended = (form, stage.binding.is_replay, *parts, *at_last)
        output: Tensor = _Last.apply(*ended)  # type: ignore[no-untyped-call]
        return output


class _Form:
    """Makes the tensors of one block for an input [B, T, D]."""

    def __init__(self, stage: AdaptedStage, x_BTD: Tensor) -> None:
        self._x = x_BTD
        self._stage = stage
        self.config = stage.config
        modules = linear_modules(stage.inner)
        self._rank = stage.lora.rank
        self._widths = {name: shape[0] for name, shape in modules.items()}
        self.adapted = {n.removesuffix(A_ENDS) for n in stage.parameters if n.endswith(A_ENDS)}

    def tensor(self, width: int, *, wide: bool = False) -> Tensor:
        """Give [B, T, width], in fp32 where it is wide."""
        dtype = torch.float32 if wide else self._x.dtype
        return self._x.new_empty(*self._x.shape[:-1], width, dtype=dtype)

    def input_of(self, modules: tuple[str, ...], width: int) -> list[Tensor]:
        """Give what adapters of some modules keep.

        Their input in fp32, its product with them, and their first matrices side by side.
        """
        count = len(self.adapted.intersection(modules))
        if not count:
            return []
        beside = self._x.new_empty(count * self._rank, width, dtype=torch.float32)
        return [self.tensor(width, wide=True), self.tensor(count * self._rank, wide=True), beside]

    def product(self, module: str) -> Tensor:
        """Give a module's output; what its adapter adds is there while it is added."""
        base = self.tensor(self._widths[module])
        if module not in self.adapted:
            return base
        added = self.tensor(self._widths[module], wide=True)
        found = torch.empty_like(base)
        del added, base
        return found

    def back_through(self, modules: tuple[str, ...], width: int) -> Tensor:
        """Give the gradient of an input: the products of all ways are there when they are added.

        What goes into an adapter is there in fp32 while it is multiplied, one after the other.
        """
        ways = [self.tensor(width) for _ in modules]
        lows = []
        for name in self.adapted.intersection(modules):
            into = self.tensor(self._widths[name], wide=True)
            lows.append(self.tensor(self._rank, wide=True))
            del into
        if lows:
            ways.append(self.tensor(width, wide=True))
        lows.clear()
        found = self.tensor(width)
        ways.clear()
        return found


class _First(torch.autograd.Function):
    """A block up to its last product."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        form, _, *leaves = inputs
        config, width = form.config, form.config.hidden_size
        kept = [form.tensor(1, wide=True), *form.input_of(INPUTS, width)]
        normed = form.tensor(width)
        q, k, v = (split_heads(form.product(name), config.head_dim) for name in INPUTS)
        turned = torch.empty_like(q), torch.empty_like(k)
        del q, k, normed
        with torch.enable_grad():
            ctx.heads = [each.requires_grad_() for each in (*turned, v)]
            del turned, v
            ctx.mixed = causal_attention(*ctx.heads)
        kept += form.input_of(OUTPUT, config.query_size)
        out = form.product(*OUTPUT)
        summed = form.tensor(width)
        del out
        normed = form.tensor(width)
        kept += [form.tensor(1, wide=True), *form.input_of(GATES, width)]
        gate, up = (form.product(name) for name in GATES)
        del normed
        ctx.form = form
        ctx.save_for_backward(summed, *kept, *leaves)
        return summed, gate, up

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor | None, ...]:
        form, width = ctx.form, ctx.form.config.hidden_size
        inner = form.back_through(GATES, width)
        summed = form.tensor(width)
        del inner
        outer = form.back_through(OUTPUT, form.config.query_size)
        wanted = split_heads(outer, form.config.head_dim)
        found = torch.autograd.grad(ctx.mixed, ctx.heads, wanted)
        del outer, wanted, ctx.mixed, ctx.heads
        turned = [torch.empty_like(each) for each in found[:2]]
        del found
        last = form.back_through(INPUTS, width)
        del turned, last
        count = 2 * len(form.adapted - {LAST})
        leaves = ctx.saved_tensors[-count:] if count else ()
        return None, torch.empty_like(summed), *(torch.empty_like(leaf) for leaf in leaves)


class _Last(torch.autograd.Function):
    """The last product, with what it is added to."""

    @staticmethod
    def forward(
        ctx: Any, form: _Form, is_replay: bool, x: Tensor, gate: Tensor, up: Tensor, *leaves: Tensor
    ) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(gate, up, *leaves)
        if is_replay:
            return x.new_empty(()).expand(x.shape)
        through = torch.empty_like(gate)
        beside = form.input_of((LAST,), gate.shape[-1])
        product = form.product(LAST)
        del through, beside
        output = torch.empty_like(x)
        del product
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, *leaves = ctx.saved_tensors
        inner = torch.empty_like(gate)
        beside = ctx.form.input_of((LAST,), gate.shape[-1])
        others = tuple(torch.empty_like(each) for each in leaves)
        if leaves:
            widths = gradients[0].shape[-1], gate.shape[-1]
            beside += [ctx.form.tensor(width, wide=True) for width in widths]
        found = torch.empty_like(gate), torch.empty_like(up)
        del inner, beside
        return None, None, gradients[0], *found, *others
