"""Where everything of a stage lies: in its two objects, in slots on the device, in tiles.

Owns offsets, in elements from the start of an object's data. Knows nothing of devices or of
streams. Invariants: all tensors of an image have one type, parameters fp32, state fp32 or bf16;
gradients and compute weights begin on ALIGNED elements, whatever the image has, because kernels may
round differently elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardb import TensorSpec, layout
from shardb.views import TensorImage

ALIGNED = 64
ITEM_BYTES = 4
ITEM_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageShape:
    """An object's data as one run of elements of one type."""

    start_bytes: int
    count: int
    offsets: Mapping[str, int]
    dtype: torch.dtype = torch.float32

    @property
    def item_bytes(self) -> int:
        """Give the size of an element."""
        return self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Give the size of all elements."""
        return self.item_bytes * self.count

    @classmethod
    def of(cls, specs: Mapping[str, TensorSpec]) -> ImageShape:
        """Give the shape that the store lays these tensors out in."""
        return cls.read(layout.build(specs))

    @classmethod
    def read(cls, placed: layout.Layout) -> ImageShape:
        """Read the shape from a layout, which holds tensors of one type alone."""
        start = min(placed.offsets.values())
        (dtype,) = {ITEM_TYPES[spec.dtype] for spec in placed.specs.values()}
        size = dtype.itemsize
        return cls(
            start_bytes=start,
            count=(placed.size_bytes - start) // size,
            offsets={n: (at - start) // size for n, at in placed.offsets.items()},
            dtype=dtype,
        )

    def fits(self, image: TensorImage) -> bool:
        """Say whether an image is laid out like this: one of another origin may not be."""
        placed = image.layout
        return placed.size_bytes == self.start_bytes + self.bytes and all(
            placed.offsets.get(name) == self.start_bytes + self.item_bytes * offset
            for name, offset in self.offsets.items()
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """`count` elements from `start` in one buffer, that lie from `placed` in another."""

    start: int
    placed: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Elements of one tensor in a tile: where its parts begin, each in its own buffer.

    states: in a tile's buffer; image_states: in a buffer that holds the whole image.
    """

    tensor: str
    count: int
    params: int
    gradient: int
    states: tuple[int, ...]
    image_states: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """What is updated together: its pieces, and the runs in which parameters and state move.

    params_filled, state_filled: so many elements of each image are complete, from its start on,
        when this tile and all before it are written.
    """

    pieces: tuple[Piece, ...]
    params_runs: tuple[Run, ...]
    state_runs: tuple[Run, ...]
    state_count: int
    params_filled: int = 0
    state_filled: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShape:
    """A stage's images, the aligned places of its tensors on the device, and its tiles."""

    params: ImageShape
    state: ImageShape
    tensors: Mapping[str, tuple[int, ...]]
    places: Mapping[str, int]
    count: int
    tiles: tuple[Tile, ...]

    @property
    def tile_bytes(self) -> int:
        """Give what the state of the largest tile takes."""
        return self.state.item_bytes * max(tile.state_count for tile in self.tiles)

    @property
    def is_aligned(self) -> bool:
        """Say whether the image has every tensor where the device wants it."""
        return self.places == self.params.offsets

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Give the tensors at their aligned places, in the stage's order."""
        return {
            name: buffer[self.places[name] :][: math.prod(shape)].view(shape)
            for name, shape in self.tensors.items()
        }

    def image_views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Give the tensors where the image of the parameters has them, in the stage's order."""
        return {
            name: buffer[self.params.offsets[name] :][: math.prod(shape)].view(shape)
            for name, shape in self.tensors.items()
        }


def stage_shape(
    params: Mapping[str, TensorSpec],
    state: Mapping[str, TensorSpec],
    state_names: Sequence[str],
    tile_elements: int,
) -> StageShape:
    """Lay out a stage; `state_names` are what a parameter's state tensors are called."""
    images = ImageShape.of(params), ImageShape.of(state)
    places, count = _aligned(params, images[0].offsets)
    return StageShape(
        params=images[0],
        state=images[1],
        tensors={name: spec.shape for name, spec in params.items()},
        places=places,
        count=count,
        tiles=tuple(_tiles(params, images, places, state_names, tile_elements)),
    )


