"""The packed form of an object: `objects/<digest>.pack`.

Owns the layout of the file, building and reading its header (tables in docs/file-format.md). Knows
nothing of how bytes are compressed, nor of other files.

    header     64 bytes: magic, version, sizes, digest, base, checksum of header and tables
    segments   16 bytes each: bytes, item bytes, whether it is a difference to the base
    lengths    4 bytes for each plane of each chunk: bytes that are stored of it
    planes     in that order, without holes, to the end of the file

Segments cover the object from its first byte to its last. A segment is cut into chunks of
`CHUNK_BYTES`, a chunk into as many planes as an item has bytes. A plane whose stored length is its
own is stored raw; a shorter one is one zstd frame.

Reading is strict and bounded: every number is checked against the object's size, which the caller
knows, before it is used; what is read and allocated is at most what the file really has.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardb.errors import FormatError, ObjectCorruptError
from shardb.pack_planes import ITEM_BYTES_ALLOWED

MAGIC = b"shardbpk"
VERSION = 1
CHUNK_BYTES = 1 << 20
SEGMENTS_MAX = 1 << 16
# magic, version, zero, segments, object bytes, checksum, digest, base
_HEADER = struct.Struct("<8sHHIQQ16s16s")
_SEGMENT = np.dtype(
    [("bytes", "<u8"), ("item_bytes", "u1"), ("is_delta", "u1"), ("zero", "u1", (6,))]
)
HEADER_BYTES = _HEADER.size
_CHECKSUM_AT = 24
_NO_BASE = bytes(16)
Lengths = NDArray[np.uint32]
# Gives up to so many bytes from a place in the file.
Read = Callable[[int, int], bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A run of bytes of an object that is packed in one way."""

    start: int
    bytes: int
    item_bytes: int
    is_delta: bool

    @property
    def end(self) -> int:
        return self.start + self.bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A piece of a segment: where it is in the object, and where its planes are in the file."""

    start: int
    bytes: int
    item_bytes: int
    is_delta: bool
    stored_at: int
    stored: tuple[int, ...]

    @property
    def plane_bytes(self) -> int:
        return self.bytes // self.item_bytes


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a packed file says of itself; `base` is None when nothing is a difference to it."""

    digest: str
    base: str | None
    bytes: int
    segments: tuple[Segment, ...]
    lengths: Lengths

    @property
    def planes_at(self) -> int:
        """Where the first plane begins in the file."""
        return planes_at(self.segments)

    def chunks(self) -> list[Chunk]:
        """The chunks of the object in order."""
        at, number, found = self.planes_at, 0, []
        for start, size, segment in chunk_places(self.segments):
            stored = tuple(map(int, self.lengths[number : number + segment.item_bytes]))
            found.append(
                Chunk(
                    start=start,
                    bytes=size,
                    item_bytes=segment.item_bytes,
                    is_delta=segment.is_delta,
                    stored_at=at,
                    stored=stored,
                )
            )
            at, number = at + sum(stored), number + segment.item_bytes
        return found


def chunk_places(segments: Sequence[Segment]) -> Iterator[tuple[int, int, Segment]]:
    """Start, size and segment of every chunk, in order."""
    for segment in segments:
        for start in range(segment.start, segment.end, CHUNK_BYTES):
            yield start, min(CHUNK_BYTES, segment.end - start), segment


