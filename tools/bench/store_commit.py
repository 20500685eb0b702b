"""Durable commit of the store against the raw disk and the usual ways of saving, interleaved.

State: 16 shards of 12 MB parameters and 24 MB optimizer state. Every way ends with its last sync;
the ratio of each round is taken against the raw ceiling (one direct sequential overwrite of the
same bytes, one sync) measured right before it. Prints the median and the spread of the ratios.

Usage: python -m tools.bench.store_commit --dir DIR [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import shardb
from tools.bench.store_peers import PEERS, installed_peers, sync_path

SHARDS = 16
PARAMETER_BYTES = 12 << 20
CHUNK_BYTES = 4 << 20
Arrays = dict[str, dict[str, NDArray[np.float32]]]


def make_state() -> Arrays:
    """Parameters and both moments of every shard, page-aligned, in large pages."""
    rng = np.random.default_rng(1)
    state: Arrays = {}
    for index in range(SHARDS):
        state[f"params/block_{index:03d}"] = {"w": aligned(rng)}
        state[f"optim/block_{index:03d}"] = {"exp_avg": aligned(rng), "exp_avg_sq": aligned(rng)}
    return state


def aligned(rng: np.random.Generator) -> NDArray[np.float32]:
    """Random fp32 numbers in an anonymous mapping."""
    memory = mmap.mmap(-1, PARAMETER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.float32)
    rng.standard_normal(out=array, dtype=np.float32)
    return array


class Raw:
    """The ceiling: direct writes over written extents of one file, then one sync."""

    def __init__(self, directory: Path, state: Arrays) -> None:
        self._state = state
        flags = os.O_WRONLY | os.O_CREAT | os.O_DIRECT
        self._file = os.open(directory / "raw", flags)

    def commit(self, step: int) -> float:
        started = time.perf_counter()
        offset = 0
        for tensors in self._state.values():
            for array in tensors.values():
                view = array.data.cast("B")
                for position in range(0, len(view), CHUNK_BYTES):
                    os.pwrite(self._file, view[position : position + CHUNK_BYTES], offset)
                    offset += CHUNK_BYTES
        os.fdatasync(self._file)
        return time.perf_counter() - started


class Shardb:
    """A commit of every shard; the images are filled beforehand, as a trainer fills them."""

    def __init__(self, directory: Path, state: Arrays) -> None:
        self._state = state
        self._store = shardb.open(directory / "store", create=True, cache_bytes=4 << 30)

    def commit(self, step: int) -> float:
        with self._store.begin() as transaction:
            staged = []
            for name, tensors in self._state.items():
                shard = transaction.stage(name, shardb_specs(tensors))
                for tensor, array in tensors.items():
                    np.copyto(shard.array(tensor), array)
                    shard.array(tensor)[0] = step  # every commit differs
                staged.append(shard)
            started = time.perf_counter()
            for shard in staged:
                shard.seal()
            transaction.commit(step=step)
            return time.perf_counter() - started


def shardb_specs(tensors: Mapping[str, NDArray[np.float32]]) -> dict[str, shardb.TensorSpec]:
    """Describe the arrays as the store wants them described."""
    return {n: shardb.TensorSpec(dtype="F32", shape=a.shape) for n, a in tensors.items()}


class Safetensors:
    """One file a shard: save_file beside, sync, rename, sync the directory."""

    def __init__(self, directory: Path, state: Arrays) -> None:
        self._state = state
        self._directory = directory / "safetensors"
        self._directory.mkdir()

    def commit(self, step: int) -> float:
        from safetensors.numpy import save_file

        started = time.perf_counter()
        for name, tensors in self._state.items():
            path = self._directory / f"{name.replace('/', '.')}.safetensors"
            save_file(tensors, f"{path}.new")
            sync_path(f"{path}.new")
            os.replace(f"{path}.new", path)
        sync_path(self._directory)
        return time.perf_counter() - started


class TorchSave:
    """One file a shard: torch.save beside, sync, rename, sync the directory."""

    def __init__(self, directory: Path, state: Arrays) -> None:
        import torch

        self._tensors = {
            name: {n: torch.from_numpy(a) for n, a in tensors.items()}
            for name, tensors in state.items()
        }
        self._directory = directory / "torch"
        self._directory.mkdir()

    def commit(self, step: int) -> float:
        import torch

        started = time.perf_counter()
        for name, tensors in self._tensors.items():
            path = self._directory / f"{name.replace('/', '.')}.pt"
            torch.save(tensors, f"{path}.new")
            sync_path(f"{path}.new")
            os.replace(f"{path}.new", path)
        sync_path(self._directory)
        return time.perf_counter() - started


class Lmdb:
    """One value a tensor, one synced transaction."""

    def __init__(self, directory: Path, state: Arrays) -> None:
        import lmdb

        self._state = state
        self._environment = lmdb.open(str(directory / "lmdb"), map_size=8 << 30)

    def commit(self, step: int) -> float:
        started = time.perf_counter()
        with self._environment.begin(write=True) as transaction:
            for name, tensors in self._state.items():
                for tensor, array in tensors.items():
                    transaction.put(f"{name}/{tensor}".encode(), array.data.cast("B"))
        return time.perf_counter() - started


WAYS: dict[str, type] = {
    "shardb": Shardb,
    "safetensors + fsync": Safetensors,
    "torch.save + fsync": TorchSave,
    "LMDB": Lmdb,
    **installed_peers(),
}


def measure(directory: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Interleave the ways; a raw write precedes each of them in every round."""
    state = make_state()
    raw = Raw(directory, state)
    ways: dict[str, Callable[[int], float]] = {
        name: way(directory, state).commit for name, way in WAYS.items()
    }
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    raw.commit(0)
    for step in range(rounds + 3):
        for name, commit in ways.items():
            ceiling = raw.commit(step)
            cpu = time.process_time()
            seconds = commit(step)
            cpu = time.process_time() - cpu
            if step >= 3:  # the first rounds write new extents and warm the buffers
                rows[name].append({"seconds": seconds, "raw_seconds": ceiling, "cpu": cpu})
    return rows


def main() -> None:
    """Measure, print a table, and write the rows as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    directory = options.dir / "store-commit-bench"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        rows = measure(directory, options.rounds)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    total = SHARDS * 3 * PARAMETER_BYTES
    print(f"{total >> 20} MiB a commit, {platform.machine()}, {os.cpu_count()} cores")
    print(f"{'way':24s} {'of raw':>8s} {'spread':>14s} {'GB/s':>7s} {'CPU s':>7s}")
    for name, row in rows.items():
        ratios = sorted(r["raw_seconds"] / r["seconds"] for r in row)
        seconds = statistics.median(r["seconds"] for r in row)
        cpu = statistics.median(r["cpu"] for r in row)
        spread = f"{ratios[0]:.2f}..{ratios[-1]:.2f}"
        print(
            f"{name:24s} {statistics.median(ratios):8.2f} {spread:>14s} "
            f"{total / seconds / 1e9:7.2f} {cpu:7.2f}"
        )
    if missing := PEERS.keys() - rows.keys():
        print(f"not installed, left out: {', '.join(sorted(missing))}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
