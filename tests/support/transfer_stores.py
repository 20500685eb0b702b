"""Small stores to copy between, and what must be the same at both ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import shardb
from shardb.records import Commit

SHARDS = ("params/embeddings", "params/block_000", "optim/block_000")
SHARD_BYTES = 300_000  # beyond the threshold of direct I/O, and no whole number of pages


def values(name: str, step: int, seed: int = 0, size: int = SHARD_BYTES) -> np.ndarray:
    """The bytes of one version of a shard."""
    source = np.random.default_rng((sum(name.encode()), step, seed))
    return source.integers(0, 256, size=size, dtype=np.uint8)


def commit(
    store: shardb.Store,
    step: int,
    *,
    branch: str = "main",
    seed: int = 0,
    size: int = SHARD_BYTES,
    shards: tuple[str, ...] = SHARDS,
) -> Commit:
    """Commit a step with every shard new but a frozen one."""
    with store.begin(branch) as transaction:
        if transaction.base is None:
            transaction.write("meta/recipe", {"json": values("recipe", 0)}, trainable=False)
        for name in shards:
            transaction.write(name, {"weight": values(name, step, seed, size)})
        return transaction.commit(
            step=step,
            state={"position": step * 8, "scaler": None},
            metrics={"loss": 10.0 / (step + 1), "tokens_seen": step * 100},
            statistics={"params/embeddings": {"norm": float(step)}},
            recipe_digest="r" * 32,
        )


def contents(store: shardb.Store, ref: str | None = None) -> dict[str, bytes]:
    """Every byte of a commit, by shard."""
    with store.at(ref=ref) as view:
        return {name: view.read(name).image.tobytes() for name in view.names()}


def told_steps(store: shardb.Store) -> list[int]:
    """The steps that a store's log tells, rolled up ones included, in its order."""
    steps: list[int] = []
    for record in store.history():
        if record["kind"] == "commit":
            steps += [entry["step"] for entry in record.get("rolled_up", [])]
            steps.append(record["step"])
    return steps


def tables(store: shardb.Store) -> dict[str, dict[str, Any]]:
    """The tables that must be the same after the index is made anew."""
    names = ("branches", "snapshots", "commits", "pins", "objects")
    return store.index.read(lambda found: {name: dict(found.items(name)) for name in names})


def files_in(root: Path, name: str) -> list[str]:
    """What a directory of a store holds, `free` files left out."""
    return sorted(p.name for p in (root / name).iterdir() if not p.name.startswith("free."))
