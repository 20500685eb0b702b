"""Make the golden store that later versions must open: `python -m tests.format.make_golden NAME`.

A golden store is made once, when a format version is new, and never again. It holds what a store
of that version can hold: two branches, snapshots, a rewind, an aborted transaction, frozen shards,
every data type, a closed and an open log segment. Its index is left out: it is rebuilt.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import shardb
from shardb import branching
from shardb.layout import ITEM_BITS, TensorSpec
from shardb.views import NUMPY_TYPES

GOLDEN = Path(__file__).resolve().parent / "golden"
KEPT = ("FORMAT", "wal", "objects")


def tensors_of(step: int) -> dict[str, np.ndarray]:
    return {"weight": np.arange(6, dtype=np.float32).reshape(2, 3) + step}


def commit(store: shardb.Store, step: int, branch: str = "main", **fields: Any) -> shardb.Commit:
    with store.begin(branch) as transaction:
        transaction.write("params/a", tensors_of(step))
        if transaction.base is None:
            recipe = {"json": np.frombuffer(b"{}", np.uint8)}
            transaction.write("meta/recipe", recipe, trainable=False)
            every = {f"t_{n}": TensorSpec(dtype=n, shape=(2,)) for n in sorted(ITEM_BITS)}
            staged = transaction.stage("meta/every_type", every, trainable=False)
            for name, spec in every.items():
                staged.array(name)[:] = np.ones(2, NUMPY_TYPES[spec.dtype])
            staged.seal()
        return transaction.commit(step=step, **fields)


def build(root: Path) -> None:
    """Write the history into a store at `root`."""
    with shardb.open(root, create=True) as store:
        commit(store, 1, state={"seed": 7, "nested": {"list": [1, None, True, "ü", b"\0"]}})
        store.create_snapshot("first")
        store.begin().abort()
        commit(store, 2, metrics={"loss": 2.5, "tokens_seen": 1 << 40}, recipe_digest="ab" * 16)
        branching.create_branch(store, "side/warm", "step-2")
        store.appender._segment_limit_bytes = 1
        commit(store, 3, statistics={"params/a": {"norm": 1.5}})
        store.appender._segment_limit_bytes = 1 << 20
        commit(store, 3, branch="side/warm")
        commit(store, 4)
        branching.rewind(store, "main", "step-3")
        commit(store, 40)
        store.create_snapshot("step-40")


def tensors_in(view: shardb.ShardView) -> dict[str, Any]:
    return {
        name: [spec.dtype, list(spec.shape), view.raw(name).tobytes()]
        for name, spec in view.specs.items()
    }


def answers(store: shardb.Store) -> dict[str, Any]:
    """Everything the store says, as JSON."""
    found: dict[str, Any] = {
        "branches": {name: c.id for name, c in store.branches().items()},
        "snapshots": {name: c.id for name, c in store.snapshots().items()},
        "history": [record["kind"] for record in store.history()],
        "commits": {},
    }
    for commit_ in store.commits():
        with store.at(commit=commit_.id) as view:
            found["commits"][commit_.id] = {
                "record": commit_.to_record(),
                "shards": {name: tensors_in(view.read(name)) for name in view.names()},
            }
    return dict(json.loads(json.dumps(found, default=lambda value: bytes(value).hex(), indent=1)))


def main(name: str) -> None:
    target = GOLDEN / name
    assert not target.exists(), f"{target} is there: a golden store is made once"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        build(root)
        with shardb.open(root) as store:
            expected = answers(store)
        for part in KEPT:
            source = root / part
            copy = shutil.copytree if source.is_dir() else shutil.copy
            (target / "store").mkdir(parents=True, exist_ok=True)
            copy(source, target / "store" / part)
    (target / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
