"""A block with adapters in pieces: functions of tensors, forward and back, none with a history.

Owns the arithmetic of each piece's way back; forward it is that of `trainer.model.stages`. Knows
nothing of where tensors come from, of attention, or of compilers. Between the pieces lie the
tensors that can be kept: queries, keys and values; what attention made of them; the sum so far; the
gate and what it lets through. Invariant: a piece computes the same from what was kept as from what
was computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model import low_rank
from trainer.model.adapter_settings import LoraSettings
from trainer.model.adapters import A_ENDS, B_ENDS, Adapter
from trainer.model.layers import AdaptedWeight, linear, merge_heads, rms_norm, split_heads
from trainer.model.stages import Block

Named = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Modules of a block that take the same input, and the frozen tensors that go with them."""

    modules: tuple[str, ...]
    beside: tuple[str, ...] = ()

    def weights(self, known: Sequence[str]) -> list[str]:
        """Give the names of its frozen tensors, of those that a block has."""
        ends = (f"{module}.{end}" for module in self.modules for end in ("weight", "bias"))
        return [name for name in (*self.beside, *ends) if name in known]

    def leaves(self, known: Sequence[str]) -> list[str]:
        """Give the names of its adapters' matrices."""
        ends = (module + end for module in self.modules for end in (A_ENDS, B_ENDS))
        return [name for name in ends if name in known]


INPUTS = Group(
    modules=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    beside=("input_layernorm.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight"),
)
OUTPUT = Group(modules=("self_attn.o_proj",))
GATES = Group(modules=("mlp.gate_proj", "mlp.up_proj"), beside=("post_attention_layernorm.weight",))
LAST = Group(modules=("mlp.down_proj",))
GROUPS = (INPUTS, OUTPUT, GATES, LAST)


