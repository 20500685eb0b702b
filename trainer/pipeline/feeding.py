"""Parameters and optimizer state on their way to the device, ahead of their use.

Owns the order of copies in. `BaseImages` gives the shards that a step begins from; `Parameters`
feeds whole stages, `StateTiles` the state of one tile after the other. Knows nothing of compute.
Invariant: a shard is read before the step stages its next version.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from torch import Tensor

from shardb import ShardView
from trainer.device_lanes import Lane, Lanes, Mark
from trainer.pipeline.peering import Peer
from trainer.pipeline.residents import Resident, address_of
from trainer.pipeline.sealing import HostMark
from trainer.pipeline.shapes import StageShape, Tile
from trainer.pipeline.slots import Ring, Slot
from trainer.pipeline.staging import HostImages
from trainer.residency import ShardReader


class UnknownLayoutError(Exception):
    """A shard lies otherwise than this version would lay it out: the plain step can train it."""


class Unwritten(Enum):
    """What stands for the mark of a copy out that has yet to be asked for."""

    UNWRITTEN = "unwritten"


UNWRITTEN = Unwritten.UNWRITTEN


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedImage:
    """Where a step put the next version of a shard, good once `written` is reached."""

    elements: Tensor
    address: int
    written: Mark | HostMark | Unwritten | None


class BaseImages:
    """The shards of the commit that a step begins from, each read once.

    A step may begin before that commit is made, from what the step before `staged`; once there is
    a transaction, `settle` says whether those were the images of its base.
    """

    def __init__(
        self,
        shapes: Mapping[str, StageShape],
        images: HostImages,
        *,
        staged: Mapping[str, StagedImage] | None = None,
    ) -> None:
        self._shapes = shapes
        self._images = images
        self._staged = dict(staged or {})
        self._views: dict[str, ShardView] = {}

    def settle(self, reader: ShardReader) -> bool:
        """Read every shard; False where one is not what this was begun from.

        Raises:
            UnknownLayoutError: a shard lies otherwise than it would be staged.
        """
        for name, shape in self._shapes.items():
            for shard, image in ((f"params/{name}", shape.params), (f"optim/{name}", shape.state)):
                view = reader.read(shard)
                if not image.fits(view):
                    raise UnknownLayoutError(shard)
                if shard in self._staged and self._staged[shard].address != address_of(view):
                    return False
                self._views[shard] = view
        self._staged.clear()
        return True

    def forget(self) -> None:
        """Let go of the base: its images are free for reuse when nobody holds them."""
        self._views.clear()
        self._staged.clear()

    def written(self, shard: str) -> Mark | None:
        """Give the mark behind which a shard may be read; None for one that is committed."""
        staged = self._staged.get(shard)
        if staged is None:
            return None
        assert staged.written is not UNWRITTEN, f"{shard} is there, and is not to be read again"
        if isinstance(staged.written, HostMark):
            staged.written.arrive()
            return None
        return staged.written

    def address(self, shard: str) -> int:
        """Give where a shard of the base lies."""
        staged = self._staged.get(shard)
        return address_of(self._views[shard]) if staged is None else staged.address

    def view(self, shard: str) -> ShardView:
        """Give a shard of the base, which is settled."""
        return self._views[shard]

    def elements(self, shard: str) -> Tensor:
        """Give a shard's elements in host memory."""
        staged = self._staged.get(shard)
        if staged is not None:
            return staged.elements
        kind, _, name = shard.partition("/")
        shape = self._shapes[name]
        image = shape.params if kind == "params" else shape.state
        return self._images.elements(self._views[shard], image)


@dataclass(frozen=True, kw_only=True, slots=True)
class Brought:
    """A stage's parameters on the device: in a slot, or resident.

    read: behind it a copy out of the slot, which others may read meanwhile, is done.
    """

    name: str
    buffer: Tensor
    slot: Slot | None
    read: Mark | None = None


