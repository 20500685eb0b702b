"""Small stores for tests: one number fills a shard, so that what was read says which step it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

import shardb
from shardb.filesystem import RealFileSystem

SHARDS = ("params/a", "params/b")
WEIGHTS = (8, 8)


def filled(value: float) -> dict[str, np.ndarray]:
    """Tensors of one shard, all of one value: 256 bytes of float32 and a step counter."""
    return {
        "weight": np.full(WEIGHTS, value, dtype=np.float32),
        "count": np.array([int(value)], dtype=np.int64),
    }


def commit_step(
    store: shardb.Store,
    step: int,
    *,
    branch: str = "main",
    fill: float | None = None,
    shards: tuple[str, ...] = SHARDS,
    **fields: Any,
) -> shardb.Commit:
    """Commit a step whose shards are filled with `fill`, by default the step's number."""
    with store.begin(branch) as transaction:
        for number, name in enumerate(shards):
            transaction.write(name, filled((step if fill is None else fill) + number / 4))
        return transaction.commit(step=step, **fields)


def value_of(view: shardb.ShardView) -> float:
    """The one value that fills a shard; fails when it is a mixture."""
    array = view.array("weight")
    assert np.all(array == array.flat[0]), f"{view.name} mixes {np.unique(array)}"
    return float(array.flat[0])


def values_of(view: shardb.ReadView | shardb.Transaction) -> dict[str, float]:
    """Shard name to the value that fills it."""
    return {name: value_of(view.read(name)) for name in view.names()}


def answers(store: shardb.Store) -> dict[str, Any]:
    """Everything a store says, to compare two openings of it."""
    found: dict[str, Any] = {
        "branches": {name: commit.id for name, commit in store.branches().items()},
        "snapshots": {name: commit.id for name, commit in store.snapshots().items()},
        "commits": {commit.id: commit.to_record() for commit in store.commits()},
    }
    for commit in store.commits():
        with store.at(commit=commit.id) as view:
            found[commit.id] = values_of(view)
    return found


def answers_at(path: Path) -> dict[str, Any]:
    """What a store says when it is opened anew."""
    with shardb.open(path) as store:
        return answers(store)


def copied(source: Path, target: Path) -> Path:
    """A copy of a closed store."""
    return Path(shutil.copytree(source, target))


def last_segment(root: Path) -> Path:
    return max(root.glob("wal/*.wal"))


def flip_bit(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


class InterposedFiles(RealFileSystem):
    """Real files with one operation replaced: `before` runs ahead of every call of `operation`.

    It may raise, or do behind the store's back what another process would do at that moment; it
    may be exchanged while the store is open.
    """

    def __init__(
        self, operation: str, before: Callable[..., None], *, medium: str = "disk"
    ) -> None:
        self.before = before
        self.medium = medium
        original = getattr(self, operation)

        def interposed(*arguments: Any, **named: Any) -> Any:
            self.before(*arguments, **named)
            return original(*arguments, **named)

        setattr(self, operation, interposed)

    def kind(self, path: str) -> str:
        return self.medium


class Medium(RealFileSystem):
    """Real files that say which medium they are on: "disk" or "memory:tmpfs"."""

    def __init__(self, name: str) -> None:
        self.name = name

    def kind(self, path: str) -> str:
        return self.name


MEDIA = ("disk", "memory:tmpfs")


@contextmanager
def poisoned(store: shardb.Store) -> Iterator[None]:
    """Close a store at the end of a block, whatever its storage says."""
    try:
        yield
    finally:
        with suppress(shardb.ShardbError, OSError):
            store.close()


def plain(commit: shardb.Commit) -> Mapping[str, Any]:
    """A commit as plain values."""
    return commit.to_record()
