"""Reading every shard back, and the verbs that must not depend on the size of a store.

Reading: all shards of a commit as arrays, cold (page cache dropped) against one direct sequential
read of the same bytes, warm against one copy of them in memory. Verbs: snapshot, branch and rewind
on a small store and on one that references far more logical bytes. Interleaved, medians, spread.

Usage: python -m tools.bench.store_read --dir DIR [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import shardb
from shardb import branching

SHARDS = 16
SHARD_ELEMENTS = 9 << 20  # 36 MiB of fp32: parameters and both moments of one block
CHUNK_BYTES = 8 << 20
Rows = dict[str, list[float]]


def fill(root: Path, shards: int, elements: int) -> None:
    """Commit `shards` different shards, then the same bytes again as step 2."""
    rng = np.random.default_rng(2)
    data = [rng.standard_normal(elements, dtype=np.float32) for _ in range(shards)]
    with shardb.open(root, create=True, cache_bytes=0) as store:
        for step in (1, 2):
            with store.begin() as transaction:
                for index, array in enumerate(data):
                    transaction.write(f"params/block_{index:03d}", {"w": array})
                transaction.commit(step=step)


def drop_cache(root: Path) -> None:
    """Forget the pages of every object file."""
    for path in (root / "objects").iterdir():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def raw_read(root: Path, buffer: mmap.mmap) -> None:
    """Read every object file with direct I/O into large pages that were touched before."""
    view = memoryview(buffer)
    for path in sorted((root / "objects").iterdir()):
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        offset = 0
        while (count := os.preadv(file, [view[:CHUNK_BYTES]], offset)) > 0:
            offset += count
        os.close(file)


def shardb_read(root: Path, *, verify: bool, touch: bool = True) -> float:
    """Open, read every shard as an array, touch its pages; give the seconds of reading alone."""
    with shardb.open(root, verify=verify) as store, store.at() as view:
        started = time.perf_counter()
        for name in view.names():
            array = view.read(name).array("w")
            if touch:
                np.add.reduce(array[:: 4096 // 4])
        return time.perf_counter() - started


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def reading(root: Path, rounds: int) -> Rows:
    """Cold and warm reads beside their ceilings; ratios are taken within a round."""
    buffer = mmap.mmap(-1, CHUNK_BYTES)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    source = np.ones(SHARDS * SHARD_ELEMENTS, np.float32)
    target = np.zeros_like(source)
    rows: Rows = {}
    for _ in range(rounds):
        for name, verify in (("cold", False), ("cold, digests checked", True)):
            drop_cache(root)
            ceiling = timed(lambda: raw_read(root, buffer))
            drop_cache(root)
            rows.setdefault(name, []).append(ceiling / shardb_read(root, verify=verify))
        shardb_read(root, verify=False)
        copy = timed(lambda: np.copyto(target, source))
        for name, touch in (("warm, of a copy", False), ("warm, every page touched", True)):
            seconds = shardb_read(root, verify=False, touch=touch)
            rows.setdefault(name, []).append(seconds / copy)
    return rows


def verbs(root: Path, rounds: int) -> Rows:
    """Seconds of the constant-time verbs."""
    rows: Rows = {"snapshot": [], "branch": [], "rewind": []}
    with shardb.open(root) as store:
        for index in range(rounds):
            tag = f"{time.time_ns()}-{index}"
            rows["snapshot"].append(timed(partial(store.create_snapshot, f"s-{tag}")))
            make = partial(branching.create_branch, store, f"b-{tag}", "step-2")
            rows["branch"].append(timed(make))
            rows["rewind"].append(timed(partial(branching.rewind, store, f"b-{tag}", "step-1")))
    return rows


def import_seconds(rounds: int) -> Rows:
    """`import shardb` beyond the start of the interpreter."""
    found: list[float] = []
    for _ in range(rounds):
        bare = timed(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True))
        full = timed(lambda: subprocess.run([sys.executable, "-c", "import shardb"], check=True))
        found.append(full - bare)
    return {"import shardb": found}


def show(title: str, rows: Rows, unit: str, scale: float = 1.0) -> None:
    """Print medians and spreads."""
    for name, values in rows.items():
        low, high = min(values) * scale, max(values) * scale
        median = statistics.median(values) * scale
        print(f"{title:28s} {name:24s} {median:8.2f} {unit}  {low:.2f}..{high:.2f}")


def main() -> None:
    """Measure, print a table, and write the rows as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    directory = options.dir / "store-read-bench"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        fill(directory / "large", SHARDS, SHARD_ELEMENTS)
        fill(directory / "small", SHARDS, 1 << 10)
        fill(directory / "many", 64 * SHARDS, 1 << 10)
        reads = reading(directory / "large", options.rounds)
        small = verbs(directory / "small", 4 * options.rounds)
        large = verbs(directory / "large", 4 * options.rounds)
        many = verbs(directory / "many", 4 * options.rounds)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    imports = import_seconds(options.rounds)
    print(f"{platform.machine()}, {os.cpu_count()} cores; 576 MiB in {SHARDS} shards")
    show("read, of the raw read", {k: v for k, v in reads.items() if "cold" in k}, "x")
    show("read", {k: v for k, v in reads.items() if "warm" in k}, "x")
    show("verbs, 64 KiB", small, "ms", 1e3)
    show("verbs, 576 MiB", large, "ms", 1e3)
    show("verbs, 1,024 shards", many, "ms", 1e3)
    show("start", imports, "ms", 1e3)
    if options.json:
        rows = {"read": reads, "small": small, "large": large, "many": many, "import": imports}
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
