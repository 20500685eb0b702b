"""The weight files of a package: what is checked of the values, and how they are streamed out.

Owns the split into files, the header, the conversion and the digests. Memory is one shard of the
store and one tile, whatever the size of the model. Knows nothing of configuration or tokenizers.

Format: safetensors, https://github.com/huggingface/safetensors: eight bytes of length, a JSON
header, then every tensor without a gap. The header ends at a multiple of 64 bytes and tensors of
odd size come last, so that a reader that maps the file gets aligned tensors: matrix kernels may
round differently on other alignments.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from export.package_tensors import TORCH_DTYPES, TORCH_NAMES, ZEROS, PackageTensor
from export.package_weights import Weights
from trainer.errors import InputError

ALIGNMENT_BYTES = 64
TILE_ELEMENTS = 1 << 20
INDEX_FILE = "model.safetensors.index.json"
_METADATA = {"format": "pt"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFile:
    """One file and its tensors, in the order in which they lie in it."""

    name: str
    tensors: tuple[PackageTensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What was written: sha256 of each file, xxh3-128 of each tensor's bytes."""

    file_digests: Mapping[str, str]
    tensor_digests: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """What conversion does to the values: how many, and how many that are not 0 become 0."""

    elements: int
    to_zero: int


def split_into_files(tensors: Sequence[PackageTensor], max_bytes: int) -> list[WeightFile]:
    """Fill files up to `max_bytes` in order; a larger tensor has a file of its own."""
    groups: list[list[PackageTensor]] = [[]]
    for tensor in tensors:
        filled = sum(each.bytes for each in groups[-1])
        if groups[-1] and filled + tensor.bytes > max_bytes:
            groups.append([])
        groups[-1].append(tensor)
    if len(groups) == 1:
        return [WeightFile(name="model.safetensors", tensors=_aligned(groups[0]))]
    return [
        WeightFile(
            name=f"model-{number:05d}-of-{len(groups):05d}.safetensors", tensors=_aligned(group)
        )
        for number, group in enumerate(groups, 1)
    ]


def index_of(files: Sequence[WeightFile]) -> bytes:
    """Give the index that a package of several files needs."""
    tensors = [tensor for file in files for tensor in file.tensors]
    names = {tensor.name: file.name for file in files for tensor in file.tensors}
    metadata = {"total_size": sum(tensor.bytes for tensor in tensors)}
    document = {"metadata": metadata, "weight_map": dict(sorted(names.items()))}
    return (json.dumps(document, indent=2) + "\n").encode()


def check_values(weights: Weights, tensors: Sequence[PackageTensor]) -> Rounding:
    """Look at every value before anything is written.

    Raises InputError, with tensor and remedy, for a value that is not finite or that the chosen
    form cannot hold.
    """
    elements = to_zero = 0
    for tensor, values in read_in_order(weights, tensors):
        limit = torch.finfo(TORCH_DTYPES[tensor.dtype]).max
        for tile in _tiles(values):
            largest = float(tile.abs().max())
            if not largest <= limit:
                raise _unfit(tensor, tile, limit)
            to_zero += int(((tile != 0) & (tile.to(TORCH_DTYPES[tensor.dtype]) == 0)).sum())
        elements += tensor.elements
    return Rounding(elements=elements, to_zero=to_zero)


def write_weights(weights: Weights, files: Sequence[WeightFile], folder: Path) -> Written:
    """Write every file, and the index where there are several."""
    file_digests: dict[str, str] = {}
    tensor_digests: dict[str, str] = {}
    for file in files:
        digest = hashlib.sha256()
        with (folder / file.name).open("wb") as out:
            header = _header(file.tensors)
            out.write(header)
            digest.update(header)
            for tensor, values in read_in_order(weights, file.tensors):
                tensor_digest = xxhash.xxh3_128()
                for tile in _tiles(values):
                    data = _bytes_of(tile.to(TORCH_DTYPES[tensor.dtype]))
                    out.write(data)
                    digest.update(data)
                    tensor_digest.update(data)
                tensor_digests[tensor.name] = tensor_digest.hexdigest()
        file_digests[file.name] = digest.hexdigest()
    if len(files) > 1:
        (folder / INDEX_FILE).write_bytes(index_of(files))
    return Written(file_digests=file_digests, tensor_digests=tensor_digests)


def read_in_order(
    weights: Weights, tensors: Sequence[PackageTensor]
) -> Iterator[tuple[PackageTensor, Tensor]]:
    """Give each tensor's values; a shard is read once for neighbours, and only one is held."""
    name = ""
    shard: Mapping[str, Tensor] = {}
    for tensor in tensors:
        if tensor.shard != name:
            shard = {}  # let go of the old one first
            name, shard = tensor.shard, weights.read(tensor.shard)
        is_stored = tensor.tensor != ZEROS
        values = shard[tensor.tensor] if is_stored else torch.zeros(tensor.shape)
        assert tuple(values.shape) == tensor.shape, (tensor.name, values.shape)
        yield tensor, values


def _aligned(tensors: Sequence[PackageTensor]) -> tuple[PackageTensor, ...]:
    return tuple(sorted(tensors, key=lambda tensor: tensor.bytes % ALIGNMENT_BYTES != 0))


def _header(tensors: Sequence[PackageTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": _METADATA}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.bytes],
        }
        offset += tensor.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    size = -(-(8 + len(text)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES - 8
    return size.to_bytes(8, "little") + text.ljust(size)


def _tiles(values: Tensor) -> Iterator[Tensor]:
    flat = values.reshape(-1)
    for start in range(0, flat.numel(), TILE_ELEMENTS):
        yield flat[start : start + TILE_ELEMENTS]


def _bytes_of(tile: Tensor) -> memoryview:
    assert tile.is_contiguous(), "bytes are written in the order of the elements"
    array: NDArray[np.uint8] = tile.view(torch.uint8).numpy()
    return array.data


def _unfit(tensor: PackageTensor, tile: Tensor, limit: float) -> InputError:
    values = tile[~(tile.abs() <= limit)]
    place = f"{tensor.shard}: tensor {tensor.tensor} ({tensor.name})"
    if not bool(torch.isfinite(values).all()):
        return InputError(
            f"{place} has a value that is not finite: this commit cannot be used; give an earlier"
            " one with --ref"
        )
    return InputError(
        f"{place} has a weight of {float(values[0]):g}, and {TORCH_NAMES[tensor.dtype]} ends at"
        f" {limit:g}: export with --dtype bf16 or fp32"
    )
