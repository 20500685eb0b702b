"""Parameters and optimizer state on their way to the device, ahead of their use.

Owns the order of copies in. `BaseImages` gives the shards that a step begins from; `Parameters`
feeds whole stages, `StateTiles` the state of one tile after the other. Knows nothing of compute.
Invariant: a shard is read before the step stages its next version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shardb import ShardView
from trainer.device_lanes import Lane, Lanes, Mark
from trainer.pipeline.residents import Resident
from trainer.pipeline.shapes import StageShape, Tile
from trainer.pipeline.slots import Ring, Slot
from trainer.pipeline.staging import HostImages
from trainer.residency import ShardReader


class UnknownLayoutError(Exception):
    """A shard lies otherwise than this version would lay it out: the plain step can train it."""


class BaseImages:
    """The shards of the commit that a step begins from, each read once."""

    def __init__(
        self, reader: ShardReader, shapes: dict[str, StageShape], images: HostImages
    ) -> None:
        self._reader = reader
        self._shapes = shapes
        self._images = images
        self._views: dict[str, ShardView] = {}

    def view(self, shard: str) -> ShardView:
        """Give a shard of the base."""
        view = self._views.get(shard)
        if view is None:
            view = self._views[shard] = self._reader.read(shard)
            kind, _, name = shard.partition("/")
            shape = self._shapes[name]
            if not (shape.params if kind == "params" else shape.state).fits(view):
                raise UnknownLayoutError(shard)
        return view

    def elements(self, shard: str) -> Tensor:
        """Give a shard's elements in host memory."""
        kind, _, name = shard.partition("/")
        shape = self._shapes[name]
        return self._images.elements(
            self.view(shard), shape.params if kind == "params" else shape.state
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Brought:
    """A stage's parameters on the device: in a slot, or resident."""

    name: str
    buffer: Tensor
    slot: Slot | None


class Parameters:
    """Feeds the parameters of the stages of `order`, as far ahead as there are slots."""

    def __init__(
        self,
        lanes: Lanes,
        base: BaseImages,
        ring: Ring,
        residents: dict[str, Resident],
        order: Sequence[str],
    ) -> None:
        self._lanes = lanes
        self._base = base
        self._ring = ring
        self._residents = residents
        self._coming = deque(name for name in order if name not in residents)
        self._ahead: deque[tuple[str, Slot, Mark | None]] = deque()
        self._fetch()

    def next(self, name: str) -> Brought:
        """Give the next stage of the order; COMPUTE and UPDATE go on when it is there."""
        resident = self._residents.get(name)
        if resident is not None:
            return Brought(name=name, buffer=resident.params, slot=None)
        arrived, slot, mark = self._ahead.popleft()
        assert arrived == name, (arrived, name)
        self._lanes.wait(Lane.COMPUTE, mark)
        self._lanes.wait(Lane.UPDATE, mark)
        return Brought(name=name, buffer=slot.buffer, slot=slot)

    def give_back(self, brought: Brought, lane: Lane) -> None:
        """Say that what `lane` was asked for so far is the last use of a stage."""
        if brought.slot is not None:
            self._ring.give_back(brought.slot, lane)
            self._fetch()

    def _fetch(self) -> None:
        while self._coming and self._ring.has_room:
            name = self._coming.popleft()
            source = self._base.elements(f"params/{name}")
            slot = self._ring.take(Lane.PARAMS_IN)
            with self._lanes.on(Lane.PARAMS_IN, f"parameters {name}"):
                slot.buffer[: source.numel()].copy_(source, non_blocking=True)
            self._ahead.append((name, slot, self._lanes.mark(Lane.PARAMS_IN)))


class StateTiles:
    """Feeds the state of the stages of `order`, tile by tile, as far ahead as there are slots."""

    def __init__(
        self,
        lanes: Lanes,
        base: BaseImages,
        ring: Ring,
        residents: dict[str, Resident],
        order: Sequence[tuple[str, StageShape]],
    ) -> None:
        self._lanes = lanes
        self._base = base
        self._ring = ring
        self._coming = deque(
            (name, tile) for name, shape in order if name not in residents for tile in shape.tiles
        )
        self._ahead: deque[tuple[Tile, Slot, Mark | None]] = deque()

    def next(self, tile: Tile) -> Slot:
        """Give the next tile of the order; UPDATE goes on when it is there."""
        self.fetch()
        arrived, slot, mark = self._ahead.popleft()
        assert arrived is tile
        self._lanes.wait(Lane.UPDATE, mark)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Say that what OUT was asked for so far is the last use of a tile."""
        self._ring.give_back(slot, Lane.OUT)
        self.fetch()

    def fetch(self) -> None:
        """Ask for as many tiles as there is room for."""
        while self._coming and self._ring.has_room:
            name, tile = self._coming.popleft()
            source = self._base.elements(f"optim/{name}")
            slot = self._ring.take(Lane.STATE_IN)
            with self._lanes.on(Lane.STATE_IN, f"state {name}"):
                for run in tile.state_runs:
                    slot.buffer[run.placed :][: run.count].copy_(
                        source[run.start :][: run.count], non_blocking=True
                    )
            self._ahead.append((tile, slot, self._lanes.mark(Lane.STATE_IN)))
