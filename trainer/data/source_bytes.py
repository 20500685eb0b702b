"""The bytes of a text file: opened, unpacked if packed, with a digest of what was read.

Owns the zstd frame handling and the refusal of what is no text file. It knows nothing of
characters or documents (`readers`). Memory is bounded by a block, whatever the file's size.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

import xxhash
import zstandard

from trainer.errors import InputError

BLOCK_BYTES: Final = 1 << 18
# Packed bytes can unpack to some ten thousand times their size, so few are unpacked at a time.
_PACKED_BYTES = 1 << 10
_WINDOW_BYTES_MAX = 1 << 27

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_FOREIGN_FORMATS: Final = {
    b"\x1f\x8b": "gzip data; unpack it with gunzip",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"\xfd7zXZ\x00": "xz data; unpack it with unxz",
    b"BZh": "bzip2 data; unpack it with bunzip2",
    b"PAR1": "a Parquet file; write its text column as .jsonl",
    b"\x93NUMPY": "a numpy array; token rows need no preparing",
    b"%PDF": "a PDF; extract its text",
    b"\xff\xfe": "UTF-16 text; convert it with iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16 text; convert it with iconv -f UTF-16 -t UTF-8",
}


class SourceBytes:
    """One pass over one file. `digest` and `byte_count` are of the bytes as stored."""

    def __init__(self, path: Path, on_bytes: Callable[[int], None]) -> None:
        self.path = path
        self.byte_count = 0
        self.is_packed = False
        self._on_bytes = on_bytes
        self._hash = xxhash.xxh3_128()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def blocks(self) -> Iterator[bytes]:
        """Yield the text's bytes; InputError for what cannot be opened, read or unpacked."""
        try:
            with self.path.open("rb") as file:
                head = file.read(8)
                file.seek(0)
                self._refuse_foreign(head)
                self.is_packed = head.startswith(_ZSTD_MAGIC)
                if self.is_packed:
                    yield from gathered(self._unpacked(file), BLOCK_BYTES)
                else:
                    yield from self._raw(file, BLOCK_BYTES)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror})") from error

    def _refuse_foreign(self, head: bytes) -> None:
        for magic, what in _FOREIGN_FORMATS.items():
            if head.startswith(magic):
                raise InputError(f"{self.path}: this is {what} first")
        if self.path.suffix == ".zst" and not head.startswith(_ZSTD_MAGIC):
            raise InputError(f"{self.path}: not zstd data, whatever its name says; rename it")

    def _raw(self, file: IO[bytes], size: int) -> Iterator[bytes]:
        while block := file.read(size):
            self._hash.update(block)
            self.byte_count += len(block)
            self._on_bytes(len(block))
            yield block

    def _unpacked(self, file: IO[bytes]) -> Iterator[bytes]:
        """Yield the content of every frame; a missing end is an error, not the end of the text."""
        unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
        frame, is_inside = unpacker.decompressobj(), False
        for block in self._raw(file, _PACKED_BYTES):
            rest = block
            while rest:
                try:
                    text = frame.decompress(rest)
                except zstandard.ZstdError as error:
                    raise InputError(
                        f"{self.path}: damaged zstd data before byte {self.byte_count:,} "
                        f"({error}); get the file again"
                    ) from error
                is_inside, rest = not frame.eof, frame.unused_data
                if text:
                    yield text
                if frame.eof:
                    frame = unpacker.decompressobj()
        if is_inside:
            raise InputError(
                f"{self.path}: the zstd data is cut off at byte {self.byte_count:,}; "
                "get the file again"
            )


def gathered(blocks: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Join blocks until they have at least `size` bytes."""
    parts: list[bytes] = []
    length = 0
    for block in blocks:
        parts.append(block)
        length += len(block)
        if length >= size:
            yield b"".join(parts)
            parts, length = [], 0
    if parts:
        yield b"".join(parts)


def refuse_unreadable(path: Path) -> None:
    """Refuse what is no regular file with something in it, before any work is done."""
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    if stat.S_ISDIR(status.st_mode):
        raise InputError(f"{path}: a directory; give the text files in it")
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path}: a pipe or device can be read only once; give a regular file")
    if status.st_size == 0:
        raise InputError(f"{path}: the file is empty")
    if not os.access(path, os.R_OK):
        raise InputError(f"{path}: cannot be read (Permission denied)")
