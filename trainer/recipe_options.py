"""What the engine is told of a recipe and its settings.

Owns which fields change a step's arithmetic or course, and hands them on by name. Knows nothing of
what the engine does with them. Invariant: no field of a recipe is dropped in silence; one that this
version's engine does not know is refused unless it has its default.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from trainer.errors import InputError
from trainer.host_memory import machine_memory
from trainer.options import EngineOptions
from trainer.recipe import Recipe, Settings, flag_of
from trainer.sizes import size_of

# Used where batches, schedules and initial values are made, before the engine sees a step.
NOT_THE_ENGINES = frozenset(
    "model data_digest seq_len seed device threads micro_batch_size gradient_accumulation_steps "
    "shuffle_train row_order shuffle_buffer_size learning_rate lr_schedule warmup_tokens "
    "decay_tokens min_lr_ratio loss_scale loss_scale_growth_steps "
    "lora_rank lora_alpha lora_targets lora_dropout base_quant".split()
)


def options_of(
    recipe: Recipe,
    settings: Settings,
    activations: str = "recompute",
    placement: str = "vram",
) -> EngineOptions:
    """Give the engine's options; InputError names a flag that it cannot follow."""
    known = {field.name for field in fields(EngineOptions)}
    values: dict[str, Any] = {
        "prefetch": settings.prefetch_shards,
        "prefetch_window": settings.prefetch_window,
        "prefetch_optimizer_shards": settings.prefetch_optimizer_shards,
        "timing_sync_cuda": settings.timing_sync_cuda,
        "activations": activations,
        "activation_placement": placement,
        "pinned_budget_bytes": pinned_budget_bytes(settings),
    }
    for field in fields(Recipe):
        value = getattr(recipe, field.name)
        if field.name == "optimizer_device" and value == "auto":
            continue  # a plan has yet to make one of the others of it
        if field.name in known:
            values[field.name] = value
        elif field.name not in NOT_THE_ENGINES and value != field.default:
            raise InputError(f"{flag_of(field.name)} is not available yet: leave it out")
    return EngineOptions(**values)


def pinned_budget_bytes(settings: Settings) -> int:
    """Give the host memory that may be page-locked: nine tenths of it where nothing was said."""
    if settings.pinned_budget is None:
        return machine_memory()[0] // 10 * 9
    return size_of(settings.pinned_budget, "--pinned-budget")
