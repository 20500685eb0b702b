"""What `--optimizer-device` means for a run: one place for all updates, or a list of stages.

Owns when speeds are measured for it. Knows nothing of how updates run. Invariants: a run that goes
on keeps the stages it began with, unless another place is asked for; `auto` never changes a run
that has begun, and leaves the device pipeline its updates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from trainer.device import Device
from trainer.link_rates import link_rates
from trainer.model.stages import build_head, build_trunk
from trainer.optimizers.placement import (
    UpdateRates,
    chosen_place,
    host_share_beside_link,
    host_stages,
)
from trainer.options import EngineOptions
from trainer.pass_rates import update_rate
from trainer.pipeline.choosing import pipeline_way
from trainer.recipe import Recipe, Settings
from trainer.recipe_options import options_of

Note = Callable[[str], None]


def updates_placed(
    recipe: Recipe, settings: Settings, stored: Recipe | None, note: Note
) -> tuple[Recipe, list[str]]:
    """Give the recipe with its places, and what there is to say about them."""
    wanted = recipe.optimizer_device
    if wanted == "auto" and stored is not None:
        return _same_as(stored, recipe), []
    if wanted == "split" and stored is not None and stored.optimizer_device == "split":
        return _same_as(stored, recipe), []
    if wanted in ("gpu", "cpu"):
        recipe = replace(recipe, optimizer_host_stages=())
    device = Device.from_name(recipe.device)
    pipelined = _through_pipeline(recipe, settings, device)
    if wanted == "auto" and (pipelined or device.is_host or recipe.lora is not None):
        return replace(recipe, optimizer_device="gpu"), []
    if wanted in ("gpu", "cpu"):
        return recipe, []
    rates = _measured(recipe, device, note)
    place = chosen_place(rates) if wanted == "auto" else wanted
    share = rates.host_share
    if pipelined and (link := link_rates(device)) is not None:
        share = host_share_beside_link(rates.host, link.both)
    stages = host_stages(_order(recipe), share) if place == "split" else ()
    chosen = replace(recipe, optimizer_device=place, optimizer_host_stages=stages)
    where = f"; on the processor: {', '.join(stages)}" if stages else ""
    said = (
        f"--optimizer-device {place}: {rates.host / 1e6:,.0f} million parameters/s on the"
        f" processor, {rates.device / 1e6:,.0f} where steps compute{where}"
    )
    return chosen, [said]


def _same_as(stored: Recipe, recipe: Recipe) -> Recipe:
    return replace(
        recipe,
        optimizer_device=stored.optimizer_device,
        optimizer_host_stages=stored.optimizer_host_stages,
    )


def _through_pipeline(recipe: Recipe, settings: Settings, device: Device) -> bool:
    """Say whether steps would go through the pipeline, if updates stayed on the device."""
    if recipe.lora is not None:
        return False
    options = _options(recipe, settings)
    return pipeline_way(settings, options, is_host=device.is_host) is not None


def _options(recipe: Recipe, settings: Settings) -> EngineOptions:
    on_device = replace(recipe, optimizer_device="gpu", optimizer_host_stages=())
    return options_of(on_device, settings)


def _measured(recipe: Recipe, device: Device, note: Note) -> UpdateRates:
    note("--optimizer-device: measuring how fast updates are")
    torch.set_num_threads(recipe.threads)
    options = EngineOptions(
        optimizer=recipe.optimizer, optimizer_state_dtype=recipe.optimizer_state_dtype
    )
    host = update_rate(options, Device.from_name("cpu"))
    return UpdateRates(host=host, device=host if device.is_host else update_rate(options, device))


def _order(recipe: Recipe) -> list[tuple[str, int]]:
    """Give stages and sizes in the order in which they are updated."""
    model = recipe.model
    stages = [*build_trunk(model), *([] if model.tied_embeddings else [build_head(model)])]
    return [
        (stage.name, sum(spec.bytes for spec in stage.specs.values())) for stage in reversed(stages)
    ]
