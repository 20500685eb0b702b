"""The layout of an object: a `.safetensors` file whose data starts on a 4,096-byte boundary.

Owns building and reading the header. The format (https://github.com/huggingface/safetensors):
8 bytes header length, little-endian; a JSON header, padded with spaces; the tensors' bytes without
holes. Ours pads the header so that 8 + header length is a multiple of 4,096, and orders tensors by
(item size, bytes) descending, then name, so that matrices stay aligned. The header holds nothing
that depends on time or place: equal tensors give equal files.

Reading is strict and bounded: a foreign header cannot make it allocate more than the header's size.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shardb.errors import ObjectCorruptError, UsageError

DATA_ALIGNMENT_BYTES = 4096
HEADER_LIMIT_BYTES = 100_000_000
METADATA_KEY = "__metadata__"
# What numpy and torch both take, and more than any tensor has.
DIMENSIONS_MAX = 32
SIZE_LIMIT = 1 << 63
METADATA = {"format": "pt", "shardb": "1"}
ITEM_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*(/[A-Za-z0-9_][A-Za-z0-9_.\-]*)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Data type (in safetensors' names) and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where each tensor of an object lies: offsets in bytes from the start of the file."""

    specs: Mapping[str, TensorSpec]
    offsets: Mapping[str, int]
    header: bytes
    size_bytes: int


def check_name(name: str, what: str) -> None:
    """Raise UsageError unless `name` can be a shard, branch or snapshot name."""
    if len(name) > 200 or not NAME_PATTERN.fullmatch(name) or ".." in name:
        raise UsageError(
            f"{what} {name!r} is not a valid name: use letters, digits, '_', '-', '.', and '/' "
            "between parts, at most 200 characters"
        )


def build(specs: Mapping[str, TensorSpec]) -> Layout:
    """Lay out tensors; UsageError for an unknown data type, a bad shape or no tensor at all."""
    if all(type(spec.shape) is tuple for spec in specs.values()):
        return _built(tuple(specs.items()))
    return _build(specs)


@lru_cache(maxsize=512)
def _built(items: tuple[tuple[str, TensorSpec], ...]) -> Layout:
    """The same tensors are laid out in the same way, step after step; a layout never changes."""
    return _build(dict(items))


def _build(specs: Mapping[str, TensorSpec]) -> Layout:
    if not specs:
        raise UsageError("a shard needs at least one tensor")
    for name, spec in specs.items():
        _check_tensor_name(name)
        if spec.dtype not in ITEM_BITS:
            raise UsageError(
                f"tensor {name!r}: data type {spec.dtype!r} is unknown; use one of "
                f"{', '.join(sorted(ITEM_BITS))}"
            )
        if not _is_shape(spec.shape):
            raise UsageError(
                f"tensor {name!r}: shape {spec.shape} is not of at most {DIMENSIONS_MAX} sizes >= 0"
            )
    ordered = sorted(specs, key=lambda n: (-ITEM_BITS[specs[n].dtype], -specs[n].bytes, n))
    entries: dict[str, Any] = {METADATA_KEY: METADATA}
    offset = 0
    for name in ordered:
        spec = specs[name]
        entries[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.bytes],
        }
        offset += spec.bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    if len(text) > HEADER_LIMIT_BYTES - DATA_ALIGNMENT_BYTES:
        raise UsageError(
            f"{len(specs)} tensors need a header of {len(text)} bytes; use more shards"
        )
    start = -(-(8 + len(text)) // DATA_ALIGNMENT_BYTES) * DATA_ALIGNMENT_BYTES
    header = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
    offsets = {name: start + entries[name]["data_offsets"][0] for name in ordered}
    return Layout(
        specs={name: specs[name] for name in ordered},
        offsets=offsets,
        header=header,
        size_bytes=start + offset,
    )


def _check_tensor_name(name: str) -> None:
    if type(name) is not str or name == METADATA_KEY or not _is_text(name):
        raise UsageError(f"{name!r} cannot be the name of a tensor: use text, not {METADATA_KEY!r}")


def _is_text(name: str) -> bool:
    """Whether UTF-8 can hold it: half of a surrogate pair cannot be stored."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_shape(shape: tuple[int, ...]) -> bool:
    """Bounded, so that a foreign header cannot ask for a product that never ends."""
    return len(shape) <= DIMENSIONS_MAX and all(
        type(size) is int and 0 <= size < SIZE_LIMIT for size in shape
    )


def parse(data: memoryview, path: str) -> Layout:
    """Read the header of a safetensors file in memory; ObjectCorruptError when it is malformed."""
    return parse_header(data, len(data), path)


def parse_header(data: memoryview, size_bytes: int, path: str) -> Layout:
    """Read the header at the start of `data`, of a safetensors file of `size_bytes` in all.

    `data` need not reach beyond the header. Raises ObjectCorruptError when it is malformed.
    """

    def refuse(reason: str) -> ObjectCorruptError:
        return ObjectCorruptError(f"{path}: not a valid safetensors file: {reason}", path=path)

    if len(data) < 8:
        raise refuse(f"{len(data)} bytes are too few for a header")
    length = int.from_bytes(data[:8], "little")
    if length > HEADER_LIMIT_BYTES or 8 + length > len(data):
        raise refuse(f"the header says it has {length} bytes; the file has {size_bytes}")
    header = bytes(data[: 8 + length])
    try:
        entries = json.loads(header[8:].decode())
    except (ValueError, RecursionError) as error:
        raise refuse(f"the header is no JSON ({error})") from error
    if not isinstance(entries, dict):
        raise refuse("the header is no JSON object")
    start = 8 + length
    specs: dict[str, TensorSpec] = {}
    offsets: dict[str, int] = {}
    expected = 0
    try:
        tensors = sorted(
            ((n, e) for n, e in entries.items() if n != METADATA_KEY),
            key=lambda item: item[1]["data_offsets"],
        )
        for name, entry in tensors:
            spec = TensorSpec(dtype=entry["dtype"], shape=tuple(entry["shape"]))
            begin, end = entry["data_offsets"]
            if type(begin) is not int or type(end) is not int or not _is_shape(spec.shape):
                raise refuse(f"the shape or the place of tensor {name!r} is not of whole numbers")
            if begin != expected or end - begin != spec.bytes:
                raise refuse(f"tensor {name!r} does not lie where its shape says")
            specs[name], offsets[name], expected = spec, start + begin, end
    except (KeyError, TypeError, ValueError) as error:
        raise refuse(f"a tensor entry is malformed ({error!r})") from error
    if start + expected != size_bytes:
        raise refuse(f"tensors end at byte {start + expected}, the file at {size_bytes}")
    return Layout(specs=specs, offsets=offsets, header=header, size_bytes=size_bytes)
