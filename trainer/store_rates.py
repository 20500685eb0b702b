"""How fast a disk takes commits and gives objects back: measured with a small store on it.

Owns the measurement: a store in a folder of its own beside the run's, a few commits of the same
size, one of their objects read when no cache has it, all of it deleted. Knows nothing of training.
A kill in the middle leaves a folder `.train-fit-…`, which may be deleted.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import shardb
from shardb import Store, TensorSpec
from shardb.filesystem import RealFileSystem

SHARDS, SHARD_BYTES = 4, 16 << 20
SMALL_SHARDS, SMALL_BYTES = 16, 4 << 10
COMMITS_MAX = 5
# The store's own need beside a few commits.
ROOM_BYTES = 512 << 20
READ_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRates:
    """Bytes a second into commits, synced as they are on this disk, and out of objects.

    shard_seconds: what a shard of a commit costs whatever its size, its part of the commit's own
    cost included.
    """

    write: float
    read: float
    shard_seconds: float


def store_rates(
    folder: Path, *, seconds: float, threads: int, allow_network: bool = False
) -> StoreRates | None:
    """Measure for about so many seconds in an existing folder; None where it has no room."""
    if RealFileSystem().space(str(folder)).free_bytes < ROOM_BYTES:
        return None
    with (
        tempfile.TemporaryDirectory(prefix=".train-fit-", dir=folder) as place,
        shardb.open(
            Path(place) / "store",
            create=True,
            writer_threads=threads,
            allow_network=allow_network,
        ) as store,
    ):
        shards = max(SHARDS, threads)  # one for each thread at least
        large = _commit_seconds(store, shards, SHARD_BYTES, seconds)
        read = _read_rate(store)
        small = _commit_seconds(store, SMALL_SHARDS, SMALL_BYTES, seconds / 4)
        shard_seconds = small / SMALL_SHARDS
        alone = max(large - shards * shard_seconds, large / 2)
        return StoreRates(
            write=shards * SHARD_BYTES / alone, read=read, shard_seconds=shard_seconds
        )


def _commit_seconds(store: Store, shards: int, size: int, seconds: float) -> float:
    """Commit until the time is up; the best counts, since others may use the disk."""
    specs = {"data": TensorSpec(dtype="F32", shape=(size // 4,))}
    began, best = time.perf_counter(), float("inf")
    for step in range(1, COMMITS_MAX + 1):
        with store.begin(f"of-{size}") as txn:
            staged = [txn.stage(f"shard_{index}", like=specs) for index in range(shards)]
            for index, shard in enumerate(staged):
                shard.image[-size:] = (step + index) % 256
            started = time.perf_counter()
            for shard in staged:
                shard.seal()
            txn.commit(step=step)
        best = min(best, time.perf_counter() - started)
        if time.perf_counter() - began > seconds:
            break
    return best


def _read_rate(store: Store) -> float:
    """Read one object of the last commit, after the system was asked to forget it."""
    path = max((Path(store.root) / "objects").iterdir(), key=lambda each: each.stat().st_mtime)
    file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(READ_BYTES)
        began, count = time.perf_counter(), 0
        while found := os.readv(file, [buffer]):
            count += found
        return count / (time.perf_counter() - began)
    finally:
        os.close(file)
