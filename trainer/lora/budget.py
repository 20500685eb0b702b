"""What a run with adapters needs, before anything is allocated.

Owns the sizes: of the shards that a step stages, exact; of the frozen base, which is there once; of
memory, from a walk through a step. Knows nothing of a run's progress.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shardb.layout import build
from trainer.budget import (
    CACHE_BYTES,
    HEAP_HOLES,
    HOLES,
    RUNTIME_BYTES,
    TENSORS,
    Budget,
    asked_bytes,
    forms_of,
    step_shape,
    with_ram_disk,
)
from trainer.device import Device
from trainer.lora.base_copies import COPIES, copied_bytes, has_room
from trainer.lora.kept_way import kept_way, left_bytes
from trainer.lora.nf4 import packed_shapes
from trainer.lora.slots import placed_bytes
from trainer.lora.targets import adapter_parameters, adapter_specs, check_targets
from trainer.lora.walk import predicted_adapter_bytes
from trainer.model.adapter_settings import LoraSettings
from trainer.model.stages import Stage, build_stages
from trainer.placement_choice import run_boundary_bytes
from trainer.recipe import Recipe, Settings


def adapter_budget(
    recipe: Recipe,
    lora: LoraSettings,
    settings: Settings,
    store: Path,
    *,
    copies: int,
    stored: Mapping[str, int] | None = None,
) -> Budget:
    """Work out the budgets of a run with adapters; InputError where a target is no module.

    copies: as of `budget_of`. stored: bytes of the base's objects, by shard, where it is there.
    """
    stages = build_stages(recipe.model)
    check_targets(stages, lora)
    shards = adapter_shard_bytes(recipe, lora, stages)
    every, stop = settings.snapshot_every, settings.max_steps
    asked = settings.activation_placement
    placement = "vram" if asked == "auto" or (asked == "host" and _is_host(recipe)) else asked
    why = "beside a frozen base stages' inputs wait where they are computed"
    size = run_boundary_bytes(recipe)
    found = Budget(
        parameter_count=sum(_adapter_count(stage, lora) for stage in stages),
        shards=shards,
        snapshots=(stop // every if every and stop else 0) + settings.snapshot_best,
        memory={},
        active_copies=settings.active_copies if settings.active else 0,
        placement=placement,
        placement_why=why if asked == "auto" else "asked for by --activation-placement",
        boundary_bytes=size,
        spill_bytes=size if placement == "spill" else 0,
        base_bytes=base_bytes(stages, lora),
        copies=copies,
    )
    kept, kept_why = kept_way(
        recipe,
        lora,
        settings,
        placement=placement,
        host_bytes=lambda kept: sum(_memory(recipe, lora, settings, found, kept).values()),
        shape=lambda kept: step_shape(recipe, settings, kept, placement),
    )
    size += left_bytes(recipe, kept)
    found = replace(found, activations=kept, activations_why=kept_why, boundary_bytes=size)
    memory = _memory(recipe, lora, settings, found, kept)
    more = asked_bytes(settings, lambda way: _memory(recipe, lora, settings, found, way))
    found = replace(found, kept_bytes=more)
    if stored and _is_host(recipe):
        copied = copied_bytes(recipe, lora, stored)
        if has_room(settings, copied, sum(memory.values())):
            found, memory = replace(found, copies_base=True), memory | {COPIES: copied}
    return replace(found, memory=with_ram_disk(replace(found, memory=memory), settings, store))


def adapter_shard_bytes(recipe: Recipe, lora: LoraSettings, stages: list[Stage]) -> dict[str, int]:
    """Give the exact size of every shard that a step stages, in forward order."""
    rule = forms_of(recipe).update_rule()
    sizes = {}
    for stage in stages:
        specs = adapter_specs(stage, lora)
        if specs:
            sizes[f"adapters/{stage.name}"] = build(specs).size_bytes
            sizes[f"optim/{stage.name}"] = build(rule.state_specs(specs)).size_bytes
    return sizes


def _memory(
    recipe: Recipe, lora: LoraSettings, settings: Settings, budget: Budget, kept: str
) -> dict[str, int]:
    """Give the parts of host memory; the mapped base is the system's to take back.

    kept: what a step keeps between its two passes.
    """
    parts = {
        "the runtime": RUNTIME_BYTES,
        "the next commit's shards": budget.commit_bytes,
        "the last commit's shards": min(budget.commit_bytes, CACHE_BYTES),
    }
    if not _is_host(recipe):
        away = run_boundary_bytes(recipe) + left_bytes(recipe, kept)
        away = away if budget.placement == "host" else 0
        return parts | {"boundary activations": away}
    shape = step_shape(recipe, settings, kept, budget.placement)
    tensors = predicted_adapter_bytes(shape, lora, is_host=True)
    return parts | {TENSORS: tensors, HOLES: int(HEAP_HOLES * tensors)}


def base_bytes(stages: list[Stage], lora: LoraSettings) -> int:
    """Give the most that the frozen shards take: as imported in fp32, and packed beside that."""
    found = sum(build(stage.specs).size_bytes for stage in stages)
    if lora.base_quant == "nf4":
        found += sum(placed_bytes(packed_shapes(stage), 4) for stage in stages)
    return found


def _is_host(recipe: Recipe) -> bool:
    return Device.from_name(recipe.device).is_host


def _adapter_count(stage: Stage, lora: LoraSettings) -> int:
    return sum(a * b for a, b in (p.shape for p in adapter_parameters(stage, lora).values()))
