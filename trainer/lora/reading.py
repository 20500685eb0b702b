"""Adapters as whoever reads a commit meets them: for computing beside the base, or merged into it.

Owns how a commit tells its adapters. Knows nothing of training or packages. Invariant: a commit
without adapters is read as if this module were not there.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import Tensor

from shardb import ReadView, ShardView, torch_adaptor
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.lora.engine import AdapterEngine
from trainer.lora.linears import Adapter, merged
from trainer.lora.settings import LoraSettings
from trainer.model.stored import read_model
from trainer.run_shards import RECIPE_SHARD, read_recipe

PREFIX = "adapters/"
A_ENDS, B_ENDS = ".lora_A.weight", ".lora_B.weight"


def adapters_of(view: ReadView) -> LoraSettings | None:
    """Give what adapters a commit has; None where it has none."""
    if not any(name.startswith(PREFIX) for name in view.names()):
        return None
    return read_recipe(view).lora


def reading_engine(view: ReadView, device: str) -> Engine:
    """Give the engine that computes what a commit holds, adapters included."""
    model = read_model(view)
    if RECIPE_SHARD not in view.names():  # imported and not trained yet
        return Engine(model, EngineOptions(), Device.from_name(device))
    recipe = read_recipe(view)
    options = EngineOptions(dtype=recipe.dtype)
    if recipe.lora is None:
        return Engine(model, options, Device.from_name(device))
    return AdapterEngine(model, options, Device.from_name(device), recipe.lora)


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
