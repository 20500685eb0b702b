"""A transaction over a dictionary: the engine's view of a store, without one.

It gives the store's own view classes over memory, with the same rules that the engine relies on:
views never change, a shard that is staged is not the one that was read, and a commit needs every
shard to be staged. Fast enough that parity tests run many steps. Images are used again two commits
later, as a store does; with `poison` they are overwritten with NaN first, so that a tensor which
was not written, or a view that was kept too long, cannot go unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from shardb import TensorSpec, layout
from shardb.views import ShardView, StagedShard

Image = NDArray[np.uint8]


class MemoryStore:
    """Committed shards by name."""

    def __init__(self, *, poison: bool = True) -> None:
        self.shards: dict[str, ShardView] = {}
        self.poison = poison
        self._images: dict[str, Image] = {}
        self.retired: dict[str, Image] = {}

    def begin(self) -> MemoryTransaction:
        return MemoryTransaction(self)

    def read(self, name: str) -> ShardView:
        return self.shards[name]

    def publish(self, staged: Mapping[str, StagedShard]) -> None:
        """Make what was staged current; the images before become free."""
        self.retired = self._images
        self._images = {name: shard.image for name, shard in staged.items()}
        self.shards = {name: _view(shard) for name, shard in staged.items()}

    def image(self, name: str, built: layout.Layout) -> Image:
        """Give a free image for the next version of a shard."""
        image = self.retired.pop(name, None)
        if image is None:
            return _new_image(built.size_bytes)
        if self.poison:
            image.fill(0xFF)
        return image

    def arrays(self) -> dict[str, np.ndarray]:
        """Give every tensor of every shard, named `shard:tensor`."""
        return {
            f"{name}:{tensor}": array
            for name, view in self.shards.items()
            for tensor, array in view.arrays().items()
        }


class MemoryTransaction:
    """Stages shards; `commit` publishes all of them or refuses."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._staged: dict[str, StagedShard] = {}

    def read(self, name: str) -> ShardView:
        if name in self._staged:
            return _view(self._staged[name])
        return self._store.shards[name]

    def stage(self, name: str, like: ShardView | Mapping[str, TensorSpec]) -> StagedShard:
        assert name not in self._staged, f"{name} is staged twice"
        specs = like.specs if isinstance(like, ShardView) else like
        built = layout.build(specs)
        staged = StagedShard(name, built, self._store.image(name, built), _seal_nothing)
        self._staged[name] = staged
        return staged

    def discard(self, name: str) -> None:
        del self._staged[name]

    def commit(self) -> None:
        missing = set(self._store.shards) - set(self._staged)
        assert not missing, f"not staged: {sorted(missing)}"
        assert all(staged.sealed for staged in self._staged.values())
        self._store.publish(self._staged)


def _seal_nothing(staged: StagedShard) -> None:
    assert staged.sealed


def _view(staged: StagedShard) -> ShardView:
    image = staged.image.view()
    image.flags.writeable = False
    return ShardView(staged.name, staged.layout, image, None)


def _new_image(size_bytes: int) -> Image:
    """Give an image on a 4,096-byte boundary, full of NaN."""
    raw = np.full(size_bytes + layout.DATA_ALIGNMENT_BYTES, 0xFF, dtype=np.uint8)
    start = -raw.ctypes.data % layout.DATA_ALIGNMENT_BYTES
    return raw[start : start + size_bytes]