def length_count(segments: Sequence[Segment]) -> int:
    """How many planes there are in all chunks."""
    return sum(-(-segment.bytes // CHUNK_BYTES) * segment.item_bytes for segment in segments)


def planes_at(segments: Sequence[Segment]) -> int:
    """Where the first plane begins in a file of these segments."""
    return HEADER_BYTES + len(segments) * _SEGMENT.itemsize + 4 * length_count(segments)


def encode_header(header: Header) -> bytes:
    """The bytes in front of the planes."""
    rows = np.zeros(len(header.segments), dtype=_SEGMENT)
    for row, segment in zip(rows, header.segments, strict=True):
        row["bytes"], row["item_bytes"] = segment.bytes, segment.item_bytes
        row["is_delta"] = segment.is_delta
    assert len(header.lengths) == length_count(header.segments)
    tables = rows.tobytes() + header.lengths.astype("<u4").tobytes()
    return _front(header, _checksum(_front(header, 0), tables)) + tables


def _front(header: Header, checksum: int) -> bytes:
    return _HEADER.pack(
        MAGIC,
        VERSION,
        0,
        len(header.segments),
        header.bytes,
        checksum,
        bytes.fromhex(header.digest),
        _NO_BASE if header.base is None else bytes.fromhex(header.base),
    )


def _checksum(front: bytes, tables: bytes) -> int:
    return xxhash.xxh3_64_intdigest(front + tables)


def read_header(
    read: Read, *, path: str, digest: str, object_bytes: int, file_bytes: int
) -> Header:
    """Read and check a header.

    `digest` and `object_bytes` are what the caller wants, `file_bytes` is the file's size. Raises
    ObjectCorruptError when the file is not the packed form of that object, FormatError when a newer
    version wrote it.
    """
    reader = _HeaderReader(path, digest, object_bytes, file_bytes)
    front = read(0, HEADER_BYTES)
    count, base, checksum = reader.front(front)
    segment_bytes = count * _SEGMENT.itemsize
    segments_table = reader.exactly(read, HEADER_BYTES, segment_bytes)
    segments = reader.segments(segments_table)
    lengths_table = reader.exactly(read, HEADER_BYTES + segment_bytes, 4 * length_count(segments))
    unsigned = front[:_CHECKSUM_AT] + bytes(8) + front[_CHECKSUM_AT + 8 :]
    if checksum != _checksum(unsigned, segments_table + lengths_table):
        raise reader.corrupt("its header's checksum does not match")
    lengths = np.frombuffer(lengths_table, dtype="<u4")
    reader.check_lengths(segments, lengths)
    return Header(digest=digest, base=base, bytes=object_bytes, segments=segments, lengths=lengths)


class _HeaderReader:
    """The checks of one header."""

    def __init__(self, path: str, digest: str, object_bytes: int, file_bytes: int) -> None:
        self.path = path
        self.digest = digest
        self.object_bytes = object_bytes
        self.file_bytes = file_bytes

    def corrupt(self, reason: str) -> ObjectCorruptError:
        return ObjectCorruptError(
            f"{self.path}: not the packed form of this object: {reason}; run `shardb fsck` to see "
            "which steps it hits",
            path=self.path,
        )

    def exactly(self, read: Read, start: int, length: int) -> bytes:
        """Read what the file must have; it is not allocated when the file is too short for it."""
        if start + length > self.file_bytes:
            raise self.corrupt(f"{self.file_bytes} bytes are too few for its tables")
        data = read(start, length)
        if len(data) != length:
            raise self.corrupt("it was cut while it was read")
        return data

    def front(self, front: bytes) -> tuple[int, str | None, int]:
        """How many segments, the base, and the checksum."""
        if len(front) != HEADER_BYTES:
            raise self.corrupt(f"{len(front)} bytes are too few for a header")
        fields: tuple[Any, ...] = _HEADER.unpack(front)
        magic, version, zero, count, size, checksum, digest, base = fields
        if magic != MAGIC:
            raise self.corrupt("it does not begin as a packed file does")
        if version > VERSION:
            raise FormatError(
                f"{self.path}: packed format {version} is newer than this program reads "
                f"({VERSION}); upgrade shardb",
                path=self.path,
            )
        if version != VERSION or zero:
            raise self.corrupt(f"version {version}, reserved {zero}")
        if digest.hex() != self.digest or size != self.object_bytes:
            raise self.corrupt(f"it holds object {digest.hex()} of {size} bytes")
        if not 0 < count <= min(SEGMENTS_MAX, size):
            raise self.corrupt(f"{count} segments")
        return count, None if base == _NO_BASE else base.hex(), checksum

    def segments(self, table: bytes) -> tuple[Segment, ...]:
        """The segments, which cover the object exactly."""
        found: list[Segment] = []
        start = 0
        for row in np.frombuffer(table, dtype=_SEGMENT):
            size, item_bytes, is_delta = int(row["bytes"]), int(row["item_bytes"]), row["is_delta"]
            if item_bytes not in ITEM_BYTES_ALLOWED or is_delta > 1 or row["zero"].any():
                raise self.corrupt(f"segment {len(found)} is of no known kind")
            if not 0 < size <= self.object_bytes - start or size % item_bytes:
                raise self.corrupt(f"segment {len(found)} has {size} bytes from byte {start}")
            found.append(
                Segment(start=start, bytes=size, item_bytes=item_bytes, is_delta=bool(is_delta))
            )
            start += size
        if start != self.object_bytes:
            raise self.corrupt(f"segments end at byte {start} of {self.object_bytes}")
        return tuple(found)

    def check_lengths(self, segments: tuple[Segment, ...], lengths: Lengths) -> None:
        """No plane is longer stored than raw, and together they fill the file."""
        raw: list[int] = []
        for _, size, segment in chunk_places(segments):
            raw += [size // segment.item_bytes] * segment.item_bytes
        if (lengths > np.array(raw, dtype=np.uint64)).any() or not lengths.all():
            raise self.corrupt("a plane is stored longer than it is, or not at all")
        end = planes_at(segments) + int(lengths.sum(dtype=np.uint64))
        if end != self.file_bytes:
            raise self.corrupt(f"its planes end at byte {end} of {self.file_bytes}")
