"""Encoded records become rows whose learned tokens are marked.

Owns how records share rows. No record is cut to fill one: by itself each begins a row and is padded
to its end, so that nothing attends across records; packed, as many whole records as fit follow each
other in a row, each marked where it begins, so that training keeps them apart, or unmarked, and
attention reaches back over them. What is longer than a row loses its end, which
is counted. Padding and the first token of a record are never learned.

Shapes: L = seq_len; a row has L + 1 tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.data.conversations import Encoded
from trainer.data.masked import with_beginning, with_marks
from trainer.data.packing import RowPacker


class RecordPacker(RowPacker):
    """One split of records."""

    def __init__(
        self,
        folder: Path,
        *,
        seq_len: int,
        vocab_size: int,
        end_id: int,
        packs: bool,
        apart: bool,
        rows_per_file: int,
    ) -> None:
        super().__init__(
            folder,
            seq_len=seq_len,
            dtype=np.dtype("<u4"),
            vocab_size=vocab_size,
            rows_per_file=rows_per_file,
        )
        self.learned_tokens = 0
        self.unlearned_records = 0
        self._width = seq_len + 1
        self._end_id = end_id
        self._packs = packs
        self._apart = apart
        self._row: list[npt.NDArray[np.uint32]] = []
        self._dropped = 0

    def add_record(self, record: Encoded) -> None:
        """Take in a record; leave out, and count, one of which nothing is learned within a row."""
        ids, counts = record.ids[: self._width], record.counts[: self._width].copy()
        counts[:1] = False  # it is no target: nothing comes before it
        if not counts.any():
            self.unlearned_records += 1
            return
        self._count(record.ids)
        self._dropped += len(record.ids) - len(ids)
        self.learned_tokens += int(counts.sum())
        if self._row and (not self._packs or self._filled + len(ids) > self._width):
            self._end_row()
        marked = with_marks(ids, counts)
        self._row.append(with_beginning(marked) if self._apart else marked)

    def flush(self) -> None:
        """Write the row in work."""
        if self._row:
            self._end_row()

    @property
    def _filled(self) -> int:
        return sum(len(part) for part in self._row)

    def _end_row(self) -> None:
        padding = np.full(self._width - self._filled, self._end_id, dtype=np.uint32)
        marked = with_marks(padding, np.zeros(len(padding), dtype=np.bool_))
        if self._apart:
            marked = with_beginning(marked)
        self._write(np.concatenate([*self._row, marked])[None])
        self._row = []

    def dropped_tokens(self, rows: int) -> int:
        """Give the tokens that are in no row."""
        return self._dropped
