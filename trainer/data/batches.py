"""Batches of token rows: the micro-batch at a position, and the validation set in order.

Owns the step from positions to arrays. A batch depends on the data, the seed and the position
alone, never on what was read before, so a resumed run reads what an unbroken one would have read.

Shapes: B = batch_rows, L = seq_len; a batch is int64 [B, L + 1].
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from trainer.data.order import RowOrder, orders
from trainer.data.rows import Ids, TokenRows


def batch_at(
    rows: TokenRows,
    *,
    seed: int,
    position: int,
    batch_rows: int,
    shuffle: bool = True,
    row_order: RowOrder = "shuffled",
    shuffle_buffer_size: int = 0,
) -> Ids:
    """Return the batch [B, L + 1] whose first row is the one at `position` (rows consumed so far).

    A batch at the end of an epoch goes on with the next one. Raises InputError for an id outside
    of the vocabulary, with file, row and offset.
    """
    if batch_rows < 1:
        raise ValueError(f"batch_rows is {batch_rows}; a batch has at least one row")
    places = orders(
        seed,
        position,
        batch_rows,
        rows.row_counts,
        shuffle=shuffle,
        row_order=row_order,
        shuffle_buffer_size=shuffle_buffer_size,
    )
    return np.stack([rows.row_of(file, row) for file, row in places])


def validation_batches(
    rows: TokenRows, batch_rows: int, max_batches: int | None = None
) -> Iterator[Ids]:
    """Yield the set in file order, [B, L + 1] each; the last one may have fewer rows."""
    if batch_rows < 1:
        raise ValueError(f"batch_rows is {batch_rows}; a batch has at least one row")
    row_limit = rows.row_count
    if max_batches is not None:
        row_limit = min(row_limit, batch_rows * max_batches)
    for first in range(0, row_limit, batch_rows):
        count = min(batch_rows, row_limit - first)
        yield batch_at(rows, seed=0, position=first, batch_rows=count, shuffle=False)


def batch_digest(batch: Ids) -> str:
    """Return the xxh3-128 of a batch's shape and ids, equal whatever integer type holds them."""
    digest = xxhash.xxh3_128(repr(batch.shape).encode())
    digest.update(np.ascontiguousarray(batch, dtype="<i8").data)
    return digest.hexdigest()
