"""What a step with adapters takes of a device, with the blocks that may stay there.

Owns that sum. Knows nothing of what is free.
"""

from __future__ import annotations

from trainer.lora.exact_trace import exact_bytes
from trainer.lora.model import brought_bytes
from trainer.lora.residency import MARGIN_BYTES, kept_count
from trainer.lora.stages import adapted
from trainer.lora.walk import predicted_adapter_phases
from trainer.model.adapter_settings import LoraSettings
from trainer.model.stages import build_trunk
from trainer.step_memory import DeviceNeed
from trainer.vram import StepShape

# A prediction is at most a hundredth above what steps take.
OVER_AT_MOST = 100


def adapter_need(shape: StepShape, lora: LoraSettings, budget_bytes: int | None) -> DeviceNeed:
    """Give what a step takes; with a budget, the blocks that stay may fill it."""
    phases = predicted_adapter_phases(shape, lora, is_host=False)
    needed = max(phases.values())
    if budget_bytes is None:
        return DeviceNeed(phases=phases, most_bytes=needed)
    blocks = [s for s in (adapted(s, lora) for s in build_trunk(shape.model)) if s.is_block]
    size = exact_bytes(brought_bytes(blocks[0], shape.options.torch_dtype))
    # Blocks fill what a step was seen to leave: a little more of them than by the prediction.
    kept = kept_count(budget_bytes, needed - needed // OVER_AT_MOST, size, len(blocks))
    most = min(needed + kept * size, budget_bytes - MARGIN_BYTES)
    return DeviceNeed(
        phases=phases,
        stages=len(blocks),
        kept=kept_count(budget_bytes, needed, size, len(blocks)),
        most_bytes=max(needed, most),
    )
