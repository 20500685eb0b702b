"""Other libraries that save a training state, each ending with its last sync.

Used by `store_commit`; a peer that is not installed is left out and named. Every one replaces the
previous state: its removal is part of the measured time, as it is for a store that keeps two.
"""

from __future__ import annotations

import datetime as dt
import importlib.util
import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, Mapping[str, NDArray[np.float32]]]


def sync_path(path: str | Path) -> None:
    """Sync a file or a directory that somebody else wrote."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def sync_tree(path: Path) -> None:
    """Sync every file and directory below a path."""
    for parent, _, names in os.walk(path):
        for name in names:
            sync_path(f"{parent}/{name}")
        sync_path(parent)


class DistributedCheckpoint:
    """`torch.distributed.checkpoint`, one file, synced by its own writer."""

    def __init__(self, directory: Path, state: Arrays) -> None:
        import torch

        logging.getLogger("torch").setLevel(logging.ERROR)
        self._state = {
            shard: {name: torch.from_numpy(array) for name, array in tensors.items()}
            for shard, tensors in state.items()
        }
        self._directory = directory / "dcp"
        self._directory.mkdir()

    def commit(self, step: int) -> float:
        """Save one step and remove the one before."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        started = time.perf_counter()
        target = self._directory / str(step)
        writer = FileSystemWriter(target, single_file_per_rank=True, sync_files=True)
        save(self._state, storage_writer=writer, no_dist=True)
        sync_path(target)
        sync_path(self._directory)
        shutil.rmtree(self._directory / str(step - 1), ignore_errors=True)
        return time.perf_counter() - started


class Ocdbt:
    """TensorStore's OCDBT with zarr3 arrays, one atomic transaction."""

    def __init__(self, directory: Path, state: Arrays) -> None:
        self._state = state
        self._directory = (directory / "ocdbt").resolve()
        self._directory.mkdir()

    def commit(self, step: int) -> float:
        """Save one step and remove the one before."""
        import tensorstore

        started = time.perf_counter()
        target = self._directory / str(step)
        transaction = tensorstore.Transaction(atomic=True)
        context = tensorstore.Context()
        writes = []
        for shard, tensors in self._state.items():
            for name, array in tensors.items():
                spec = self._spec(target, f"{shard}/{name}/", array)
                opened = tensorstore.open(
                    spec, create=True, context=context, transaction=transaction
                )
                writes.append((opened, array))
        for future in [opened.result().write(array) for opened, array in writes]:
            future.copy.result()
        transaction.commit_async().result()
        sync_path(self._directory)
        shutil.rmtree(self._directory / str(step - 1), ignore_errors=True)
        return time.perf_counter() - started

    @staticmethod
    def _spec(target: Path, path: str, array: NDArray[np.float32]) -> dict[str, Any]:
        grid = {"name": "regular", "configuration": {"chunk_shape": [len(array)]}}
        codec = {"name": "bytes", "configuration": {"endian": "little"}}
        return {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": f"file://{target}", "path": path},
            "metadata": {
                "shape": [len(array)],
                "data_type": "float32",
                "chunk_grid": grid,
                "codecs": [codec],
            },
        }


class Orbax:
    """Orbax's PyTreeCheckpointer as it comes."""

    def __init__(self, directory: Path, state: Arrays) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import orbax.checkpoint as orbax

        logging.getLogger("absl").setLevel(logging.ERROR)
        self._state = {shard: dict(tensors) for shard, tensors in state.items()}
        self._directory = (directory / "orbax").resolve()
        self._directory.mkdir()
        self._checkpointer = orbax.PyTreeCheckpointer()

    def commit(self, step: int) -> float:
        """Save one step and remove the one before."""
        started = time.perf_counter()
        self._checkpointer.save(self._directory / str(step), self._state)
        sync_path(self._directory)
        shutil.rmtree(self._directory / str(step - 1), ignore_errors=True)
        return time.perf_counter() - started


class Icechunk:
    """An Icechunk commit; its local storage calls no sync, so every file is synced after it."""

    def __init__(self, directory: Path, state: Arrays) -> None:
        import icechunk
        import zarr

        self._state = state
        self._directory = directory / "icechunk"
        storage = icechunk.local_filesystem_storage(str(self._directory))
        self._repository = icechunk.Repository.create(storage)
        session = self._repository.writable_session("main")
        group = zarr.open_group(session.store, mode="a")
        for shard, tensors in state.items():
            for name, array in tensors.items():
                group.create_array(
                    f"{shard}/{name}",
                    shape=array.shape,
                    chunks=array.shape,
                    dtype="float32",
                    compressors=None,
                )
        session.commit("begin")

    def commit(self, step: int) -> float:
        """Save one step, sync it, and collect the one before."""
        import zarr

        started = time.perf_counter()
        session = self._repository.writable_session("main")
        group = zarr.open_group(session.store, mode="a")
        for shard, tensors in self._state.items():
            for name, array in tensors.items():
                group[f"{shard}/{name}"][:] = array
        session.commit(f"step {step}")
        sync_tree(self._directory)
        now = dt.datetime.now(dt.UTC)
        self._repository.expire_snapshots(now)
        self._repository.garbage_collect(now)
        return time.perf_counter() - started


PEERS: dict[str, tuple[str, type]] = {
    "torch DCP": ("torch", DistributedCheckpoint),
    "TensorStore OCDBT": ("tensorstore", Ocdbt),
    "Orbax": ("orbax", Orbax),
    "Icechunk + fsync": ("icechunk", Icechunk),
}


def installed_peers() -> dict[str, type]:
    """The peers whose package is there."""
    return {
        name: peer
        for name, (package, peer) in PEERS.items()
        if importlib.util.find_spec(package) is not None
    }