class Parameters:
    """Feeds the parameters of the stages of `order`, as far ahead as there are slots.

    A stage that comes again soon stays in its slot until then: the last ones of a forward pass are
    the first of the replay. So do the last ones of the replay, the first of the step after:
    `left_over` takes them out, and they are what that step's feed begins with.
    """

    def __init__(
        self,
        lanes: Lanes,
        base: BaseImages,
        ring: Ring,
        residents: Mapping[str, Resident],
        order: Sequence[str],
        peer: Peer | None = None,
        begins_with: Sequence[Brought] = (),
    ) -> None:
        self._lanes = lanes
        self._base = base
        self._ring = ring
        self._residents = residents
        streamed = [name for name in order if name not in residents]
        self._here: dict[str, Brought] = {}
        for brought in begins_with:
            if brought.name in streamed:
                self._here[brought.name] = brought
            elif brought.slot is not None:  # it has become resident since
                ring.give_back(brought.slot, Lane.OUT)
        self._uses = Counter(streamed)
        self._stays = _that_stay(streamed, len(ring))
        self._coming = deque(
            name
            for index, name in enumerate(streamed)
            if not (name in self._stays and name in streamed[:index])
            and not (name in self._here and name not in streamed[:index])
        )
        self._ahead: deque[tuple[str, Slot, Mark | None]] = deque()
        self._peer = peer
        if peer is not None:  # the last stages of a step that was staged were written first
            peer.bring(base, reversed(dict.fromkeys(self._coming)))
        self._fetch()

    def next(self, name: str) -> Brought:
        """Give the next stage of the order; COMPUTE and UPDATE go on when it is there."""
        resident = self._residents.get(name)
        if resident is not None:
            return Brought(name=name, buffer=resident.params, slot=None)
        self._uses[name] -= 1
        if name in self._here:
            return self._here.pop(name)
        arrived, slot, mark = self._ahead.popleft()
        assert arrived == name, (arrived, name)
        self._lanes.wait(Lane.COMPUTE, mark)
        self._lanes.wait(Lane.UPDATE, mark)
        return Brought(name=name, buffer=slot.buffer, slot=slot)

    def give_back(self, brought: Brought, lane: Lane) -> None:
        """Say that what `lane` was asked for so far is the last use of a stage, for now."""
        if brought.slot is None:
            return
        if self._uses[brought.name] and brought.name in self._stays:
            self._here[brought.name] = brought
            return
        self._ring.give_back(brought.slot, lane, brought.read)
        self._fetch()

    def give_back_updated(self, brought: Brought, *, here: bool = True) -> None:
        """Say that OUT is the last to use a stage, unless the next step begins with it.

        here: whether the slot holds what the update made.
        """
        if brought.slot is None:
            return
        if not here:
            self._ring.give_back(brought.slot, Lane.OUT)
            self._fetch()
            return
        # One slot has to be free for what comes behind them.
        if not self._coming and len(self._ahead) + len(self._here) < len(self._ring) - 1:
            self._here[brought.name] = replace(brought, read=self._lanes.mark(Lane.OUT))
        else:
            self.give_back(brought, Lane.OUT)

    def left_over(self) -> list[Brought]:
        """Take out what was kept for the next step."""
        assert not self._coming, "a step that is not over needs its slots"
        assert not self._ahead
        found = [*self._here.values()]
        self._here.clear()
        return found

    def end(self) -> None:
        """Give back what was kept for a next step that does not begin with it."""
        for brought in self.left_over():
            assert brought.slot is not None
            self._ring.give_back(brought.slot, Lane.OUT)

    def _fetch(self) -> None:
        while self._coming and self._ring.has_room:
            name = self._coming.popleft()
            source = self._base.elements(f"params/{name}")
            slot = self._ring.take(Lane.PARAMS_IN)
            if self._peer is not None and name in self._peer:
                self._peer.send(self._base, name, slot.buffer[: source.numel()])
            else:
                self._lanes.wait(Lane.PARAMS_IN, self._base.written(f"params/{name}"))
                with self._lanes.on(Lane.PARAMS_IN, f"parameters {name}"):
                    slot.buffer[: source.numel()].copy_(source, non_blocking=True)
            self._ahead.append((name, slot, self._lanes.mark(Lane.PARAMS_IN)))


def _that_stay(order: Sequence[str], slots: int) -> set[str]:
    """Name the stages that come again so soon that the slots hold all that comes between."""
    found = set()
    for index, name in enumerate(order):
        again = [later for later in range(index + 1, len(order)) if order[later] == name]
        if again and len({*order[index : again[0]]}) <= slots:
            found.add(name)
    return found


class StateTiles:
    """Feeds the state of the stages of `order`, tile by tile, as far ahead as there are slots.

    stay: stages whose state does not come, because it is there or is not wanted there.
    """

    def __init__(
        self,
        lanes: Lanes,
        base: BaseImages,
        ring: Ring,
        stay: Collection[str],
        order: Sequence[tuple[str, StageShape]],
    ) -> None:
        self._lanes = lanes
        self._base = base
        self._ring = ring
        self._coming = deque(
            (name, tile) for name, shape in order if name not in stay for tile in shape.tiles
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