class Adapted:
    """The adapters of one group; each call is for one input.

    low: the product of that input with all A side by side, in fp32, once it was made.
    """

    def __init__(
        self, group: Group, leaves: Named, lora: LoraSettings, low: Tensor | None = None
    ) -> None:
        self.low = low
        self._lora = lora
        self._leaves = leaves
        self._modules = [module for module in group.modules if module + A_ENDS in leaves]

    def bound(self, weights: Named) -> dict[str, Tensor | AdaptedWeight]:
        """Give the weights with what makes their products into the modules'."""
        found: dict[str, Tensor | AdaptedWeight] = dict(weights)
        for index, module in enumerate(self._modules):
            name = f"{module}.weight"

            def added(output: Tensor, x: Tensor, index: int = index) -> Tensor:
                return self._added(index, output, x)

            found[name] = AdaptedWeight(weights[name], added)
        return found

    def back(
        self, x: Tensor, gradients: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Give what adapters add to the gradient of x, and the gradients of A and B of each."""
        if not self._modules:
            return None, []
        rows = x.flatten(0, -2)
        lows = self._parts(x)
        of_lows, of_bs = [], []
        for module, low in zip(self._modules, lows, strict=True):
            gradient = gradients[module].flatten(0, -2)
            of_low, of_b = self._back_raised(gradient, low.flatten(0, -2), module)
            of_lows.append(of_low)
            of_bs.append(of_b)
        of_x, of_a = self._back_narrowed(torch.cat(of_lows, dim=-1), rows)
        of_as = torch.split(of_a, self._lora.rank)
        found = [each for pair in zip(of_as, of_bs, strict=True) for each in pair]
        return of_x.to(x.dtype).view(x.shape), found

    def _parts(self, x: Tensor) -> Sequence[Tensor]:
        if self.low is None:
            a_RI = self._stacked()
            if low_rank.takes(x):
                low = low_rank.narrowed(x.flatten(0, -2), a_RI)
                self.low = low.view(*x.shape[:-1], -1)
            else:
                self.low = F.linear(x.to(a_RI.dtype), a_RI)
        return torch.split(self.low, self._lora.rank, dim=-1)

    def _stacked(self) -> Tensor:
        return torch.cat([self._leaves[module + A_ENDS] for module in self._modules])

    def _added(self, index: int, output: Tensor, x: Tensor) -> Tensor:
        low, module = self._parts(x)[index], self._modules[index]
        b_OR, scale = self._leaves[module + B_ENDS], self._lora.scale
        rounds_first = self._lora.base_quant == "nf4"
        if not low_rank.takes(output):
            a_RI = self._leaves[module + A_ENDS]
            adapter = Adapter(a_RI=a_RI, b_OR=b_OR, scale=scale, rounds_first=rounds_first)
            return adapter.added_low(output, low)
        dtype = output.dtype if rounds_first else low.dtype
        added = low_rank.raised(low.flatten(0, -2), b_OR, scale, dtype)
        return (output + added.view(output.shape)).to(output.dtype)

    def _back_raised(self, gradient: Tensor, low: Tensor, module: str) -> tuple[Tensor, Tensor]:
        b_OR, scale = self._leaves[module + B_ENDS], self._lora.scale
        if low_rank.takes(gradient):
            return low_rank.back_raised(gradient, low, b_OR, scale)
        wide = gradient.to(b_OR.dtype) * scale
        return wide @ b_OR, wide.t() @ low

    def _back_narrowed(self, of_low: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        a_RI = self._stacked()
        if low_rank.takes(rows):
            return low_rank.back_narrowed(of_low, rows, a_RI)
        return of_low @ a_RI, of_low.t() @ rows.to(a_RI.dtype)


class Pieces:
    """The functions of blocks of one geometry and set of adapters.

    Each takes the frozen tensors and the adapters of its own group, by name.
    """

    def __init__(self, block: Block, lora: LoraSettings) -> None:
        self._block = block
        self._lora = lora
        self._eps = block.config.rms_norm_eps
        self._width = block.config.head_dim

    def heads(
        self, weights: Named, leaves: Named, x: Tensor, cos_TK: Tensor, sin_TK: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Give queries, keys and values as attention takes them; beside, what `heads_back` does."""
        adapted = Adapted(INPUTS, leaves, self._lora)
        query, key, value = self._block.projected(adapted.bound(weights), x)  # type: ignore[arg-type]
        turned = self._block.turned(weights, (query, key), (cos_TK, sin_TK))
        beside = [query, key] if self._block.config.qk_norm else []
        return [*turned, value], [*beside, *([] if adapted.low is None else [adapted.low])]

    def heads_back(
        self,
        weights: Named,
        leaves: Named,
        x: Tensor,
        cos_TK: Tensor,
        sin_TK: Tensor,
        beside: list[Tensor],
        gradients: list[Tensor],
        summed: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """Give the gradient of x, with what comes by the way beside (`summed`), and of adapters."""
        low = beside[-1] if leaves else None
        query, key, value = gradients
        turned = [_turned_back(each, cos_TK, sin_TK) for each in (query, key)]
        if self._block.config.qk_norm:
            for index, letter in enumerate("qk"):
                scale = weights[f"self_attn.{letter}_norm.weight"]
                turned[index] = _norm_back(beside[index], scale, self._eps, turned[index])
        merged = [merge_heads(each) for each in (*turned, value)]
        by_module = dict(zip(INPUTS.modules, merged, strict=True))
        norm = weights["input_layernorm.weight"]
        return self._back(INPUTS, weights, leaves, norm, x, by_module, summed, low)

    def summed(self, weights: Named, leaves: Named, x: Tensor, mixed_BHTK: Tensor) -> Tensor:
        """Add what attention made to x."""
        bound = Adapted(OUTPUT, leaves, self._lora).bound(weights)
        return self._block.added(bound, x, merge_heads(mixed_BHTK))  # type: ignore[arg-type]

    def summed_back(
        self, weights: Named, leaves: Named, mixed_BHTK: Tensor, gradient: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Give the gradients of what attention made, and of adapters."""
        [module] = OUTPUT.modules
        inner = gradient @ weights[f"{module}.weight"]
        adapted = Adapted(OUTPUT, leaves, self._lora)
        added, found = adapted.back(merge_heads(mixed_BHTK), {module: gradient})
        inner = inner if added is None else inner + added
        return split_heads(inner, self._width), found

    def gated(self, weights: Named, leaves: Named, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Give the gate and what it lets through; beside, what `gated_back` takes."""
        adapted = Adapted(GATES, leaves, self._lora)
        found = self._block.gated(adapted.bound(weights), x)  # type: ignore[arg-type]
        return [*found], [] if adapted.low is None else [adapted.low]

    def gated_back(
        self,
        weights: Named,
        leaves: Named,
        x: Tensor,
        beside: list[Tensor],
        gradients: list[Tensor],
        summed: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """Give the gradient of x, with what comes by the way beside (`summed`), and of adapters."""
        low = beside[-1] if leaves else None
        by_module = dict(zip(GATES.modules, gradients, strict=True))
        norm = weights["post_attention_layernorm.weight"]
        return self._back(GATES, weights, leaves, norm, x, by_module, summed, low)

    def last(self, weights: Named, leaves: Named, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """Add what the gate lets through to x, by the last matrix."""
        [module] = LAST.modules
        bound = Adapted(LAST, leaves, self._lora).bound(weights)
        return x + linear(F.silu(gate) * up, bound[f"{module}.weight"])

    def last_back(
        self, weights: Named, leaves: Named, gate: Tensor, up: Tensor, gradient: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Give the gradients of the gate and of what it lets through, and of adapters."""
        [module] = LAST.modules
        inner = gradient @ weights[f"{module}.weight"]
        adapted = Adapted(LAST, leaves, self._lora)
        added, found = adapted.back(F.silu(gate) * up, {module: gradient})
        inner = inner if added is None else inner + added
        of_gate = torch.ops.aten.silu_backward(inner * up, gate)
        return [of_gate, inner * F.silu(gate)], found

    def _back(
        self,
        group: Group,
        weights: Named,
        leaves: Named,
        scale: Tensor,
        x: Tensor,
        gradients: Mapping[str, Tensor],
        summed: Tensor,
        low: Tensor | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Go back through products with what is normed of x, and through the norm."""
        ways = [gradients[module] @ weights[f"{module}.weight"] for module in group.modules]
        inner = sum(ways[1:], ways[0])
        adapted = Adapted(group, leaves, self._lora, low)
        added, found = adapted.back(rms_norm(x, scale, self._eps), gradients)
        inner = inner if added is None else inner + added
        return summed + _norm_back(x, scale, self._eps, inner), found


def _norm_back(x: Tensor, scale: Tensor, eps: float, gradient: Tensor) -> Tensor:
    """Go back through `rms_norm` to x."""
    wide = x.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    inner = (gradient * scale).float()
    normed = wide * root
    found = root * (inner - normed * (inner * normed).mean(-1, keepdim=True))
    return found.to(x.dtype)


def _turned_back(gradient: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Go back through `rotate`."""
    first, second = (gradient * sin_TK).chunk(2, dim=-1)
    return gradient * cos_TK + torch.cat((second, -first), dim=-1)
