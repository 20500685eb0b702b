"""What blocks keep of their first pass for the way back, by what has room.

Owns that choice and its reason: blocks that are not compiled keep their products (`keep`), compiled
ones what attention gave (`attention`). Knows nothing of how it is kept. No choice changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable

from trainer.device import Device
from trainer.errors import InputError
from trainer.host_memory import machine_memory
from trainer.lora.base_tier import waiting_bytes
from trainer.lora.need import adapter_need
from trainer.lora.residency import MARGIN_BYTES
from trainer.model.adapter_settings import LoraSettings
from trainer.pipeline.choosing import vram_budget_of
from trainer.recipe import Recipe, Settings
from trainer.recipe_options import pinned_budget_bytes
from trainer.sizes import in_bytes
from trainer.vram import StepShape

# Of the memory that is free now; a run goes on for hours beside other programs.
SHARE_OF_FREE = 0.5
SUM_BYTES = 4


def kept_way(
    recipe: Recipe,
    lora: LoraSettings,
    settings: Settings,
    *,
    placement: str,
    host_bytes: Callable[[str], int],
    shape: Callable[[str], StepShape],
) -> tuple[str, str]:
    """Give what is kept between a step's passes, and why.

    host_bytes, shape: of a run, by what it keeps.

    Raises:
        InputError: what was asked for is for compiled blocks.
    """
    asked = settings.activations
    if asked == "attention" and not recipe.compile_blocks:
        raise InputError(
            "--activations attention is for compiled blocks: give auto, keep or recompute, or"
            " --compile-blocks"
        )
    if asked != "auto":
        return asked, "asked for by --activations"
    kept = "attention" if recipe.compile_blocks else "keep"
    if placement == "host" and kept == "attention":
        return _waiting(recipe, lora, settings, host_bytes(kept))
    if placement != "vram":
        return "recompute", f"stages' inputs wait elsewhere (--activation-placement {placement})"
    if Device.from_name(recipe.device).is_host:
        return _on_host(kept, host_bytes(kept))
    budget = vram_budget_of(settings)
    if budget is None:
        return "recompute", "no --vram-budget says how much of the device they may take"
    needed = adapter_need(shape(kept), lora, None).most_bytes + MARGIN_BYTES
    says = f"keeping them takes {in_bytes(needed)} of --vram-budget {in_bytes(budget)}"
    return (kept if needed <= budget else "recompute"), says


def left_bytes(recipe: Recipe, kept: str) -> int:
    """Give what compiled blocks leave: attention's output and sums, and that added to the input."""
    if kept != "attention":
        return 0
    model = recipe.model
    item = 4 if recipe.dtype == "fp32" else 2
    a_token = (model.query_size + model.hidden_size) * item + model.num_heads * SUM_BYTES
    tokens = recipe.micro_batch_size * recipe.seq_len * recipe.gradient_accumulation_steps
    return a_token * tokens * model.num_layers


def _waiting(
    recipe: Recipe, lora: LoraSettings, settings: Settings, needed: int
) -> tuple[str, str]:
    """Keep where host memory has room for it, page-locked, beside the base."""
    base = waiting_bytes(recipe, lora)
    free, limit = machine_memory()[1], pinned_budget_bytes(settings)
    room = min(int(SHARE_OF_FREE * free), limit)
    says = f"with the base it takes {in_bytes(needed + base)} of memory, {in_bytes(free)} are free"
    if limit < SHARE_OF_FREE * free:
        says += f", {in_bytes(limit)} may be page-locked"
    return ("attention" if needed + base <= room else "recompute"), says


def _on_host(kept: str, needed: int) -> tuple[str, str]:
    free = machine_memory()[1]
    if needed <= SHARE_OF_FREE * free:
        return kept, f"a run that keeps them takes {in_bytes(needed)}, {in_bytes(free)} are free"
    says = f"keeping them would take {in_bytes(needed)}, over half of the {in_bytes(free)} free"
    return "recompute", says
