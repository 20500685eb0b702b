"""Small stores with a known history, and ways to damage them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import shardb
from shardb.filesystem import RealFileSystem
from shardb.findings import Finding, Report
from shardb.fsck import check_store
from shardb.records import Commit

SHARDS = ("params/a", "params/b", "optim/a")
TENSOR_ITEMS = 1500


def commit_step(store: shardb.Store, step: int, *, branch: str = "main") -> Commit:
    """Commit a step whose shards depend on the step and on nothing else."""
    with store.begin(branch) as txn:
        for index, name in enumerate(SHARDS):
            values = np.full(TENSOR_ITEMS, step * 10 + index, dtype=np.float32)
            txn.write(name, {"w": values})
        if txn.base is None:
            json = np.frombuffer(b"{}", dtype=np.uint8)
            txn.write("meta/recipe", {"json": json}, trainable=False)
        return txn.commit(step=step, state={"position": step}, metrics={"loss": 1 / (step + 1)})


def fill_store(
    root: Path, steps: Iterable[int], *, snapshots: Iterable[int] = (), segment_bytes: int = 0
) -> None:
    """Make a store with these steps, those of `snapshots` pinned as step-N.

    With `segment_bytes` the log begins a new segment whenever one is as long as that.
    """
    pinned = set(snapshots)
    with shardb.open(root, create=True) as store:
        if segment_bytes:
            store.appender._segment_limit_bytes = segment_bytes
        for step in steps:
            commit_step(store, step)
            if segment_bytes:
                store.appender._segment_limit_bytes = segment_bytes
            if step in pinned:
                store.create_snapshot(f"step-{step}")


def fsck(root: Path, *, budget_seconds: float | None = None) -> Report:
    """Check a store."""
    return check_store(RealFileSystem(), str(root), budget_seconds=budget_seconds)


def kinds(report: Report) -> list[str]:
    """The kinds of what was found, sorted, each once."""
    return sorted({finding.kind for finding in report.findings})


def only(report: Report) -> Finding:
    """The one finding of a report."""
    assert len(report.findings) == 1, report.findings
    return report.findings[0]


def flip_bit(path: Path, offset: int, bit: int = 3) -> None:
    """Flip one bit of a file in place."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def object_of(root: Path, step: int, shard: str) -> Path:
    """The file of a shard of a retained step."""
    with shardb.open(root) as store:
        digest = store.resolve(f"step-{step}").shards[shard].digest
    return root / "objects" / f"{digest}.safetensors"


def copy_store(root: Path, target: Path) -> Path:
    """Copy a store that nobody has open."""
    shutil.copytree(root, target)
    return target


def tree(root: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a directory with its bytes and its time of change; directories too."""
    found: dict[str, tuple[bytes, int]] = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory) / name
            content = path.read_bytes() if path.is_file() else b""
            found[str(path.relative_to(root))] = (content, path.stat().st_mtime_ns)
    return found
