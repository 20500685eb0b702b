"""A package as a source of stages: its tensors by the store's shard names.

Owns finding a tensor in the weight files and reading single ones. Knows nothing of stores.
Invariant: every tensor that the model needs is there once, with its shape; what is left over is
named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from export.hf_weights import INDEX_FILE
from export.package_tensors import PackageTensor
from trainer.errors import InputError

SINGLE_FILE = "model.safetensors"


class PackageShards:
    """Reads the tensors of a package, a shard of the store at a time."""

    def __init__(self, folder: Path, tensors: Sequence[PackageTensor]) -> None:
        self._folder = folder
        self._files = weight_map(folder)
        self._shards: dict[str, list[PackageTensor]] = {}
        for tensor in tensors:
            self._shards.setdefault(tensor.shard, []).append(tensor)
        missing = sorted({tensor.name for tensor in tensors} - set(self._files))
        if missing:
            raise InputError(f"{folder}: tensor {missing[0]} is missing ({len(missing)} in all)")

    def read(self, shard: str) -> Mapping[str, Tensor]:
        """Give the tensors of a shard, by their names in the store."""
        return {tensor.tensor: self._tensor(tensor) for tensor in self._shards[shard]}

    def _tensor(self, wanted: PackageTensor) -> Tensor:
        path = self._folder / self._files[wanted.name]
        try:
            with safe_open(path, framework="pt") as opened:
                found: Tensor = opened.get_tensor(wanted.name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: cannot be read ({error})") from error
        if tuple(found.shape) != wanted.shape:
            raise InputError(
                f"{path}: tensor {wanted.name} has shape {list(found.shape)}, and the model needs"
                f" {list(wanted.shape)}"
            )
        return found.clone(memory_format=torch.contiguous_format)


def weight_map(folder: Path) -> dict[str, str]:
    """Give the file of every tensor, by the index or by the one file's own header."""
    index = folder / INDEX_FILE
    try:
        if index.is_file():
            return dict(json.loads(index.read_text())["weight_map"])
        with safe_open(folder / SINGLE_FILE, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), SINGLE_FILE)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InputError(
            f"{folder}: no weights: neither {INDEX_FILE} nor {SINGLE_FILE} can be read ({error})"
        ) from error
