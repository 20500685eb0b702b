"""Workloads for the explorer, written once for the real store and its model.

Owns `Script`: each of its calls does one thing to both and keeps the journal. Tensors are made from
step, shard and seed, so that every version of a shard has bytes of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

import numpy as np

import shardb
from shardb import branching
from shardb.filesystem import FileSystem
from shardb.testing.explorer import Workload
from shardb.testing.model import Journal, ModelStore
from shardb.testing.recording import RecordingFileSystem

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


def commits(files: RecordingFileSystem, path: str, journal: Journal) -> None:
    """A run: commits, a snapshot, retirement and reuse of objects, a resume."""
    with Script(files, path, journal) as script:
        script.commit(0)
        script.commit(1)
        script.snapshot("step-1")
        script.commit(2)
        script.reopen()
        script.commit(3)


def history(files: RecordingFileSystem, path: str, journal: Journal) -> None:
    """Branches, a rewind and a run that goes on from it, deletions."""
    with Script(files, path, journal) as script:
        script.commit(0)
        script.commit(1)
        script.branch("side")
        script.commit(2)
        script.rewind(1)
        script.commit(2, version=7)
        script.commit(2, branch="side", version=2)
        script.delete_branch("side")
        script.snapshot("best")
        script.commit(3)
        script.delete_snapshot("best")


def equal_bytes(files: RecordingFileSystem, path: str, journal: Journal) -> None:
    """Commits that share objects, an abort, and steps replayed after a rewind."""
    with Script(files, path, journal) as script:
        script.commit(0)
        script.commit(1, version=0)
        script.abort(2)
        script.commit(2)
        script.reopen()
        script.commit(3, version=1)
        script.rewind(2)
        script.commit(3, version=1)
        script.commit(4, version=2)


def rotation(files: RecordingFileSystem, path: str, journal: Journal) -> None:
    """The log goes on in a new segment, with a checkpoint, between commits."""
    with Script(files, path, journal, segment_limit_bytes=1200) as script:
        script.commit(0)
        script.commit(1)
        script.snapshot("step-1")
        script.commit(2)
        script.commit(3)
        script.reopen()
        script.commit(4)


def threads(files: RecordingFileSystem, path: str, journal: Journal) -> None:
    """Several background writers, in whatever order they come."""
    with Script(files, path, journal, writer_threads=3) as script:
        script.commit(0)
        script.commit(1)
        script.rewind(0)
        script.rewind(1)
        script.commit(2)


WORKLOADS: Mapping[str, Workload] = {
    "commits": commits,
    "equal-bytes": equal_bytes,
    "history": history,
    "rotation": rotation,
    "threads": threads,
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
        segment_limit_bytes: int | None = None,
        create: bool = True,
    ) -> None:
        self._files = files
        self._path = path
        self._journal = journal
        self._shards = shards
        self._writer_threads = writer_threads
        self._segment_limit_bytes = segment_limit_bytes
        self.store = self._open(create=create)

    def _open(self, *, create: bool) -> shardb.Store:
        if create:
            self._journal.attempt(ModelStore())
        store = shardb.open(
            self._path, create=create, files=self._files, writer_threads=self._writer_threads
        )
        if self._segment_limit_bytes is not None:
            # Log segments hold megabytes; a workload that begins one by itself would take minutes.
            store.appender._segment_limit_bytes = self._segment_limit_bytes
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
        self._journal.attempt(self.model.with_snapshot(name, self.model.heads[branch]))
        self.store.create_snapshot(name, ref=branch)
        self._journal.acknowledge()

    def delete_snapshot(self, name: str) -> None:
        """Remove a snapshot's name."""
        self._journal.attempt(self.model.without_snapshot(name))
        branching.delete_snapshot(self.store, name)
        self._journal.acknowledge()

    def branch(self, name: str, *, source: str = "main") -> None:
        """Make a branch at the head of another one."""
        self._journal.attempt(self.model.with_branch(name, self.model.heads[source]))
        branching.create_branch(self.store, name, source)
        self._journal.acknowledge()

    def delete_branch(self, name: str) -> None:
        """Remove a branch."""
        self._journal.attempt(self.model.without_branch(name))
        branching.delete_branch(self.store, name)
        self._journal.acknowledge()

    def rewind(self, step: int, *, branch: str = "main") -> None:
        """Move a branch to the retained commit of a step."""
        found = [commit for commit in self.model.commits if commit.step == step]
        self._journal.attempt(self.model.with_branch(branch, found[-1]))
        branching.rewind(self.store, branch, f"step-{step}")
        self._journal.acknowledge()

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
