"""The update of one stage: its tiles through the rule, its next version into staged images.

Owns staging and the order of tiles. Knows nothing of gradients' making. The arithmetic is the
rule's own (`AdamW.apply`), in place on the device's copies: the base in the store is untouched
until the commit, so a step can be dropped or its update be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardb import ShardView, TensorSpec
from shardb.views import StagedShard
from trainer.device_lanes import Lane, Lanes, Mark
from trainer.pipeline.feeding import BaseImages, Brought, StagedImage, StateTiles
from trainer.pipeline.host_side import HostSide
from trainer.pipeline.residents import Resident, address_of
from trainer.pipeline.shapes import ImageShape, Piece, StageShape, Tile
from trainer.pipeline.staging import HostImages
from trainer.pipeline.writing import Target, Writes


class Stager(Protocol):
    """The part of a transaction that an update uses."""

    def stage(self, name: str, like: ShardView | Mapping[str, TensorSpec]) -> StagedShard:
        """Give the writable image of a shard of the next commit."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TileTensors:
    """A tile as the rule takes it: for each piece its parameter, gradient and state tensors."""

    params: list[Tensor]
    gradients: list[Tensor]
    states: list[list[Tensor]]
    decayed: list[bool]


@dataclass(kw_only=True)
class Updates:
    """Updates the stages of one step.

    `apply` is the rule with the step's numbers; the step itself is given where it is not on the
    device.
    """

    lanes: Lanes
    base: BaseImages
    images: HostImages
    tiles: StateTiles
    writes: Writes
    txn: Stager
    shapes: Mapping[str, StageShape]
    residents: Mapping[str, Resident]
    host_side: HostSide
    apply: Callable[[TileTensors, Tensor | None], None]
    step: int

    def update(self, brought: Brought, gradients: Tensor, ready: Mark | None) -> None:
        """Ask for a stage's update behind `ready`, and for its copy out, or hold that back."""
        name, shape = brought.name, self.shapes[brought.name]
        resident = self.residents.get(name)
        targets = (
            self._stage(f"params/{name}", shape.params),
            self._stage(f"optim/{name}", shape.state),
        )
        if name in self.host_side:
            self._give_to_host(name, gradients, ready, targets)
            return
        self.lanes.wait(Lane.UPDATE, ready)
        for tile in shape.tiles:
            if resident is not None:
                self._apply(tile, brought, gradients, resident.state, resident)
                continue
            slot = self.tiles.next(tile)
            self._apply(tile, brought, gradients, slot.buffer, None)
            self.writes.tile(name, tile, brought.buffer, slot.buffer, targets)
            self.tiles.give_back(slot)
        if resident is not None:
            self.writes.whole(name, resident, targets)
            resident.holds_staged(self.step, *(target.staged for target in targets))

    def _give_to_host(
        self, name: str, gradients: Tensor, ready: Mark | None, targets: tuple[Target, Target]
    ) -> None:
        """Let the processor update a stage in its staged images."""
        shape, here = self.shapes[name], self.host_side.gradients(name)
        params, state = (target.elements for target in targets)
        step = torch.tensor(float(self.step), device=params.device)

        def update() -> None:
            for tile in shape.tiles:
                self.apply(_tensors(shape, tile, params, here, state, whole=True), step)

        ready = ready or self.lanes.mark(Lane.UPDATE)
        base = self.base.elements(f"params/{name}"), self.base.elements(f"optim/{name}")
        done = self.host_side.update(name, gradients, ready, base, targets, update)
        for target in targets:
            self.writes.staged[target.staged.name] = StagedImage(
                elements=target.elements, address=address_of(target.staged), written=done
            )

    def _apply(
        self,
        tile: Tile,
        brought: Brought,
        gradients: Tensor,
        state: Tensor,
        resident: Resident | None,
    ) -> None:
        shape = self.shapes[brought.name]
        with self.lanes.on(Lane.UPDATE, f"update {brought.name}"):
            whole = resident is not None
            self.apply(_tensors(shape, tile, brought.buffer, gradients, state, whole=whole), None)

    def _stage(self, shard: str, shape: ImageShape) -> Target:
        staged = self.txn.stage(shard, like=self.base.view(shard))
        self.images.lock(staged)
        return Target(staged=staged, elements=self.images.elements(staged, shape), shape=shape)


def _tensors(
    shape: StageShape,
    tile: Tile,
    params: Tensor,
    gradients: Tensor,
    state: Tensor,
    *,
    whole: bool,
) -> TileTensors:
    """Cut a tile's tensors; whole: the buffer of the state holds all of the image."""

    def cut(buffer: Tensor, start: int, piece: Piece) -> Tensor:
        return buffer[start : start + piece.count]

    places = [p.image_states if whole else p.states for p in tile.pieces]
    return TileTensors(
        params=[cut(params, p.params, p) for p in tile.pieces],
        gradients=[cut(gradients, p.gradient, p) for p in tile.pieces],
        states=[
            [cut(state, starts[index], p) for p, starts in zip(tile.pieces, places, strict=True)]
            for index in range(len(places[0]))
        ],
        decayed=[len(shape.tensors[p.tensor]) > 1 for p in tile.pieces],
    )
