"""The engine that computes what a commit holds, whoever asks: with its adapters where it has some.

Owns that choice. Knows nothing of training.
"""

from __future__ import annotations

from shardb import ReadView
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.lora.engine import AdapterEngine
from trainer.model.stored import RECIPE_SHARD, read_model
from trainer.run_shards import read_recipe


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
