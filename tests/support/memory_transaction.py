"""A transaction over a dictionary: the engine's view of a store, without one.

It gives the store's own view classes over memory, with the same rules that the engine relies on:
views never change, a shard that is staged is not the one that was read, and a commit needs every
shard to be staged. Fast enough that parity tests run many steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardb import TensorSpec, layout
from shardb.views import ShardView, StagedShard


class MemoryStore:
    """Committed shards by name."""

    def __init__(self) -> None:
        self.shards: dict[str, ShardView] = {}

    def begin(self) -> MemoryTransaction:
        return MemoryTransaction(self)

    def read(self, name: str) -> ShardView:
        return self.shards[name]

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
        staged = StagedShard(name, built, _dirty_image(built), _seal_nothing)
        self._staged[name] = staged
        return staged

    def discard(self, name: str) -> None:
        del self._staged[name]

    def commit(self) -> None:
        missing = set(self._store.shards) - set(self._staged)
        assert not missing, f"not staged: {sorted(missing)}"
        assert all(staged.sealed for staged in self._staged.values())
        self._store.shards = {name: _view(staged) for name, staged in self._staged.items()}


def _seal_nothing(staged: StagedShard) -> None:
    assert staged.sealed


def _view(staged: StagedShard) -> ShardView:
    image = staged.image.view()
    image.flags.writeable = False
    return ShardView(staged.name, staged.layout, image, None)


def _dirty_image(built: layout.Layout) -> np.ndarray:
    """Give an image on a 4,096-byte boundary, full of NaN: recycled buffers are dirty too."""
    raw = np.full(built.size_bytes + layout.DATA_ALIGNMENT_BYTES, 0xFF, dtype=np.uint8)
    start = -raw.ctypes.data % layout.DATA_ALIGNMENT_BYTES
    return raw[start : start + built.size_bytes]
