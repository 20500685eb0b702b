"""Where a run's boundary activations will wait, chosen by what has room, and why.

Owns the order of choice: where the step computes, else host memory, else a file. Sizes come from
`vram` and `budget`. Knows nothing of steps. None of it changes a bit of a result. On a CPU the
device's memory is host memory, so that `vram` and `host` are one place, called `vram`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trainer.budget import Budget, is_ram_disk, room_bytes, step_memory, step_shape
from trainer.device import Device
from trainer.host_memory import machine_memory
from trainer.pipeline.choosing import vram_budget_of
from trainer.placement_places import boundary_bytes
from trainer.recipe import Recipe, Settings
from trainer.sizes import in_bytes
from trainer.step_memory import step_bytes

BOUNDARIES = "boundary activations"


def placed(budget: Budget, recipe: Recipe, settings: Settings, store: Path) -> Budget:
    """Give the budget with the place that fits, and what is held there counted there."""
    size = run_boundary_bytes(recipe)
    place, why = _place(budget, recipe, settings, store, size)
    memory = dict(budget.memory)
    if place == "host":
        memory[BOUNDARIES] = size
    elif place == "spill" and recipe.device == "cpu":
        memory |= step_memory(step_shape(recipe, settings, budget.activations, place), settings)
    return replace(
        budget,
        memory=memory,
        placement=place,
        placement_why=why,
        boundary_bytes=size,
        spill_bytes=size if place == "spill" else 0,
    )


def run_boundary_bytes(recipe: Recipe) -> int:
    """Give what the boundaries of a recipe's step take, wherever they are."""
    item = 4 if recipe.dtype == "fp32" else 2
    tokens = recipe.micro_batch_size * recipe.seq_len
    # Embeddings, blocks, and the last norm.
    stages = recipe.model.num_layers + 2
    one_batch = boundary_bytes(stages, [tokens], recipe.model.hidden_size * item)
    return one_batch * recipe.gradient_accumulation_steps


def _place(
    budget: Budget, recipe: Recipe, settings: Settings, store: Path, size: int
) -> tuple[str, str]:
    """Give the place, and why."""
    device = Device.from_name(recipe.device)
    wanted = settings.activation_placement
    if wanted != "auto":
        return _where_computed(device, wanted), "asked for by --activation-placement"
    if budget.activations == "keep":
        return "vram", "all activations are kept"
    if not device.is_host:
        free, what = (device.memory_bytes() or (0, 0))[0], "free there"
        limit = vram_budget_of(settings)
        if limit is not None and limit < free:
            free, what = limit, "of --vram-budget"
        needed = step_bytes(step_shape(recipe, settings, "recompute"), settings)
        if needed <= free:
            return "vram", f"the step needs {in_bytes(needed)} of the {in_bytes(free)} {what}"
    available = machine_memory()[1]
    # On a CPU the walk through the step has counted them already.
    needed = budget.memory_bytes + (0 if device.is_host else size)
    if needed <= available:
        why = f"training needs {in_bytes(needed)} of the {in_bytes(available)} free there"
        return _where_computed(device, "host"), why
    room = room_bytes(store)
    if not is_ram_disk(store) and budget.store_bytes + size <= room:
        return (
            "spill",
            f"training would need {in_bytes(needed)} of memory, {in_bytes(available)} are free",
        )
    why = f"neither memory ({in_bytes(available)} free) nor {store} has room for more"
    return _where_computed(device, "host"), why


def _where_computed(device: Device, wanted: str) -> str:
    return "vram" if device.is_host and wanted == "host" else wanted
