"""The files of a package on disk: which hold tensors, and where each tensor's bytes lie.

Owns finding and reading them, and the refusal of what cannot be trusted: a hostile header, a
truncated or missing file, an index that contradicts the files. Knows nothing of models. Invariants:
headers are read within bounds and nothing is unpickled; what is refused names file and remedy.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shardb.errors import ObjectCorruptError
from shardb.layout import HEADER_LIMIT_BYTES, TensorSpec, parse_header
from shardb.listing import listed
from trainer.errors import InputError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
JSON_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor's form, and where its bytes begin in its file."""

    path: Path
    offset: int
    spec: TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageFiles:
    """Every tensor of a package by name, and what is odd but harmless."""

    tensors: Mapping[str, StoredTensor]
    notes: tuple[str, ...]


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None when there is no such file, InputError when it is no object."""
    try:
        size = path.stat().st_size
        if size > JSON_LIMIT_BYTES:
            raise InputError(f"{path}: {size} bytes are too many for a JSON file of a package")
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: no valid JSON ({error}): fetch the file again") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds no JSON object: fetch the file again")
    return values


def open_package(directory: Path) -> PackageFiles:
    """Read the headers of every file of weights; InputError names the file that is wrong."""
    if not directory.is_dir():
        raise InputError(f"{directory}: no such folder: give a folder with config.json and weights")
    index = read_json(directory / INDEX)
    if index is None:
        return PackageFiles(tensors=_single(directory), notes=())
    if (directory / WEIGHTS).exists():
        raise InputError(
            f"{directory}: holds both {WEIGHTS} and {INDEX}, and loaders disagree on which counts:"
            " remove the one that is stale"
        )
    return _split(directory, index)


def _single(directory: Path) -> dict[str, StoredTensor]:
    path = directory / WEIGHTS
    if path.exists():
        return read_header(path)
    found = sorted(p.name for p in directory.glob("*.safetensors"))
    if found:
        raise InputError(
            f"{directory}: there is no {WEIGHTS} and no {INDEX}, but {listed(found, most=3)}: the"
            " index is missing, or the file has another name: fetch it, or rename the file"
        )
    pickled = sorted(p.name for p in directory.glob("*.bin"))
    raise InputError(
        f"{directory}: there is no {WEIGHTS} and no {INDEX}"
        + (f", only {pickled[0]}, which is a pickle and is never loaded" if pickled else "")
        + ": fetch the safetensors form of the model"
    )


def _split(directory: Path, index: Mapping[str, Any]) -> PackageFiles:
    index_path = directory / INDEX
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index_path}: has no weight_map: fetch the file again")
    names = set()
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name != os.path.basename(name) or name.startswith("."):
            raise InputError(
                f"{index_path}: tensor {tensor!r} is in {name!r}, which is no file of this folder"
            )
        names.add(name)
    missing = sorted(name for name in names if not (directory / name).is_file())
    if missing:
        raise InputError(
            f"{directory}: {len(missing)} of {len(names)} files of weights are missing"
            f" ({listed(missing, most=3)}): fetch them"
        )
    strays = {p.name for p in directory.glob("model*.safetensors")} - names
    if strays:
        raise InputError(
            f"{directory}: {', '.join(sorted(strays))} is not in {INDEX}: a leftover of another"
            " package? Remove it, or fetch the index again"
        )
    headers = {name: read_header(directory / name) for name in sorted(names)}
    _check_index(index_path, weight_map, headers)
    tensors = {tensor: headers[name][tensor] for tensor, name in weight_map.items()}
    return PackageFiles(tensors=tensors, notes=_size_notes(index, tensors))


def _check_index(
    path: Path, weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, StoredTensor]]
) -> None:
    """The index and the files must tell of the same tensors."""
    for tensor, name in weight_map.items():
        if tensor not in headers[name]:
            raise InputError(
                f"{path}: says that {name} holds {tensor!r}, and it does not: the index and the"
                " files are of different packages: fetch them together"
            )
    for name, header in headers.items():
        extra = sorted(tensor for tensor in header if weight_map.get(tensor) != name)
        if extra:
            raise InputError(
                f"{path}: {name} holds {extra[0]!r}, which the index does not put there: the index"
                " and the files are of different packages: fetch them together"
            )


def _size_notes(index: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    metadata = index.get("metadata")
    told = metadata.get("total_size") if isinstance(metadata, dict) else None
    actual = sum(tensor.spec.bytes for tensor in tensors.values())
    if told is None or told == actual:
        return ()
    return (f"{INDEX}: total_size is {told}, but the tensors have {actual} bytes",)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read where each tensor of a safetensors file lies; InputError when it is malformed."""
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        data = _header_bytes(file)
    try:
        layout = parse_header(memoryview(data), size_bytes, str(path))
    except ObjectCorruptError as error:
        raise InputError(f"{error.message}: fetch the file again") from error
    _refuse_twins(path, data[8:])
    return {
        name: StoredTensor(path=path, offset=layout.offsets[name], spec=spec)
        for name, spec in layout.specs.items()
    }


def _header_bytes(file: BinaryIO) -> bytes:
    start = file.read(8)
    length = min(int.from_bytes(start, "little"), HEADER_LIMIT_BYTES)
    return start + file.read(length)


def _refuse_twins(path: Path, text: bytes) -> None:
    """JSON readers differ in which of two equal names they take: refuse both."""

    def pairs(entries: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [name for name, count in Counter(n for n, _ in entries).items() if count > 1]
        if twice:
            raise InputError(f"{path}: the header names {twice[0]!r} twice: fetch the file again")
        return dict(entries)

    json.loads(text, object_pairs_hook=pairs)
