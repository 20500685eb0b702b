"""What compiled blocks with adapters hold, on tensors without content.

Owns the order of buffers inside the pieces of `trainer.lora.compiled`, as the compiler plans them:
what products take and give is there, what lies between them is not. What lies between pieces, and
how long, is that module's own order. Knows nothing of steps. Invariant: never less than a device
was seen to take; where the compiler writes a result over what it was made of, both are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.lora.attention import Chosen
from trainer.lora.compiled import Called, CompiledAdapted, Functions
from trainer.lora.cudnn_graph import room_bytes
from trainer.lora.pieces import GATES, INPUTS, LAST, OUTPUT, Group, Pieces
from trainer.lora.targets import linear_modules
from trainer.model import low_rank
from trainer.model.adapter_settings import LoraSettings
from trainer.model.adapters import A_ENDS, B_ENDS
from trainer.model.layers import split_heads
from trainer.model.stages import Block
from trainer.vram_trace import (
    attention_back,
    attention_back_bytes,
    host_attention_back,
    is_fused,
)

Named = Mapping[str, Tensor]
# Each takes the least that the allocator gives.
LASTING_NUMBERS = 4
# Groups whose sum the compiler was seen to write over one of what it adds up, on a device.
WRITTEN_OVER = (INPUTS, LAST)


class WalkedBlocks(CompiledAdapted):
    """Stands for `CompiledAdapted` where memory is walked through: it takes the same stages."""

    def __init__(self, *, is_host: bool) -> None:
        super().__init__()
        self._is_host = is_host

    def functions(
        self, block: Block, lora: LoraSettings, weights: Sequence[str], leaves: Sequence[str]
    ) -> Functions:
        """Give pieces that hold what the compiled ones hold."""
        pieces = WalkedPieces(block, lora, is_host=self._is_host)
        attention = _WalkedAttention(is_host=self._is_host)
        return Functions(pieces, weights, leaves, compiler=_as_it_is, attention=attention)


def _as_it_is(function: Called) -> Called:
    return function


class WalkedPieces(Pieces):
    """Pieces that make tensors of the right shapes."""

    def __init__(self, block: Block, lora: LoraSettings, *, is_host: bool) -> None:
        super().__init__(block, lora)
        self._is_host = is_host
        self._config = block.config
        self._rank = lora.rank
        self._widths = {name: shape[0] for name, shape in linear_modules(block).items()}

    def heads(
        self, weights: Named, leaves: Named, x: Tensor, cos_TK: Tensor, sin_TK: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """See `Pieces`."""
        normed = torch.empty_like(x)
        low = self._narrowed(INPUTS, leaves, x)
        projected = [self._product(module, leaves, x) for module in INPUTS.modules]
        del normed
        query, key, value = (split_heads(each, self._config.head_dim) for each in projected)
        del projected
        turned = [torch.empty_like(query), torch.empty_like(key), value]
        return turned, [*([query, key] if self._config.qk_norm else []), *low]

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
        """See `Pieces`."""
        turned = [torch.empty_like(each) for each in gradients[:2]]
        found = self._summed(INPUTS, leaves, x)
        del turned
        return found

    def summed(self, weights: Named, leaves: Named, x: Tensor, mixed_BHTK: Tensor) -> Tensor:
        """See `Pieces`."""
        low = self._narrowed(OUTPUT, leaves, self._tensor(x, self._config.query_size))
        found = self._product(OUTPUT.modules[0], leaves, x)
        del low
        return found

    def summed_back(
        self, weights: Named, leaves: Named, mixed_BHTK: Tensor, gradient: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """See `Pieces`."""
        wide = self._tensor(gradient, self._config.query_size)
        return split_heads(wide, self._config.head_dim), self._through(OUTPUT, leaves, wide)

    def gated(self, weights: Named, leaves: Named, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """See `Pieces`."""
        normed = torch.empty_like(x)
        low = self._narrowed(GATES, leaves, x)
        found = [self._product(module, leaves, x) for module in GATES.modules]
        del normed
        return found, low

    def gated_back(
        self,
        weights: Named,
        leaves: Named,
        x: Tensor,
        beside: list[Tensor],
        gradients: list[Tensor],
        summed: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """See `Pieces`."""
        return self._summed(GATES, leaves, x)

    def last(self, weights: Named, leaves: Named, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """See `Pieces`."""
        through = torch.empty_like(gate)
        low = self._narrowed(LAST, leaves, through)
        found = self._product(LAST.modules[0], leaves, x)
        del through, low
        return found

    def last_back(
        self, weights: Named, leaves: Named, gate: Tensor, up: Tensor, gradient: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """See `Pieces`."""
        inner = torch.empty_like(gate)
        of_gates = [torch.empty_like(gate), torch.empty_like(up)]
        beside = [torch.empty_like(gate)] if leaves else []
        if leaves and not self._in_parts(gradient):
            beside.append(self._tensor(gradient, gradient.shape[-1], wide=True))
        found = self._through(LAST, leaves, gate, ways=0)
        del inner, beside
        return of_gates, found

    def _tensor(self, x: Tensor, width: int, *, wide: bool = False) -> Tensor:
        """Give [B, T, width], in fp32 where it is wide."""
        return x.new_empty(*x.shape[:-1], width, dtype=torch.float32 if wide else x.dtype)

    def _adapted(self, group: Group, leaves: Named) -> list[str]:
        return [module for module in group.modules if module + A_ENDS in leaves]

    def _in_parts(self, x: Tensor) -> bool:
        """Say whether adapters multiply as `trainer.model.low_rank` does; its tensors are small."""
        return not self._is_host and low_rank.takes(x)

    def _narrowed(self, group: Group, leaves: Named, x: Tensor) -> list[Tensor]:
        """Give what adapters keep; without parts their input is there in fp32 beside."""
        modules = self._adapted(group, leaves)
        if not modules:
            return []
        stacked = torch.cat([leaves[module + A_ENDS] for module in modules])
        if self._in_parts(x):
            return [low_rank.narrowed(x.flatten(0, -2), stacked).view(*x.shape[:-1], -1)]
        wide = self._tensor(x, x.shape[-1], wide=True)
        low = self._tensor(x, len(stacked), wide=True)
        del wide, stacked
        return [low]

    def _product(self, module: str, leaves: Named, x: Tensor) -> Tensor:
        """Give a module's output; what its adapter adds is there while it is added."""
        base = self._tensor(x, self._widths[module])
        if module + A_ENDS not in leaves:
            return base
        rounds_first = self._lora.base_quant == "nf4" and self._in_parts(x)
        added = self._tensor(x, self._widths[module], wide=not rounds_first)
        found = torch.empty_like(base)
        del added, base
        return found

    def _gone_through(self, modules: Sequence[str], leaves: Named, x: Tensor) -> Tensor:
        """Go back through adapters in parts; give what they add to the gradient of x."""
        lows = []
        for module in modules:
            shape = x.shape[:-1].numel(), self._widths[module]
            gradient = x.new_empty(()).expand(shape)
            low = x.new_empty(shape[0], self._rank, dtype=torch.float32)
            lows.append(low_rank.back_raised(gradient, low, leaves[module + B_ENDS], 1.0)[0])
        stacked = torch.cat([leaves[module + A_ENDS] for module in modules])
        rows = x.new_empty(()).expand(x.shape).flatten(0, -2)
        return low_rank.back_narrowed(torch.cat(lows, dim=1), rows, stacked)[0]

    def _summed(self, group: Group, leaves: Named, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Go back to a group's input; the gradient of x is written over one of what it sums up."""
        output = torch.empty_like(x) if self._adapted(group, leaves) else None
        found = self._through(group, leaves, x)
        return torch.empty_like(x) if output is None else output, found

    def _through(
        self, group: Group, leaves: Named, x: Tensor, *, ways: int | None = None
    ) -> list[Tensor]:
        """Go back through products and adapters to their input; give the adapters' gradients.

        The products of all ways are there when they are added. What goes into an adapter is there
        in fp32 while it is multiplied, one after the other, and so is what it gives.
        """
        held = [torch.empty_like(x) for _ in group.modules[:ways]]
        adapted = self._adapted(group, leaves)
        if adapted and self._in_parts(x):
            held += [] if group in WRITTEN_OVER else [torch.empty_like(x)]
            held.append(self._gone_through(adapted, leaves, x))
            adapted = []
        lows = []
        for module in adapted:
            into = self._tensor(x, self._widths[module], wide=True)
            lows.append(self._tensor(x, self._rank, wide=True))
            del into
        if adapted:
            held += [torch.empty_like(x), self._tensor(x, x.shape[-1], wide=True)]
            held.append(self._tensor(x, x.shape[-1], wide=True))
        found = [torch.empty_like(leaves[name]) for name in group.leaves([*leaves])]
        held.clear()
        return found


class _WalkedAttention(Chosen):
    """A kernel's memory is that of `trainer.vram_trace`."""

    def __init__(self, *, is_host: bool) -> None:
        self._is_host = is_host
        self._rest: list[Tensor] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention`; a device's kernel leaves a few numbers that last."""
        if not self._is_host and not self._rest:
            self._rest = [query.new_empty(1, dtype=torch.uint8) for _ in range(LASTING_NUMBERS)]
        mixed, _ = super().forward(query, key, value)
        rows, heads, positions, _ = query.shape
        return mixed, query.new_empty(rows, heads, positions, dtype=torch.float32)

    def back(
        self, gradient: Tensor, heads: tuple[Tensor, Tensor, Tensor], mixed: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention`."""
        if self._is_host:
            return host_attention_back(*heads)
        if is_fused(*heads[:2]):
            query, key, _ = heads
            beside = room_bytes(query, key) - attention_back_bytes(query, key)
            room = query.new_empty(beside, dtype=torch.uint8)
            found = attention_back(*heads)
            del room
            return found
        return super().back(gradient, heads, mixed, sums)
