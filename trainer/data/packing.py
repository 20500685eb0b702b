"""Ids become rows: one stream of documents, cut into rows of L + 1, in files of bounded size.

Owns the writing of token files. Neighbouring rows share one id (row r holds ids [r * L, r * L + L]
of the stream), so every id but the first is a target exactly once; what fills no row at the end is
dropped and counted. It refuses an id that its integer type or the vocabulary cannot hold: a wrapped
id is a wrong word that nothing later would notice. It does not know text.

Shapes: L = seq_len; a file is [rows, L + 1], little-endian, C order.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from trainer.data.manifest import FileEntry, SplitEntry, file_digest
from trainer.data.masked import ids_of
from trainer.data.npy_header import header_bytes
from trainer.errors import InputError

UINT16_IDS: Final = 1 << 16
ROWS_PER_FILE: Final = 1 << 16


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest type of token files that holds ids below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= UINT16_IDS else np.dtype("<u4")


class RowFileWriter:
    """One token file while it is written; nothing but whole rows is ever in it."""

    def __init__(self, path: Path, width: int, dtype: np.dtype[Any]) -> None:
        self.path = path
        self.rows = 0
        self._width = width
        self._dtype = dtype
        self._largest_id = 0
        self._file: IO[bytes] = path.open("wb")
        self._file.write(header_bytes(rows=0, width=width, dtype=dtype))

    def write(self, rows: npt.NDArray[Any]) -> None:
        """Append rows [R, L + 1]; InputError for an id that the file's type cannot hold."""
        assert rows.ndim == 2, "rows are 2-D"
        assert rows.shape[1] == self._width, "all rows of a file have its width"
        least, largest = int(rows.min()), int(rows.max())
        limit = np.iinfo(self._dtype).max
        if least < 0 or largest > limit:
            raise InputError(
                f"{self.path}: token id {largest if largest > limit else least:,} does not fit "
                f"into {self._dtype.name} (0 to {limit:,}); write a wider type"
            )
        self._file.write(np.ascontiguousarray(rows, dtype=self._dtype).data)
        self._largest_id = max(self._largest_id, int(ids_of(rows).max()))
        self.rows += len(rows)

    def finish(self) -> FileEntry:
        """Write the final header, sync, and return what the manifest says of the file."""
        self._file.seek(0)
        self._file.write(header_bytes(rows=self.rows, width=self._width, dtype=self._dtype))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileEntry(
            name=self.path.name,
            rows=self.rows,
            bytes=self.path.stat().st_size,
            largest_id=self._largest_id,
            xxh3_128=file_digest(self.path),
        )

    def close(self) -> None:
        """Close the file as it is, after a failure."""
        self._file.close()


class RowPacker:
    """One split: takes the ids of its documents in order, writes its files."""

    def __init__(
        self,
        folder: Path,
        *,
        seq_len: int,
        dtype: np.dtype[Any],
        vocab_size: int,
        rows_per_file: int = ROWS_PER_FILE,
    ) -> None:
        folder.mkdir()
        self.documents = 0
        self.text_bytes = 0
        self._folder = folder
        self._seq_len = seq_len
        self._dtype = dtype
        self._rows_per_file = rows_per_file
        self._id_counts = np.zeros(vocab_size, dtype=np.int64)
        self._pending = np.zeros(0, dtype=np.uint32)
        self._files: list[FileEntry] = []
        self._writer: RowFileWriter | None = None

    @property
    def tokens(self) -> int:
        return int(self._id_counts.sum())

    def add(self, ids: npt.NDArray[np.uint32]) -> None:
        """Take in the next ids of the stream and write the rows that are full."""
        if not len(ids):
            return
        self._count(ids)
        stream = np.concatenate([self._pending, ids])
        row_count = (len(stream) - 1) // self._seq_len
        if row_count > 0:
            windows = np.lib.stride_tricks.sliding_window_view(stream, self._seq_len + 1)
            self._write(windows[:: self._seq_len])
            stream = stream[row_count * self._seq_len :].copy()
        self._pending = stream

    def finish(self, unknown_id: int | None) -> SplitEntry:
        """Close the last file and return what the manifest says of the split."""
        if self._writer is not None:
            self._files.append(self._writer.finish())
            self._writer = None
        counts = self._id_counts
        rows = sum(entry.rows for entry in self._files)
        return SplitEntry(
            documents=self.documents,
            text_bytes=self.text_bytes,
            tokens=self.tokens,
            tokens_dropped=self.dropped_tokens(rows),
            rows=rows,
            largest_id=max((entry.largest_id for entry in self._files), default=0),
            distinct_ids=int(np.count_nonzero(counts)),
            unknown_tokens=int(counts[unknown_id]) if unknown_id is not None else 0,
            unigram_entropy_nats=unigram_entropy(counts),
            files=tuple(self._files),
        )

    def dropped_tokens(self, rows: int) -> int:
        """Give the tokens that are in no row: the end of the stream."""
        return self.tokens - (rows * self._seq_len + 1 if rows else 0)

    def close(self) -> None:
        """Close the file in work as it is, after a failure."""
        if self._writer is not None:
            self._writer.close()

    def _count(self, ids: npt.NDArray[np.uint32]) -> None:
        largest = int(ids.max())
        if largest >= len(self._id_counts):
            raise InputError(
                f"{self._folder}: token id {largest:,} is not below the vocabulary of "
                f"{len(self._id_counts):,}; the tokenizer is not the one that was announced"
            )
        self._id_counts += np.bincount(ids, minlength=len(self._id_counts))

    def _write(self, rows: npt.NDArray[np.uint32]) -> None:
        while len(rows):
            if self._writer is None:
                path = self._folder / f"rows-{len(self._files):05d}.npy"
                self._writer = RowFileWriter(path, self._seq_len + 1, self._dtype)
            room = self._rows_per_file - self._writer.rows
            self._writer.write(rows[:room])
            rows = rows[room:]
            if self._writer.rows == self._rows_per_file:
                self._files.append(self._writer.finish())
                self._writer = None


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Return the entropy of the ids' frequencies in nats, to four places.

    Four places are the same on every machine; the last bits of a sum of logarithms are not.
    """
    seen = counts[counts > 0].astype(np.float64)
    if not len(seen):
        return 0.0
    shares = seen / seen.sum()
    return round(abs(float(-(shares * np.log(shares)).sum())), 4)