def _aligned(
    specs: Mapping[str, TensorSpec], offsets: Mapping[str, int]
) -> tuple[dict[str, int], int]:
    """Place tensors in the image's order, so that where nothing is amiss both are the same."""
    places, offset = {}, 0
    for name in sorted(offsets, key=lambda n: offsets[n]):
        places[name] = offset
        offset += -(-specs[name].bytes // (ITEM_BYTES * ALIGNED)) * ALIGNED
    return places, offset


def _tiles(
    params: Mapping[str, TensorSpec],
    images: tuple[ImageShape, ImageShape],
    places: Mapping[str, int],
    state_names: Sequence[str],
    tile_elements: int,
) -> list[Tile]:
    """Cut tensors, in the order in which the object has them, into tiles as full as can be.

    Pieces end on ALIGNED elements, or with their tensor.
    """
    tiles: list[Tile] = []
    parts: list[tuple[str, int, int]] = []
    room = tile_elements
    for name in sorted(images[0].offsets, key=lambda n: images[0].offsets[n]):
        total, start = params[name].bytes // ITEM_BYTES, 0
        while start < total:
            count = min(room, total - start)
            if start + count < total:
                count -= count % ALIGNED
            if not count:  # no room
                assert parts, "a tile is smaller than a line"
                tiles.append(_tile(parts, images, places, state_names))
                parts, room = [], tile_elements
                continue
            parts.append((name, start, count))
            start, room = start + count, room - count
    if parts:
        tiles.append(_tile(parts, images, places, state_names))
    return _with_filled(tiles, images)


def _with_filled(tiles: Sequence[Tile], images: tuple[ImageShape, ImageShape]) -> list[Tile]:
    """Note in each tile where the first element lies that a later one writes."""
    params, state = images[0].count, images[1].count
    found: list[Tile] = []
    for tile in reversed(tiles):
        found.append(replace(tile, params_filled=params, state_filled=state))
        params = min(params, *(run.start for run in tile.params_runs))
        state = min(state, *(run.start for run in tile.state_runs))
    return found[::-1]


def _tile(
    parts: Sequence[tuple[str, int, int]],
    images: tuple[ImageShape, ImageShape],
    places: Mapping[str, int],
    state_names: Sequence[str],
) -> Tile:
    state_starts = {
        (name, state): images[1].offsets[f"{name}.{state}"] + start
        for name, start, _ in parts
        for state in state_names
    }
    counts = {name: count for name, _, count in parts}
    placed: dict[tuple[str, str], int] = {}
    state_runs: list[Run] = []
    offset = 0
    for key in sorted(state_starts, key=lambda k: state_starts[k]):
        placed[key] = offset
        state_runs.append(Run(start=state_starts[key], placed=offset, count=counts[key[0]]))
        offset += counts[key[0]]
    pieces = tuple(
        Piece(
            tensor=name,
            count=count,
            params=images[0].offsets[name] + start,
            gradient=places[name] + start,
            states=tuple(placed[name, state] for state in state_names),
            image_states=tuple(state_starts[name, state] for state in state_names),
        )
        for name, start, count in parts
    )
    params_runs = [Run(start=p.params, placed=p.params, count=p.count) for p in pieces]
    return Tile(
        pieces=pieces,
        params_runs=tuple(_merged(params_runs)),
        state_runs=tuple(_merged(state_runs)),
        state_count=offset,
    )


def _merged(runs: Sequence[Run]) -> list[Run]:
    """Join runs that lie behind one another on both sides."""
    merged: list[Run] = []
    for run in sorted(runs, key=lambda r: r.start):
        last = merged[-1] if merged else None
        if last and (last.start + last.count, last.placed + last.count) == (run.start, run.placed):
            merged[-1] = Run(start=last.start, placed=last.placed, count=last.count + run.count)
        else:
            merged.append(run)
    return merged
