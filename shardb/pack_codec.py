"""Packing the bytes of one object: which way for which tensor, then chunk by chunk.

Owns the choice, made from samples: for each tensor whether the difference to the base is shorter,
for each byte plane whether zstd shortens it at all. Knows nothing of files or of stores.

Invariants: chunks of `CHUNK_BYTES` are packed by a few threads, and no more than a few of them are
in memory at a time; what comes out depends on image, base and level alone, not on the threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import zstandard

from shardb.buffers import Bytes
from shardb.errors import UsageError
from shardb.layout import Layout
from shardb.pack_format import CHUNK_BYTES, SEGMENTS_MAX, Segment, chunk_places, planes_at
from shardb.pack_planes import difference, item_bytes_of, split
from shardb.pack_threads import in_order

LEVEL_MAX = 19
# Tensors next to each other are packed in one way until they have this many bytes together.
SEGMENT_BYTES_MIN = 64 << 10
SAMPLES = 4
PIECE_BYTES_MIN = 4 << 10
PIECE_BYTES_MAX = 32 << 10
# A plane is compressed when its sample shrinks to this much, and a difference is taken when a
# segment, and the object, come down to that much of the way without: less would cost time at every
# reading, and bind two objects to each other, for nothing.
WORTH_COMPRESSING = 0.95
WORTH_A_BASE = 0.97


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How a segment is packed: `compressed` are its planes that zstd shortens."""

    segment: Segment
    compressed: tuple[bool, ...]
    estimated_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How an object is packed, and about how long it will be."""

    ways: tuple[Way, ...]

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(way.segment for way in self.ways)

    @property
    def planes_at(self) -> int:
        """Where the planes begin in the file."""
        return planes_at(self.segments)

    @property
    def needs_base(self) -> bool:
        return any(segment.is_delta for segment in self.segments)

    @property
    def estimated_bytes(self) -> int:
        return self.planes_at + sum(way.estimated_bytes for way in self.ways)


class Compressors:
    """One zstd context a thread: they cannot be shared, and cost something to make."""

    def __init__(self, level: int) -> None:
        """`level` is zstd's, from 1 to 19; UsageError for another one."""
        if type(level) is not int or not 1 <= level <= LEVEL_MAX:
            raise UsageError(f"level is {level!r}; it must be a whole number from 1 to {LEVEL_MAX}")
        self._level = level
        self._of_thread = threading.local()

    def compress(self, plane: Bytes) -> bytes:
        """One frame that says how long its content is."""
        context = getattr(self._of_thread, "context", None)
        if context is None:
            context = self._of_thread.context = zstandard.ZstdCompressor(level=self._level)
        packed: bytes = context.compress(plane.data)
        return packed


def plan(layout: Layout, image: Bytes, base: Bytes | None, compressors: Compressors) -> Plan:
    """Choose how to pack an object; `base` is another one of the same layout."""
    assert base is None or len(base) == len(image)
    alone = Plan(
        ways=tuple(_estimate(segment, image, None, compressors) for segment in segments_of(layout))
    )
    if base is None:
        return alone
    deltas = (_estimate(way.segment, image, base, compressors) for way in alone.ways)
    mixed = Plan(
        ways=tuple(
            delta if delta.estimated_bytes < WORTH_A_BASE * way.estimated_bytes else way
            for way, delta in zip(alone.ways, deltas, strict=True)
        )
    )
    gains = mixed.estimated_bytes < WORTH_A_BASE * alone.estimated_bytes
    return mixed if gains else alone


def segments_of(layout: Layout) -> list[Segment]:
    """The header of an object, then its tensors; small ones with their neighbours."""
    header_bytes = layout.size_bytes - sum(spec.bytes for spec in layout.specs.values())
    found = [Segment(start=0, bytes=header_bytes, item_bytes=1, is_delta=False)]
    # So many tensors of an object that their number stays below the format's limit.
    bytes_min = max(SEGMENT_BYTES_MIN, 4 * layout.size_bytes // SEGMENTS_MAX)
    for name, spec in layout.specs.items():
        item_bytes, last = item_bytes_of(spec.dtype), found[-1]
        small = min(last.bytes, spec.bytes) < bytes_min
        if last.start and last.item_bytes == item_bytes and small:
            found[-1] = replace(last, bytes=last.bytes + spec.bytes)
        elif spec.bytes:
            assert layout.offsets[name] == last.end
            found.append(
                Segment(start=last.end, bytes=spec.bytes, item_bytes=item_bytes, is_delta=False)
            )
    return found


def _estimate(segment: Segment, image: Bytes, base: Bytes | None, compressors: Compressors) -> Way:
    """Compress a sample of a segment, plane by plane."""
    places = _samples(segment)
    sample = np.concatenate([image[place] for place in places])
    if base is not None:
        others = np.concatenate([base[place] for place in places])
        sample = difference(sample, others, segment.item_bytes)
    planes = split(sample, segment.item_bytes)
    shares = [len(compressors.compress(plane)) / len(plane) for plane in planes]
    compressed = tuple(share <= WORTH_COMPRESSING for share in shares)
    kept = sum(share if c else 1.0 for share, c in zip(shares, compressed, strict=True))
    return Way(
        segment=replace(segment, is_delta=base is not None),
        compressed=compressed,
        estimated_bytes=int(segment.bytes * kept / segment.item_bytes),
    )


def _samples(segment: Segment) -> list[slice]:
    """A few pieces of whole items, spread evenly: an eighth of a segment, if that is enough."""
    size = min(max(segment.bytes // (8 * SAMPLES), PIECE_BYTES_MIN), PIECE_BYTES_MAX) // 8 * 8
    if segment.bytes <= SAMPLES * size:
        return [slice(segment.start, segment.end)]
    stride = segment.bytes // SAMPLES // 8 * 8
    starts = range(segment.start, segment.start + SAMPLES * stride, stride)
    return [slice(start, start + size) for start in starts]


def packed_chunks(
    chosen: Plan, image: Bytes, base: Bytes | None, compressors: Compressors, *, threads: int
) -> Iterator[list[memoryview]]:
    """The planes of each chunk as they are stored, in order."""
    places = [
        (start, size, way) for way in chosen.ways for start, size, _ in chunk_places([way.segment])
    ]
    pack = partial(_pack_chunk, image, base, compressors)
    return in_order(lambda place: pack(*place), places, threads=threads)


def _pack_chunk(
    image: Bytes, base: Bytes | None, compressors: Compressors, start: int, size: int, way: Way
) -> list[memoryview]:
    assert size <= CHUNK_BYTES
    chunk = image[start : start + size]
    if way.segment.is_delta:
        assert base is not None
        chunk = difference(chunk, base[start : start + size], way.segment.item_bytes)
    stored: list[memoryview] = []
    for plane, wanted in zip(split(chunk, way.segment.item_bytes), way.compressed, strict=True):
        packed = compressors.compress(plane) if wanted else b""
        stored.append(memoryview(packed) if wanted and len(packed) < len(plane) else plane.data)
    return stored
