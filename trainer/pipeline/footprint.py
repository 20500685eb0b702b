"""How much memory of the device the pipeline takes for itself, and for how long.

Owns the numbers of slots and the arithmetic over them: one place for whoever predicts memory. Knows
nothing of activations, which the computation allocates beside this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.pipeline.shapes import ITEM_BYTES, StageShape


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSizes:
    """How many slots there are of each kind, and how large a tile is.

    params_slots: whole stages' fp32 parameters; gradient_slots: whole stages' fp32 gradients (one
    more where the head shares its weight); tile_slots: the state of `tile_elements` parameters;
    boundary_slots: one micro-batch's hidden states, where activations wait on the host;
    margin_bytes: left free when a budget is filled.
    """

    params_slots: int = 3
    gradient_slots: int = 2
    tile_slots: int = 3
    tile_elements: int = 8 << 20
    boundary_slots: int = 3
    margin_bytes: int = 16 << 20


def lasting_bytes(
    shapes: Sequence[StageShape], sizes: PipelineSizes, *, item_bytes: int, tied: bool
) -> int:
    """Give what the pipeline holds from its first step on, residents and boundaries aside.

    shapes: of every stage that owns shards; item_bytes: of the compute dtype.
    """
    image = max(shape.params.count for shape in shapes)
    largest = max(shape.count for shape in shapes)
    tile = max(t.state_count for shape in shapes for t in shape.tiles)
    slots = sizes.params_slots * image + sizes.tile_slots * tile
    slots += (sizes.gradient_slots + (1 if tied else 0)) * largest
    return ITEM_BYTES * slots + item_bytes * largest


def bank_bytes(shapes: Sequence[StageShape], *, half: bool) -> int:
    """Give what gradients take while they wait for the model's norm (clip mode `global`).

    half: whether a step has one micro-batch and computes in bf16. The embeddings' and the head's
    are fp32 sums even then, so this is a little low for them: they are counted in full.
    """
    counts = [shape.count for shape in shapes]
    if not half:
        return ITEM_BYTES * sum(counts)
    return 2 * sum(counts[1:-1]) + ITEM_BYTES * (counts[0] + counts[-1])
