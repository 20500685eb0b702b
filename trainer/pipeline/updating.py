"""The update of one stage: its tiles through the rule, its next version into staged images.

Owns staging, the order of tiles, and the copies out. Knows nothing of gradients' making. The
arithmetic is the rule's own (`AdamW.apply`), in place on the device's copies: the base in the
store is untouched until the commit, so a step can be dropped or its update be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from shardb import ShardView, TensorSpec
from shardb.views import StagedShard
from trainer.device_lanes import Lane, Lanes, Mark
from trainer.pipeline.feeding import BaseImages, Brought, StagedImage, StateTiles
from trainer.pipeline.residents import Resident, address_of
from trainer.pipeline.sealing import Sealer
from trainer.pipeline.shapes import Piece, StageShape, Tile
from trainer.pipeline.staging import HostImages


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
    """Updates the stages of one step. `apply` is the rule with the step's numbers.

    What a resident stage writes out may come later than what a slot waits for, except where the
    stage is `urgent`: the commit waits for the digest of its objects.
    """

    lanes: Lanes
    base: BaseImages
    images: HostImages
    tiles: StateTiles
    sealer: Sealer
    txn: Stager
    shapes: Mapping[str, StageShape]
    residents: Mapping[str, Resident]
    apply: Callable[[TileTensors], None]
    step: int
    urgent: frozenset[str] = frozenset()
    staged: dict[str, StagedImage] = field(default_factory=dict)

    def update(self, brought: Brought, gradients: Tensor, ready: Mark | None) -> None:
        """Ask for a stage's update behind `ready`; when OUT comes to its end it is staged."""
        name, shape = brought.name, self.shapes[brought.name]
        resident = self.residents.get(name)
        out = Lane.OUT if resident is None or name in self.urgent else Lane.OUT_LATER
        staged = self._stage(f"params/{name}"), self._stage(f"optim/{name}")
        targets = (
            self.images.elements(staged[0], shape.params),
            self.images.elements(staged[1], shape.state),
        )
        self.lanes.wait(Lane.UPDATE, ready)
        for tile in shape.tiles:
            slot = None if resident else self.tiles.next(tile)
            state = resident.state if resident else slot.buffer if slot else None
            assert state is not None
            with self.lanes.on(Lane.UPDATE, f"update {name}"):
                self.apply(_tensors(shape, tile, brought.buffer, gradients, state, resident))
            self.lanes.wait(out, self.lanes.mark(Lane.UPDATE))
            with self.lanes.on(out, f"write {name}"):
                _copy_out(tile, brought.buffer, state, targets, whole=resident is not None)
            if slot is not None:
                self.tiles.give_back(slot)
        if resident is not None:
            resident.holds_staged(self.step, *staged)
        written = self.lanes.mark(out)
        for each, elements in zip(staged, targets, strict=True):
            self.staged[each.name] = StagedImage(
                elements=elements, address=address_of(each), written=written
            )
        self.sealer.seal(out, staged)

    def _stage(self, shard: str) -> StagedShard:
        staged = self.txn.stage(shard, like=self.base.view(shard))
        self.images.lock(staged)
        return staged


def _copy_out(
    tile: Tile, params: Tensor, state: Tensor, targets: tuple[Tensor, Tensor], *, whole: bool
) -> None:
    for run in tile.params_runs:
        targets[0][run.start :][: run.count].copy_(
            params[run.start :][: run.count], non_blocking=True
        )
    for run in tile.state_runs:
        start = run.start if whole else run.placed
        targets[1][run.start :][: run.count].copy_(state[start:][: run.count], non_blocking=True)


def _tensors(
    shape: StageShape,
    tile: Tile,
    params: Tensor,
    gradients: Tensor,
    state: Tensor,
    resident: Resident | None,
) -> TileTensors:
    def cut(buffer: Tensor, start: int, piece: Piece) -> Tensor:
        return buffer[start : start + piece.count]

    places = [p.image_states if resident else p.states for p in tile.pieces]
    return TileTensors(
        params=[cut(params, p.params, p) for p in tile.pieces],
        gradients=[cut(gradients, p.gradient, p) for p in tile.pieces],
        states=[
            [cut(state, starts[index], p) for p, starts in zip(tile.pieces, places, strict=True)]
            for index in range(len(places[0]))
        ],
        decayed=[len(shape.tensors[p.tensor]) > 1 for p in tile.pieces],
    )
