"""Stores whose snapshots are worth packing: weights that drift a little with every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

import shardb
from shardb.store import Store
from shardb.views import Array

SHARDS = ("params/a", "optim/a")
ITEMS = 8_000


def weights_of(shard: str, step: int) -> Mapping[str, Array]:
    """The tensors of a shard at a step; two steps differ in the low bits of every number."""
    source = np.random.default_rng(sum(shard.encode()))
    start = source.normal(0, 0.02, ITEMS)
    drift = np.random.default_rng(step).normal(0, 2e-6, ITEMS)
    return {"weight": (start + drift).astype(np.float32), "norm": np.ones(16, dtype=np.float32)}


def commit_step(store: Store, step: int, *, branch: str = "main") -> shardb.Commit:
    """Commit a step of drifting weights."""
    with store.begin(branch) as transaction:
        for shard in SHARDS:
            transaction.write(shard, weights_of(shard, step))
        if transaction.base is None:
            recipe = {"json": np.zeros(20, dtype=np.uint8)}
            transaction.write("meta/recipe", recipe, trainable=False)
        return transaction.commit(step=step, metrics={"loss": 1 / (step + 1)})


def fill(store: Store, steps: Iterable[int], *, snapshots: Iterable[int] = ()) -> None:
    """Commit steps, those of `snapshots` pinned as step-N."""
    pinned = set(snapshots)
    for step in steps:
        commit_step(store, step)
        if step in pinned:
            store.create_snapshot(f"step-{step}")


def contents(store: Store) -> dict[str, dict[str, bytes]]:
    """Every byte of every snapshot, by its name and shard."""
    found: dict[str, dict[str, bytes]] = {}
    for name in store.snapshots():
        with store.snapshot(name) as view:
            found[name] = {shard: view.read(shard).image.tobytes() for shard in view.names()}
    return found


def stored(root: Path) -> dict[str, set[str]]:
    """The digests in `objects/` by the kind of their file."""
    found: dict[str, set[str]] = {"pack": set(), "safetensors": set()}
    for path in (root / "objects").iterdir():
        found[path.suffix[1:]].add(path.stem)
    return found


def digest_at(store: Store, snapshot: str, shard: str = SHARDS[0]) -> str:
    """The digest of a shard in a snapshot."""
    return store.snapshots()[snapshot].shards[shard].digest
