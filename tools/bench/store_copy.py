"""Copying a commit from one store to another against `cp -r` of the same files and a sync.

Both arms end with everything durable; the copy also checks every digest. Rounds alternate, caches
are dropped before each where that is allowed, the ratio is taken within a round, and median and
spread are printed. `--publish` measures how long publishing in the background blocks a step.

Usage: python -m tools.bench.store_copy [--source DIR] [--target DIR] [--shards 16] [--shard-mib 24]
       [--rounds 5] [--publish] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import shardb
from shardb.transfer import copy_commit
from shardb.transfer_publisher import Publisher

PUBLISH_EVERY = 10
STEP_SECONDS = 0.1


def make_store(root: Path, shards: int, shard_bytes: int) -> int:
    """Make a store of one commit; return the bytes of its objects."""
    source = np.random.default_rng(0)
    with shardb.open(root, create=True) as store, store.begin() as transaction:
        for number in range(shards):
            image = source.integers(0, 256, size=shard_bytes, dtype=np.uint8)
            transaction.write(f"params/block_{number:03d}", {"weight": image})
        commit = transaction.commit(step=0)
    return sum(entry.bytes for entry in commit.shards.values())


def drop_caches() -> None:
    """Forget clean pages, so that reading is reading; needs to be allowed."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return


def copy_files(source: Path, target: Path) -> float:
    """Seconds of `cp -r` and a sync of the target's file system."""
    target.mkdir()
    drop_caches()
    began = time.perf_counter()
    subprocess.run(["cp", "-r", str(source / "objects"), str(target)], check=True)
    subprocess.run(["sync", "-f", str(target)], check=True)
    return time.perf_counter() - began


def copy_store(source: Path, target: Path) -> tuple[float, float]:
    """Seconds, and seconds of CPU time, of a copy into a new store."""
    with (
        shardb.open(source, cache_bytes=0) as ours,
        shardb.open(target, create=True) as theirs,
    ):
        drop_caches()
        began, cpu_began = time.perf_counter(), time.process_time()
        copy_commit(ours, theirs)
        return time.perf_counter() - began, time.process_time() - cpu_began


def compare(source: Path, place: Path, size_bytes: int, rounds: int) -> dict[str, object]:
    """Alternate the two arms; MB/s of each, and the ratio within a round."""
    cp, copy, cpu = [], [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=place) as folder:
            cp.append(size_bytes / copy_files(source, Path(folder) / "cp") / 1e6)
            seconds, cpu_seconds = copy_store(source, Path(folder) / "store")
            copy.append(size_bytes / seconds / 1e6)
            cpu.append(cpu_seconds / size_bytes * 1e9)
    ratios = [ours / theirs for ours, theirs in zip(copy, cp, strict=True)]
    return {
        "cp_mb_s": spread(cp),
        "copy_mb_s": spread(copy),
        "ratio": spread(ratios),
        "cpu_s_gb": spread(cpu),
    }


def publishing(place: Path, active: Path, shards: int, shard_bytes: int) -> dict[str, object]:
    """Steps on an active store: how long `publish` blocks, and a commit beside a copy takes."""
    images = [np.full(shard_bytes, number, dtype=np.uint8) for number in range(shards)]
    blocked: list[float] = []
    quiet: list[float] = []
    beside: list[float] = []
    with (
        shardb.open(active / "active", create=True) as source,
        shardb.open(place / "durable", create=True) as target,
        Publisher(source, target) as publisher,
    ):
        for step in range(6 * PUBLISH_EVERY):
            was_busy = publisher.busy
            began = time.perf_counter()
            with source.begin() as transaction:
                for number, image in enumerate(images):
                    transaction.write(f"params/block_{number:03d}", {"weight": image + step % 200})
                commit = transaction.commit(step=step, metrics={"loss": 1.0})
            (beside if was_busy else quiet).append(time.perf_counter() - began)
            if step % PUBLISH_EVERY == 0:
                began = time.perf_counter()
                publisher.publish(commit)
                blocked.append(time.perf_counter() - began)
            time.sleep(STEP_SECONDS)
    return {
        "publish_blocks_ms": spread([1e3 * seconds for seconds in blocked]),
        "commit_alone_ms": spread([1e3 * seconds for seconds in quiet]),
        "commit_beside_publishing_ms": spread([1e3 * seconds for seconds in beside]),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    if not values:
        return {}
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--source", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--target", type=Path, default=Path.cwd())
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--shard-mib", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--publish", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shard_bytes = options.shard_mib << 20
    with (
        tempfile.TemporaryDirectory(dir=options.source) as source,
        tempfile.TemporaryDirectory(dir=options.target) as place,
    ):
        if options.publish:
            found = publishing(Path(place), Path(source), options.shards, shard_bytes)
        else:
            root = Path(source) / "source"
            size_bytes = make_store(root, options.shards, shard_bytes)
            found = compare(root, Path(place), size_bytes, options.rounds)
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
