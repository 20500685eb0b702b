"""Adapters of a stored model: their arithmetic, their names, and the weights that stand for both.

Owns what is true of adapters whoever computes with them. The arithmetic is that of `peft`: the
base's product in the compute dtype, the adapter's in the adapter's own, their sum cast back. Knows
nothing of training or packages. Invariant: a commit without adapters is read as if this module
were not there.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardb import ReadView, ShardView, torch_adaptor
from trainer.model.adapter_settings import LoraSettings
from trainer.model.dropout import dropped
from trainer.model.stored import RECIPE_SHARD, read_bytes

PREFIX = "adapters/"
A_ENDS, B_ENDS = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """One module's adapter: A [r, in], B [out, r], and the factor of their product.

    rounds_first: what is added is cast before the sum, as `peft` does beside a packed base.
    dropout, drop_seed: how much of x is dropped, and by which mask; None drops nothing.
    """

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    rounds_first: bool = False
    dropout: float = 0.0
    drop_seed: int | None = None

    def added_to(self, output: Tensor, x: Tensor) -> Tensor:
        """Add scale * B(A x) to a base's output, and keep its dtype."""
        x = x.to(self.a_RI.dtype)
        if self.drop_seed is not None:
            x = dropped(x, self.dropout, self.drop_seed)
        return self.added_low(output, F.linear(x, self.a_RI))

    def added_low(self, output: Tensor, low: Tensor) -> Tensor:
        """Add scale * B low to a base's output, where low is A x."""
        added = F.linear(low, self.b_OR) * self.scale
        return (output + (added.to(output.dtype) if self.rounds_first else added)).to(output.dtype)


def adapters_of(view: ReadView) -> LoraSettings | None:
    """Give what adapters a commit has; None where it has none."""
    if not any(name.startswith(PREFIX) for name in view.names()):
        return None
    return settings_in(read_bytes(view, RECIPE_SHARD))


def settings_in(recipe: bytes) -> LoraSettings | None:
    """Give what a recipe's JSON says of adapters; None where it has none."""
    values = json.loads(recipe)
    if not values.get("lora_rank"):
        return None
    return LoraSettings(
        rank=values["lora_rank"],
        alpha=values["lora_alpha"],
        targets=tuple(values["lora_targets"]),
        base_quant=values["base_quant"],
        dropout=values["lora_dropout"],
    )


def stage_adapters(view: ShardView, lora: LoraSettings) -> dict[str, Adapter]:
    """Give a shard's adapters by the weight's name."""
    tensors = torch_adaptor.tensors(view)
    return {
        name.removesuffix(A_ENDS) + ".weight": Adapter(
            a_RI=tensor, b_OR=tensors[name.removesuffix(A_ENDS) + B_ENDS], scale=lora.scale
        )
        for name, tensor in tensors.items()
        if name.endswith(A_ENDS)
    }


def adapter_shard(shards: Container[str], shard: str) -> str | None:
    """Give the shard of the adapters beside `params/<stage>`, where a commit has one."""
    kind, _, stage = shard.partition("/")
    return PREFIX + stage if kind == "params" and PREFIX + stage in shards else None


def with_adapters(
    weights: Mapping[str, Tensor], beside: ShardView, lora: LoraSettings
) -> dict[str, Tensor]:
    """Give a stage's weights with its adapters merged in: those are fp32, the others as stored."""
    adapters = stage_adapters(beside, lora)
    assert adapters.keys() <= weights.keys(), "an adapter without a weight"
    return {
        name: merged(tensor, adapters[name]) if name in adapters else tensor
        for name, tensor in weights.items()
    }


def merged(weight: Tensor, adapter: Adapter) -> Tensor:
    """Give the fp32 weight that stands for base and adapter: W + scale * B A."""
    return weight.to(torch.float32) + (adapter.b_OR.float() @ adapter.a_RI.float()) * adapter.scale
