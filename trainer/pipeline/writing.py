"""What a step copies out into staged images, and in which order.

Owns that order. What waits for a slot goes out first, tile by tile. What resident stages write may
wait, because nothing waits for their memory: it fills the time in which nothing else goes out, from
the end of one replay to the first update of the next. There images take turns, in pieces, since a
digest takes one byte after the other, and slower than a copy: many at once keep up with it.
Knows nothing of updates. Invariant: each image is filled once, from its start on where it can be,
and sealed behind its last byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from torch import Tensor

from shardb.views import StagedShard
from trainer.device_lanes import Lane, Lanes, Mark
from trainer.pipeline.feeding import UNWRITTEN, StagedImage, Unwritten
from trainer.pipeline.footprint import resident_bytes
from trainer.pipeline.residents import Resident, address_of
from trainer.pipeline.sealing import Sealer
from trainer.pipeline.shapes import ImageShape, StageShape, Tile

# So much of what a step writes goes out beside the next one's forward pass and head, and at no
# moment is a larger share of what it wrote held: where a stage that stays needs no slots written,
# the link has time for what was held before.
HELD_SHARE = 0.2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Target:
    """A staged image, its elements in host memory, and how they are laid out."""

    staged: StagedShard
    elements: Tensor
    shape: ImageShape

    def bytes_to(self, count: int) -> int:
        """Give where so many elements end in the image."""
        return self.shape.start_bytes + self.shape.item_bytes * count


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Elements of a resident image that have yet to go out, behind `ready`."""

    name: str
    target: Target
    source: Tensor
    start: int
    count: int
    ready: Mark | None

    @property
    def bytes(self) -> int:
        return self.target.shape.item_bytes * self.count

    @property
    def is_last(self) -> bool:
        return self.start + self.count == self.target.shape.count

    @property
    def share(self) -> float:
        """Give which part of its image is written with this one and all before it."""
        return (self.start + self.count) / self.target.shape.count


@dataclass(kw_only=True)
class Writes:
    """The copies out of one step; `staged` tells where each shard goes that was asked for.

    later: resident stages that may wait; held_bytes_max: how much of them may, until `flush`, and
    never more than HELD_SHARE of all that was updated so far.
    """

    lanes: Lanes
    sealer: Sealer
    later: frozenset[str]
    held_bytes_max: int
    part_elements: int
    staged: dict[str, StagedImage] = field(default_factory=dict)
    _held: list[tuple[float, int, _Part]] = field(default_factory=list)
    _held_before: int = 0
    _held_bytes: int = 0
    _passed_bytes: int = 0

    def tile(
        self, name: str, tile: Tile, params: Tensor, state: Tensor, targets: Sequence[Target]
    ) -> None:
        """Write a tile, which UPDATE has been asked for, from a slot."""
        self.lanes.wait(Lane.OUT, self.lanes.mark(Lane.UPDATE))
        to_params, to_state = (target.elements for target in targets)
        with self.lanes.on(Lane.OUT, f"write {name}"):
            for run in tile.params_runs:
                _copy(to_params, run.start, params, run.start, run.count)
            for run in tile.state_runs:
                _copy(to_state, run.start, state, run.placed, run.count)
        for target, runs in zip(targets, (tile.params_runs, tile.state_runs), strict=True):
            self._passed_bytes += target.shape.item_bytes * sum(run.count for run in runs)
        filled = tile.params_filled, tile.state_filled
        if filled == tuple(target.shape.count for target in targets):
            self._written(targets, self.lanes.mark(Lane.OUT))
            self.sealer.seal(Lane.OUT, [target.staged for target in targets])
            return
        sizes = [(t.staged, t.bytes_to(n)) for t, n in zip(targets, filled, strict=True)]
        self.sealer.fill(Lane.OUT, sizes)

    def whole(self, name: str, resident: Resident, targets: Sequence[Target]) -> None:
        """Write a resident stage, whose update UPDATE has been asked for."""
        self._passed_bytes += sum(target.shape.bytes for target in targets)
        ready = self.lanes.mark(Lane.UPDATE)
        parts = [
            _Part(
                name=name,
                target=target,
                source=source,
                start=start,
                count=min(self.part_elements, target.shape.count - start),
                ready=ready,
            )
            for target, source in zip(targets, (resident.params, resident.state), strict=True)
            for start in range(0, target.shape.count, self.part_elements)
        ]
        if name not in self.later:
            for part in parts:
                self._write(part, Lane.OUT)
            return
        self._written(targets, UNWRITTEN)
        for part in parts:
            self._hold(part)
        held_bytes_max = min(self.held_bytes_max, int(HELD_SHARE * self._passed_bytes))
        while self._held_bytes > held_bytes_max:
            self._write(self._next_held(), Lane.OUT)

    def flush(self) -> None:
        """Write what was held, image by image in turn, behind everything else.

        That may be asked for behind the next step's forward pass, which has no need of it.
        """
        if not self._held:
            return
        # What went out already of these images was asked for in the other lane.
        self.lanes.wait(Lane.OUT_LATER, self.lanes.mark(Lane.OUT))
        while self._held:
            self._write(self._next_held(), Lane.OUT_LATER)

    def _hold(self, part: _Part) -> None:
        heappush(self._held, (part.share, self._held_before, part))
        self._held_before += 1
        self._held_bytes += part.bytes

    def _next_held(self) -> _Part:
        """Take a part of the image that is behind the others: all come to their ends together."""
        _, _, part = heappop(self._held)
        self._held_bytes -= part.bytes
        return part

    def _write(self, part: _Part, lane: Lane) -> None:
        self.lanes.wait(lane, part.ready)
        target, end = part.target, part.start + part.count
        with self.lanes.on(lane, f"write {part.name}"):
            _copy(target.elements, part.start, part.source, part.start, part.count)
        if part.is_last:
            self._written([target], self.lanes.mark(lane))
            self.sealer.seal(lane, [target.staged])
        else:
            self.sealer.fill(lane, [(target.staged, target.bytes_to(end))])

    def _written(self, targets: Sequence[Target], mark: Mark | Unwritten | None) -> None:
        for target in targets:
            self.staged[target.staged.name] = StagedImage(
                elements=target.elements, address=address_of(target.staged), written=mark
            )


def new_writes(
    lanes: Lanes,
    sealer: Sealer,
    order: Sequence[tuple[str, StageShape]],
    residents: Mapping[str, Resident],
    part_elements: int,
    *,
    activations_on_host: bool,
) -> Writes:
    """Begin the copies out of a step that updates stages in this order.

    Where activations go out during the next forward pass, nothing is held back until then: one
    queue takes all copies out, and the memory of what waits in it is nobody's yet.
    """
    total = sum(resident_bytes(shape) for _, shape in order)
    held_bytes_max = 0 if activations_on_host else int(HELD_SHARE * total)
    later, is_streamed_behind, behind = set(), False, 0
    for name, shape in reversed(order):
        behind += resident_bytes(shape)
        if name not in residents:
            is_streamed_behind = True
        elif is_streamed_behind or behind <= held_bytes_max:
            later.add(name)
    return Writes(
        lanes=lanes,
        sealer=sealer,
        later=frozenset(later),
        held_bytes_max=held_bytes_max,
        part_elements=part_elements,
    )


def _copy(target: Tensor, at: int, source: Tensor, start: int, count: int) -> None:
    target[at:][:count].copy_(source[start:][:count], non_blocking=True)
