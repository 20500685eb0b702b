"""Unpacking: from a packed file and its base back to the bytes of an object.

Owns reading chunks, in any order and by several threads, with nothing kept between them. Knows
nothing of where files are, or whether what comes out is right: the caller checks its digest.

Invariants: a chunk is read and unpacked in at most a few times `CHUNK_BYTES`, whatever a damaged or
hostile file says; each frame must have exactly the length that is left out of the header.
"""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np
import xxhash
import zstandard

from shardb.buffers import Bytes
from shardb.errors import ObjectCorruptError
from shardb.filesystem import FileSystem, read_exactly
from shardb.pack_format import CHUNK_BYTES, Chunk, Header
from shardb.pack_planes import join, restored
from shardb.pack_threads import in_order


class Content(Protocol):
    """The bytes of an object, wherever they are."""

    def read(self, start: int, length: int) -> Bytes:
        """Bytes from `start` on; ObjectCorruptError when they are not there."""
        ...


class FileContent:
    """An object in a file of its own; the caller keeps the descriptor open."""

    def __init__(self, files: FileSystem, file: int, path: str) -> None:
        self._files = files
        self._file = file
        self._path = path

    def read(self, start: int, length: int) -> Bytes:
        data = read_exactly(self._files, self._file, length, start)
        if len(data) != length:
            raise ObjectCorruptError(
                f"{self._path}: it ends at byte {start + len(data)}, before what was committed; "
                "run `shardb fsck`",
                path=self._path,
            )
        return np.frombuffer(data, dtype=np.uint8)


class PackedContent:
    """An object in a packed file; the caller keeps the descriptor, and its base, open."""

    def __init__(
        self, files: FileSystem, file: int, path: str, header: Header, base: Content | None
    ) -> None:
        assert base is not None or header.base is None
        self.header = header
        self._files = files
        self._file = file
        self._path = path
        self._base = base
        self._chunks = header.chunks()
        self._starts = np.array([chunk.start for chunk in self._chunks])
        self._of_thread = threading.local()

    def read(self, start: int, length: int) -> Bytes:
        """Bytes of the object; those of one chunk, the usual case, are not copied."""
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        chunk = self._chunks[number]
        if (chunk.start, chunk.bytes) == (start, length):
            return self._unpack(chunk)
        parts: list[Bytes] = []
        while length:
            chunk = self._chunks[number]
            skipped = start - chunk.start
            part = self._unpack(chunk)[skipped : skipped + length]
            parts.append(part)
            start, length, number = start + len(part), length - len(part), number + 1
        return np.concatenate(parts)

    def unpack_into(self, out: Bytes, *, threads: int) -> None:
        """Write the whole object into `out`."""
        assert len(out) == self.header.bytes

        def unpack(chunk: Chunk) -> None:
            out[chunk.start : chunk.start + chunk.bytes] = self._unpack(chunk)

        for _ in in_order(unpack, self._chunks, threads=threads):
            pass

    def digest(self, *, threads: int) -> str:
        """The digest of the object, in the memory of a few chunks."""
        hasher = xxhash.xxh3_128()
        for piece in in_order(self._unpack, self._chunks, threads=threads):
            hasher.update(piece.data)
        return hasher.hexdigest()

    def _unpack(self, chunk: Chunk) -> Bytes:
        data = read_exactly(self._files, self._file, sum(chunk.stored), chunk.stored_at)
        if len(data) != sum(chunk.stored):
            raise self._corrupt(chunk, "the file was cut while it was read")
        planes: list[Bytes] = []
        at = 0
        for stored in chunk.stored:
            planes.append(self._plane(chunk, data[at : at + stored]))
            at += stored
        unpacked = np.empty(chunk.bytes, dtype=np.uint8)
        join(planes, unpacked)
        if not chunk.is_delta:
            return unpacked
        if self._base is None:
            raise self._corrupt(chunk, "a difference, but the file names no base")
        return restored(unpacked, self._base.read(chunk.start, chunk.bytes), chunk.item_bytes)

    def _plane(self, chunk: Chunk, stored: bytes) -> Bytes:
        if len(stored) == chunk.plane_bytes:
            return np.frombuffer(stored, dtype=np.uint8)
        try:
            # The library would allocate what the frame says: so it is asked first.
            told = zstandard.frame_content_size(stored)
            if told != chunk.plane_bytes:
                raise self._corrupt(chunk, f"a frame of {told} bytes, not {chunk.plane_bytes}")
            plane = self._decompressor().decompress(stored, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise self._corrupt(chunk, str(error)) from error
        return np.frombuffer(plane, dtype=np.uint8)

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        """One zstd context a thread; a frame can make none of them grow beyond a chunk."""
        context = getattr(self._of_thread, "context", None)
        if context is None:
            context = zstandard.ZstdDecompressor(max_window_size=CHUNK_BYTES)
            self._of_thread.context = context
        return context

    def _corrupt(self, chunk: Chunk, reason: str) -> ObjectCorruptError:
        return ObjectCorruptError(
            f"{self._path}: the packed bytes at {chunk.stored_at} are damaged ({reason}); run "
            "`shardb fsck` to see which steps it hits",
            path=self._path,
        )
