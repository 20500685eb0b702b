"""Workloads for the explorer, written once for the real store and its model.

Owns `Script`: each of its calls does one thing to both and keeps the journal. Tensors are made from
step, shard and seed, so that every version of a shard has bytes of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import numpy as np

import shardb
from shardb.filesystem import FileSystem
from shardb.testing.model import Journal, ModelStore

# Sizes in bytes of the small store's shards: below a page, beyond one, and with two tensors.
SMALL_SHARDS: Mapping[str, tuple[int, ...]] = {
    "params/embeddings": (600,),
    "params/block_000": (4096, 300),
    "optim/block_000": (5000,),
}
FROZEN_SHARD = "meta/recipe"


def tensors_of(name: str, step: int, sizes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The tensors of one version of a shard; uint8, of the given sizes in bytes."""
    seed = sum(name.encode()) * 1_000_003 + step
    source = np.random.default_rng(seed)
    return {
        f"tensor_{index}": source.integers(0, 256, size=size, dtype=np.uint8)
        for index, size in enumerate(sizes)
    }


class Script:
    """A store and its model, used together."""

    def __init__(
        self,
        files: FileSystem,
        path: str,
        journal: Journal,
        *,
        shards: Mapping[str, tuple[int, ...]] = SMALL_SHARDS,
        writer_threads: int = 1,
        create: bool = True,
    ) -> None:
        self._files = files
        self._path = path
        self._journal = journal
        self._shards = shards
        self._writer_threads = writer_threads
        self.store = self._open(create=create)

    def _open(self, *, create: bool) -> shardb.Store:
        if create:
            self._journal.attempt(ModelStore())
        store = shardb.open(
            self._path, create=create, files=self._files, writer_threads=self._writer_threads
        )
        if create:
            self._journal.acknowledge()
        return store

    @property
    def model(self) -> ModelStore:
        """What the store must be now."""
        settled = self._journal.settled
        assert settled is not None
        return settled

    def reopen(self) -> None:
        """Close the store and open it again; nothing changes."""
        self.store.close()
        self.store = self._open(create=False)

    def commit(self, step: int, *, branch: str = "main", version: int | None = None) -> None:
        """Write every shard anew, as of `version` (by default the step), and commit.

        Two commits of one version hold equal bytes: their objects are shared.
        """
        of = step if version is None else version
        shards = {name: tensors_of(name, of, sizes) for name, sizes in self._shards.items()}
        with self.store.begin(branch) as transaction:
            if transaction.base is None:
                shards[FROZEN_SHARD] = tensors_of(FROZEN_SHARD, 0, (40,))
            for name, tensors in shards.items():
                transaction.write(name, tensors, trainable=name != FROZEN_SHARD)
            contents = {
                name: {tensor: array.tobytes() for tensor, array in tensors.items()}
                for name, tensors in shards.items()
            }
            state = {"position": step * 8}
            self._journal.attempt(
                self.model.with_commit(step=step, shards=contents, state=state, branch=branch)
            )
            transaction.commit(step=step, state=state, metrics={"loss": 1.0 / (step + 1)})
        self._journal.acknowledge()

    def abort(self, step: int, *, branch: str = "main") -> None:
        """Stage every shard of a step and give it up."""
        with self.store.begin(branch) as transaction:
            for name, sizes in self._shards.items():
                transaction.write(name, tensors_of(name, step, sizes))

    def snapshot(self, name: str, *, branch: str = "main") -> None:
        """Pin the head of a branch."""
        head = self.model.head(branch)
        assert head is not None
        self._journal.attempt(self.model.with_snapshot(name, head))
        self.store.create_snapshot(name, ref=branch)
        self._journal.acknowledge()

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Script:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
