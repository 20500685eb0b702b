"""Which frozen blocks stay on a device between steps, by what steps were seen to take.

Owns the choice: as many as fit beside a step into the memory that was given, spread over the model,
so that copies of the others come evenly. Knows nothing of how blocks get there. Invariant: the
choice is made once, behind a step like all that follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.lora.exact_trace import exact_bytes
from trainer.lora.model import AdaptedModel, brought_bytes

# Evaluations and the allocator's corners are not in a step's peak.
MARGIN_BYTES = 32 << 20
# The first step makes slots and tables, compiles, and packs the base.
STEPS_SEEN = 2


class Residency:
    """Looks at the first steps, then lets blocks stay; `budget_bytes` None lets none."""

    def __init__(self, model: AdaptedModel, budget_bytes: int | None) -> None:
        self._model = model
        self._budget_bytes = budget_bytes
        self._steps = 0

    def stepped(self) -> None:
        """Note that a step was made."""
        if self._budget_bytes is None or self._model.base is None or self._steps > STEPS_SEEN:
            return
        device = self._model.step.device
        self._steps += 1
        if self._steps < STEPS_SEEN:
            device.forget_peak()
        elif self._steps == STEPS_SEEN:
            blocks = [stage for stage in self._model.trunk if stage.is_block]
            size = exact_bytes(brought_bytes(blocks[0], self._model.step.options.torch_dtype))
            count = kept_count(self._budget_bytes, device.peak_bytes(), size, len(blocks))
            self._model.base.keep(spread([stage.shard for stage in blocks], count))


def kept_count(budget_bytes: int, step_bytes: int, block_bytes: int, blocks: int) -> int:
    """Give how many blocks fit beside a step."""
    spare = budget_bytes - MARGIN_BYTES - step_bytes
    return max(0, min(blocks, spare // block_bytes))


def spread(names: Sequence[str], count: int) -> list[str]:
    """Choose `count` of the names, as evenly as can be."""
    return [names[(2 * index + 1) * len(names) // (2 * count)] for index in range(count)]
