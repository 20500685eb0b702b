"""Token rows on disk: opened lazily, checked before use, read one row at a time.

Owns the reading of a set of token files: `.npy` files of [rows, seq_len + 1], or raw `.bin` files
cut into such rows. It does not know in which order rows are wanted (`order`) nor how they are made.

Invariants: every header is checked when the set is opened; every id is checked when it is read; a
file that changes while it is in use is refused, never read on. Rows are read with `pread` through a
bounded number of descriptors, because a mapped file that shrinks kills the process with SIGBUS.

Shapes: L = seq_len; a row has L + 1 ids: inputs row[:-1], targets row[1:].
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from trainer.data.manifest import Manifest, SplitEntry, file_digest, find_manifest
from trainer.data.masked import ids_of
from trainer.data.row_file import (
    RowFile,
    changed_error,
    check_ids,
    file_names,
    identity_of,
    npy_file,
    raw_file,
    refuse_missing,
    refuse_unequal_widths,
)
from trainer.errors import InputError

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

Ids: TypeAlias = npt.NDArray[np.int64]

OPEN_FILES_MAX: Final = 32
_SCAN_BYTES = 4 << 20
_UINT16_IDS = 1 << 16


class TokenRows:
    """A set of token files, in the order of their names, seen as one sequence of rows."""

    def __init__(
        self,
        directory: Path,
        files: tuple[RowFile, ...],
        vocab_size: int | None,
        described: tuple[Manifest, SplitEntry] | None = None,
        *,
        is_masked: bool = False,
    ) -> None:
        self.directory = directory
        self.files = files
        self.vocab_size = vocab_size
        self.manifest = described[0] if described else None
        self.split = described[1] if described else None
        self.is_masked = is_masked or (described is not None and described[0].masked)
        self.is_apart = described is not None and described[0].apart
        self.row_counts = tuple(file.rows for file in files)
        self.row_count = sum(self.row_counts)
        self.seq_len = files[0].width - 1
        self._descriptors: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def open(cls, directory: str | Path, vocab_size: int | None = None) -> Self:
        """Open every `.npy` file of a folder; InputError names the file, the reason, the remedy.

        With `vocab_size`, a set whose manifest tells of an id outside of it is refused at once.
        """
        folder = Path(directory)
        names = file_names(folder, ".npy")
        described = find_manifest(folder.absolute())
        if described:
            refuse_missing(folder, names, described[1])
        files = tuple(npy_file(folder / name) for name in names)
        refuse_unequal_widths(files)
        rows = cls(folder, files, vocab_size, described)
        if vocab_size is not None and rows.is_described():
            rows._refuse_described_ids(vocab_size)
        return rows

    @classmethod
    def open_raw(
        cls, path: str | Path, *, dtype: str, seq_len: int, vocab_size: int | None = None
    ) -> Self:
        """Open headerless `.bin` token files (one file, or a folder of them).

        Such a file does not say what it holds, so `dtype` ("uint16" or "uint32", little-endian)
        and `seq_len` are given. Row r holds ids [r * L, r * L + L + 1): rows share one id, so every
        id but the first is a target exactly once. What fills no row at the end is not read.
        """
        if dtype not in ("uint16", "uint32"):
            raise InputError(f"dtype {dtype!r} of raw token files: give uint16 or uint32")
        if seq_len < 1:
            raise InputError(f"seq_len {seq_len} is below 1: give the length of a row in tokens")
        source = Path(path)
        names = [source] if source.is_file() else [source / n for n in file_names(source, ".bin")]
        element = np.dtype(dtype).newbyteorder("<")
        files = tuple(raw_file(name, element, seq_len) for name in names)
        return cls(source if source.is_dir() else source.parent, files, vocab_size)

    def row(self, index: int) -> Ids:
        """Return row `index` of the whole set, in file order: int64 [L + 1], ids checked."""
        for number, count in enumerate(self.row_counts):
            if index < count:
                return self.row_of(number, index)
            index -= count
        raise IndexError(f"row {index + self.row_count} of {self.row_count}")

    def row_of(self, file: int, row: int) -> Ids:
        """Return one row of one file: int64 [L + 1], ids checked against `vocab_size`.

        Where the set has marks, they are kept: see `trainer.data.masked`.
        """
        source = self.files[file]
        if not 0 <= row < source.rows:
            raise IndexError(f"row {row} of {source.rows} in {source.path}")
        data = self._read(file, source.offset(row), source.width * source.dtype.itemsize)
        ids = np.frombuffer(data, dtype=source.dtype).astype(np.int64)
        self._check(ids[None], source, row, self.vocab_size)
        return ids

    def largest_id(self, progress: Progress | None = None) -> int:
        """Return the largest id of the set: from a manifest that matches, else by reading it all.

        Raises InputError at the first id that is negative or not below `vocab_size`.
        """
        if self.split is not None and self.is_described():
            return self.split.largest_id
        total, done, largest = sum(file.file_bytes for file in self.files), 0, 0
        for number, file in enumerate(self.files):
            for block_largest, block_end in self._scan(number, self.vocab_size):
                largest = max(largest, block_largest)
                if progress:
                    progress(done + block_end, total)
            done += file.file_bytes
        return largest

    def digest(self, progress: Progress | None = None) -> str:
        """Return one digest of names, shapes and contents of all files.

        File digests come from a manifest whose files have the sizes it tells, else from reading
        every byte, so the answer does not depend on whether the manifest is there.
        """
        known = {}
        if self.split is not None and self.is_described():
            known = {entry.name: entry.xxh3_128 for entry in self.split.files}
        total = sum(file.file_bytes for file in self.files)
        digest, done = xxhash.xxh3_128(), 0
        for file in self.files:
            content = known.get(file.path.name) or file_digest(file.path)
            digest.update(
                f"{file.path.name}\0{file.rows}x{file.width}/{file.stride}\0"
                f"{file.dtype.str}\0{content}\n".encode()
            )
            done += file.file_bytes
            if progress:
                progress(done, total)
        return digest.hexdigest()

    def is_described(self) -> bool:
        """Tell whether a manifest lists exactly these files, with these rows and sizes."""
        if self.split is None:
            return False
        listed = [(entry.name, entry.rows, entry.bytes) for entry in self.split.files]
        return sorted(listed) == [(f.path.name, f.rows, f.file_bytes) for f in self.files]

    def close(self) -> None:
        """Close every descriptor; reading again opens them again."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()

    def _read(self, file: int, offset: int, size: int) -> bytes:
        source = self.files[file]
        with self._lock:
            try:
                data = os.pread(self._descriptor(file), size, offset)
            except OSError as error:
                raise InputError(
                    f"{source.path}: byte {offset:,} cannot be read ({error.strerror}); "
                    "check the disk"
                ) from error
        if len(data) != size:
            raise changed_error(source)
        return data

    def _descriptor(self, file: int) -> int:
        """Return an open descriptor, the least recently used one closed when there are many."""
        if file in self._descriptors:
            self._descriptors.move_to_end(file)
            return self._descriptors[file]
        source = self.files[file]
        descriptor = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
        if identity_of(os.fstat(descriptor)) != source.identity:
            os.close(descriptor)
            raise changed_error(source)
        self._descriptors[file] = descriptor
        if len(self._descriptors) > OPEN_FILES_MAX:
            os.close(self._descriptors.popitem(last=False)[1])
        return descriptor

    def _scan(self, file: int, vocab_size: int | None) -> Iterator[tuple[int, int]]:
        """Yield (largest id, end offset) of every block of one file; refuse the first bad id."""
        source = self.files[file]
        block_rows = max(1, _SCAN_BYTES // (source.width * source.dtype.itemsize))
        for first in range(0, source.rows, block_rows):
            count = min(block_rows, source.rows - first)
            length = ((count - 1) * source.stride + source.width) * source.dtype.itemsize
            flat = np.frombuffer(self._read(file, source.offset(first), length), source.dtype)
            windows = np.lib.stride_tricks.sliding_window_view(flat, source.width)
            rows = windows[:: source.stride]
            self._check(rows, source, first, vocab_size)
            largest = int((ids_of(flat) if self.is_masked else flat).max())
            yield largest, source.offset(first) + length

    def _check(
        self, rows: npt.NDArray[Any], source: RowFile, first_row: int, vocab_size: int | None
    ) -> None:
        """Refuse ids outside of the vocabulary, and marks where the manifest tells of none."""
        plain = ids_of(rows) if self.is_masked else rows
        check_ids(plain, source, first_row=first_row, vocab_size=vocab_size)

    def _refuse_described_ids(self, vocab_size: int) -> None:
        assert self.split is not None, "called for described sets only"
        largest_by_name = {entry.name: entry.largest_id for entry in self.split.files}
        for number, file in enumerate(self.files):
            if largest_by_name[file.path.name] >= vocab_size:
                # Reading the file finds the row and the offset that the message names.
                for _ in self._scan(number, vocab_size):
                    pass


def vocabulary_warning(rows: TokenRows, vocab_size: int) -> str | None:
    """Return a warning when a vocabulary is far larger than its data or what files can hold."""
    is_described = rows.split is not None and rows.is_described()
    if not is_described and vocab_size > _UINT16_IDS and _has_narrow_files(rows):
        return (
            f"{rows.directory}: the files hold 16-bit ids but the model has {vocab_size:,}; ids "
            "from 65,536 on, if its tokenizer gave any, were wrapped when the files were written"
        )
    largest_id = rows.largest_id()
    used = rows.split.distinct_ids if rows.split is not None and is_described else largest_id + 1
    if used * 2 > vocab_size:
        return None
    remedy = "prepare the data with a smaller vocabulary"
    if (largest_id + 1) * 2 <= vocab_size:
        remedy = f"--vocab-size {largest_id + 1} would do, or {remedy}"
    return (
        f"the model has {vocab_size:,} token ids but its training data uses at most {used:,} "
        f"(largest id {largest_id:,}): {100 * (vocab_size - used) / vocab_size:.0f} % of the rows "
        f"of the embedding and the head are never learned; {remedy}"
    )


def _has_narrow_files(rows: TokenRows) -> bool:
    return any(file.dtype.itemsize == 2 and file.dtype.kind == "u" for file in rows.files)
