"""Whether blocks that are not compiled keep what their first pass computed.

Owns that choice and its reason. Knows nothing of how it is kept. No choice changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable

from trainer.device import Device
from trainer.errors import InputError
from trainer.host_memory import machine_memory
from trainer.lora.need import adapter_need
from trainer.lora.residency import MARGIN_BYTES
from trainer.model.adapter_settings import LoraSettings
from trainer.pipeline.choosing import vram_budget_of
from trainer.recipe import Recipe, Settings
from trainer.sizes import in_bytes
from trainer.vram import StepShape

# Of the memory that is free now; a run goes on for hours beside other programs.
SHARE_OF_FREE = 0.5


def eager_way(
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
    if recipe.compile_blocks:
        return ("recompute" if asked == "auto" else asked), ""
    if asked == "attention":
        raise InputError(
            "--activations attention is for compiled blocks: give auto, keep or recompute, or"
            " --compile-blocks"
        )
    if asked != "auto":
        return asked, "asked for by --activations"
    if placement != "vram":
        return "recompute", f"stages' inputs wait elsewhere (--activation-placement {placement})"
    if Device.from_name(recipe.device).is_host:
        return _on_host(host_bytes("keep"))
    budget = vram_budget_of(settings)
    if budget is None:
        return "recompute", "no --vram-budget says how much of the device they may take"
    needed = adapter_need(shape("keep"), lora, None).most_bytes + MARGIN_BYTES
    says = f"keeping them takes {in_bytes(needed)} of --vram-budget {in_bytes(budget)}"
    return ("keep" if needed <= budget else "recompute"), says


def _on_host(needed: int) -> tuple[str, str]:
    free = machine_memory()[1]
    if needed <= SHARE_OF_FREE * free:
        return "keep", f"a run that keeps them takes {in_bytes(needed)}, {in_bytes(free)} are free"
    says = f"keeping them would take {in_bytes(needed)}, over half of the {in_bytes(free)} free"
    return "recompute", says
