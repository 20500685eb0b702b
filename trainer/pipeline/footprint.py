"""How much memory of the device the pipeline takes for itself, and for how long.

Owns the numbers of slots and the arithmetic over them: one place for whoever predicts memory. Knows
nothing of activations, which the computation allocates beside this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.pipeline.shapes import ITEM_BYTES, StageShape

# A third slot of gradients is worth more than a stage where at least so many stay beside it.
FEW_STAGES = 2
# Stages below this share of the largest always stay on the device.
SMALL_SHARE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSizes:
    """How many slots there are of each kind, and how large a tile is.

    params_slots: whole stages' fp32 parameters; gradient_slots: whole stages' fp32 gradients (one
    more where the head shares its weight); tile_slots: the state of `tile_elements` parameters;
    boundary_slots: one micro-batch's hidden states, where activations wait on the host;
    more_gradient_slots, more_tile_slots: how many there are at most where a budget has room for
        them but not for every stage: then updates need not wait for copies out, nor the replay for
        updates;
    more_boundary_slots: how many of those there are where a budget has room: then a stage's hidden
        states are asked for a stage ahead, and wait behind no other copies in;
    margin_bytes: left free when a budget is filled.
    """

    params_slots: int = 3
    gradient_slots: int = 2
    tile_slots: int = 3
    tile_elements: int = 8 << 20
    boundary_slots: int = 3
    more_gradient_slots: int = 3
    more_tile_slots: int = 6
    more_boundary_slots: int = 8
    margin_bytes: int = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Spending:
    """What spare memory is spent on: more slots, and which stages stay on the device then."""

    slot_bytes: int = 0
    more_boundaries: bool = False
    more_tiles: int = 0
    more_gradients: bool = False
    stages: tuple[str, ...]


def growth_bytes(shapes: Sequence[StageShape], sizes: PipelineSizes) -> tuple[int, int]:
    """Give what more slots take where a budget has room for all: of tiles, and of gradients."""
    largest = max(shape.count for shape in shapes)
    tile = max(shape.tile_bytes for shape in shapes)
    gradients = max(0, sizes.more_gradient_slots - sizes.gradient_slots)
    tiles = max(0, sizes.more_tile_slots - sizes.tile_slots)
    return tiles * tile, ITEM_BYTES * gradients * largest


def boundary_growth_bytes(sizes: PipelineSizes, slot_bytes: int) -> int:
    """Give what more slots of hidden states take."""
    return slot_bytes * max(0, sizes.more_boundary_slots - sizes.boundary_slots)


def spending(
    shapes: Mapping[str, StageShape],
    sizes: PipelineSizes,
    spare_bytes: int,
    *,
    boundary_bytes: int = 0,
) -> Spending:
    """Say what so much spare memory is best spent on.

    boundary_bytes: of one slot for hidden states, where they wait on the host: more of those come
    before anything else.

    Small stages stay anyway. Slots come first, unless every stage can stay. Of the stages the first
    two come first: a replay ends and the next forward pass begins with them, and while their copies
    out are still under way that pass needs nothing that has to come in. The others lie as far from
    one another as can be, so that the link catches up while each of them is computed.
    """
    always = set(small_stages(shapes))
    needed = {n: resident_bytes(shape) for n, shape in shapes.items() if n not in always}
    boundaries, left = boundary_growth_bytes(sizes, boundary_bytes), spare_bytes
    more_boundaries = 0 < boundaries <= left
    left -= boundaries if more_boundaries else 0
    if sum(needed.values()) <= left:
        return Spending(
            slot_bytes=spare_bytes - left,
            more_boundaries=more_boundaries,
            stages=tuple(shapes),
        )
    tiles, gradients = growth_bytes([*shapes.values()], sizes)
    tile = max(shape.tile_bytes for shape in shapes.values())
    more_tiles = min(tiles, max(0, left)) // tile
    left -= more_tiles * tile
    # Where next to nothing stays, the link is what a step waits for, and no gradients' slot.
    more_gradients = (
        more_tiles * tile == tiles and gradients + FEW_STAGES * max(needed.values()) <= left
    )
    left -= gradients if more_gradients else 0
    slot_bytes = spare_bytes - left
    stages = [*always]
    for name in _in_keeping_order([*needed]):
        if needed[name] <= left:
            stages.append(name)
            left -= needed[name]
    return Spending(
        slot_bytes=slot_bytes,
        more_boundaries=more_boundaries,
        more_tiles=more_tiles,
        more_gradients=more_gradients,
        stages=tuple(stages),
    )


def small_stages(shapes: Mapping[str, StageShape]) -> list[str]:
    """Name the stages that always stay: they take next to nothing, and would take a slot each."""
    limit = SMALL_SHARE * max(resident_bytes(shape) for shape in shapes.values())
    return [name for name, shape in shapes.items() if resident_bytes(shape) < limit]


def _in_keeping_order(names: Sequence[str]) -> list[str]:
    others = names[2:-1]
    bits = len(others).bit_length()
    places = sorted(range(len(others)), key=lambda n: f"{n + 1:0{bits}b}"[::-1])
    return [*names[:2], *(others[n] for n in places), *names[2:][-1:]]


def resident_bytes(shape: StageShape) -> int:
    """Give what a stage takes on the device while it stays there."""
    return shape.params.bytes + shape.state.bytes


def lasting_bytes(
    shapes: Sequence[StageShape], sizes: PipelineSizes, *, item_bytes: int, tied: bool
) -> int:
    """Give what the pipeline holds from its first step on, residents and boundaries aside.

    shapes: of every stage that owns shards; item_bytes: of the compute dtype.
    """
    image = max(shape.params.count for shape in shapes)
    largest = max(shape.count for shape in shapes)
    slots = sizes.params_slots * image + (sizes.gradient_slots + (1 if tied else 0)) * largest
    tiles = sizes.tile_slots * max(shape.tile_bytes for shape in shapes)
    return ITEM_BYTES * slots + tiles + item_bytes * largest


def bank_bytes(shapes: Sequence[StageShape], *, half: bool) -> int:
    """Give what gradients take while they wait for the model's norm (clip mode `global`).

    half: whether a step has one micro-batch and computes in bf16. The embeddings' and the head's
    are fp32 sums even then, so this is a little low for them: they are counted in full.
    """
    counts = [shape.count for shape in shapes]
    if not half:
        return ITEM_BYTES * sum(counts)
    return 2 * sum(counts[1:-1]) + ITEM_BYTES * (counts[0] + counts[-1])
