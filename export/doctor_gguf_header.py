"""The header of a GGUF file, read within bounds: settings, and where each tensor lies.

Owns the format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3,
little-endian). Knows nothing of what settings mean. Invariants: a hostile header cannot make it
allocate or loop beyond what the file has; nothing behind the header is read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from shardb.errors import ShardbError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
KEY_BYTES_MAX = 65535
DIMENSIONS_MAX = 4
DEPTH_MAX = 3
DEFAULT_ALIGNMENT = 32
STRING, ARRAY, BOOL = 8, 9, 7
_SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
)
# Number of a form -> name, elements and bytes of a block.
FORMS: Mapping[int, tuple[str, int, int]] = MappingProxyType(
    {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
        28: ("F64", 1, 8), 30: ("BF16", 1, 2),
    }
)  # fmt: skip


class MalformedGgufError(ShardbError):
    """The file is no GGUF file that can be trusted."""

    kind = "gguf_malformed"
    exit_code = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufEntry:
    """One tensor; the shape is as the file has it, the fastest size first; bytes None: unknown."""

    name: str
    shape: tuple[int, ...]
    form: str
    offset: int
    bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufHeader:
    """Everything before the tensors' bytes."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, GgufEntry]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read it; MalformedGgufError says what is wrong."""
    with path.open("rb") as file:
        reader = _Reader(file, path.stat().st_size)
        if reader.take(4) != MAGIC:
            raise MalformedGgufError("it does not begin with GGUF")
        version, tensor_count, setting_count = reader.unpack("IQQ")
        if version not in VERSIONS:
            raise MalformedGgufError(f"version {version} is none of {VERSIONS}, or big-endian")
        settings: dict[str, Any] = {}
        reader.check_count(setting_count, 12, "settings")
        for _ in range(setting_count):
            key = reader.text(KEY_BYTES_MAX)
            if key in settings:
                raise MalformedGgufError(f"the setting {key} is there twice")
            settings[key] = reader.value(reader.unpack("I")[0])
        reader.check_count(tensor_count, 24, "tensors")
        infos = [_info(reader) for _ in range(tensor_count)]
        alignment = settings.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment % 8:
            raise MalformedGgufError(f"general.alignment is {alignment!r}")
        start = -(-reader.position // alignment) * alignment
        entries = _placed(infos, start, alignment, reader.size_bytes)
    return GgufHeader(settings=settings, tensors=entries)


class _Reader:
    """Reads little-endian values, and never more than the file has."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file = file
        self.size_bytes = size_bytes
        self.position = 0

    def take(self, count: int) -> bytes:
        """Give so many bytes."""
        if count > self.size_bytes - self.position:
            raise MalformedGgufError(
                f"the header asks for {count} bytes at {self.position}, and the file ends at"
                f" {self.size_bytes}: it is truncated or hostile"
            )
        self.position += count
        return self._file.read(count)

    def unpack(self, form: str) -> tuple[Any, ...]:
        """Give the values of a form of `struct`."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))

    def check_count(self, count: int, bytes_each: int, what: str) -> None:
        """Refuse a number of things that the file is too short for."""
        if count * bytes_each > self.size_bytes - self.position:
            raise MalformedGgufError(
                f"the header says that there are {count} {what}, and the file is too short for them"
            )

    def text(self, limit: int | None = None) -> str:
        """Give a string."""
        (length,) = self.unpack("Q")
        if limit is not None and length > limit:
            raise MalformedGgufError(
                f"a name of {length} bytes is longer than the format's {limit}"
            )
        return self.take(length).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """Give a value of any kind."""
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            if kind not in _SCALARS:
                raise MalformedGgufError(f"a setting has the unknown kind {kind}")
            (found,) = self.unpack(_SCALARS[kind])
            return bool(found) if kind == BOOL else found
        inner, count = self.unpack("IQ")
        if inner in _SCALARS:
            size = struct.calcsize(f"<{_SCALARS[inner]}")
            self.check_count(count, size, "elements of an array")
            return list(self.unpack(f"{count}{_SCALARS[inner]}"))
        if depth >= DEPTH_MAX:
            raise MalformedGgufError("arrays lie within arrays too deeply")
        self.check_count(count, 8, "elements of an array")
        return [self.value(inner, depth + 1) for _ in range(count)]


def _info(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.text(KEY_BYTES_MAX)
    (dimensions,) = reader.unpack("I")
    if dimensions > DIMENSIONS_MAX:
        raise MalformedGgufError(f"tensor {name} has {dimensions} sizes, at most 4 are allowed")
    shape = reader.unpack(f"{dimensions}Q")
    form, offset = reader.unpack("IQ")
    return name, shape, form, offset


def _placed(
    infos: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int, size_bytes: int
) -> dict[str, GgufEntry]:
    """Check that every tensor lies inside the file, aligned, and apart from the others."""
    entries: dict[str, GgufEntry] = {}
    reached = start
    for name, shape, number, offset in sorted(infos, key=lambda info: info[3]):
        if name in entries:
            raise MalformedGgufError(f"tensor {name} is there twice")
        form, elements, block_bytes = FORMS.get(number, (f"number {number}", 1, 0))
        count = math.prod(shape)
        if shape and block_bytes and shape[0] % elements:
            raise MalformedGgufError(f"tensor {name}: rows of {shape[0]} do not fill {form} blocks")
        size = count // elements * block_bytes if block_bytes else None
        if offset % alignment:
            raise MalformedGgufError(f"tensor {name} lies at {offset}, no multiple of {alignment}")
        if start + offset < reached:
            raise MalformedGgufError(f"tensor {name} overlaps the one before it")
        reached = start + offset + (size or 0)
        if reached > size_bytes:
            raise MalformedGgufError(
                f"tensor {name} ends at byte {reached}, the file at {size_bytes}: it was cut short"
            )
        entries[name] = GgufEntry(
            name=name, shape=shape, form=form, offset=start + offset, bytes=size
        )
    return entries
