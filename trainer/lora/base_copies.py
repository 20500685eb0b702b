"""Whether a frozen base is kept in memory in the dtype that computes, where the host computes.

Owns that choice and its size. A shard that is stored in another dtype is rounded or widened each
time it is visited, twice a step; a copy is made once. Knows nothing of how copies are made. No
choice changes a bit.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardb import TensorSpec, torch_adaptor
from shardb.layout import build
from trainer.host_memory import machine_memory
from trainer.lora.kept_way import SHARE_OF_FREE
from trainer.lora.model import brought_bytes
from trainer.lora.stages import adapted
from trainer.model.adapter_settings import LoraSettings
from trainer.model.stages import Stage, build_head, build_trunk
from trainer.options import EngineOptions
from trainer.recipe import Recipe, Settings

COPIES = "the base as it computes"


def copied_bytes(recipe: Recipe, lora: LoraSettings, stored: Mapping[str, int]) -> int:
    """Give what copies take of all that is stored in another dtype.

    stored: bytes of the objects of a commit, by shard.
    """
    dtype = EngineOptions(dtype=recipe.dtype).torch_dtype
    form = torch_adaptor.NAMES[dtype]
    stages = [adapted(s, lora) for s in (*build_trunk(recipe.model), build_head(recipe.model))]
    return sum(
        brought_bytes(stage, dtype)
        for stage in stages
        if not stage.is_table and stored.get(f"params/{stage.name}") != _bytes_as(stage.inner, form)
    )


def has_room(settings: Settings, copied: int, others: int) -> bool:
    """Say whether copies stay, beside all else that a run takes of host memory."""
    if not copied or settings.base_tier == "disk" or settings.poison_buffers:
        return False
    return copied + others <= SHARE_OF_FREE * machine_memory()[1]


def _bytes_as(stage: Stage, form: str) -> int:
    """Give the size of a stage's object with every tensor in one dtype."""
    specs = {n: TensorSpec(dtype=form, shape=p.shape) for n, p in stage.parameters.items()}
    return build(specs).size_bytes
