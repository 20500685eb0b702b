"""Tokens that are read and not learned, and those that begin a record: how a row marks them.

Owns the mark, which is the highest bit of a 32-bit id: no vocabulary reaches it, one array holds
both, and whoever does not know the mark refuses such an id as outside the vocabulary. A set whose
rows have marks says so in its manifest. The next bit is the mark of a record's first token where
records that share a row must not see each other; that token is never learned, so it has both.
Knows nothing of files.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

MASKED: Final = 1 << 31
BEGINS: Final = 1 << 30


def with_marks(ids: npt.NDArray[Any], counts: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """Give ids [N] with a mark wherever `counts` is false."""
    return np.where(counts, ids, ids | np.uint32(MASKED)).astype(np.uint32)


def ids_of(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Give the ids without marks; what is negative stays as it is."""
    return np.where(rows >= MASKED, rows & (BEGINS - 1), rows) if _may_have(rows) else rows


def with_beginning(rows: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Give the marked tokens of one record [N] with the mark of its first one."""
    found = rows.copy()
    found[:1] |= np.uint32(MASKED | BEGINS)
    return found


def begins_record(rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Say of each token whether a record begins with it that is kept apart."""
    if not _may_have(rows):
        return np.zeros(rows.shape, dtype=np.bool_)
    found: npt.NDArray[np.bool_] = (rows >= MASKED) & ((rows & BEGINS) != 0)
    return found


def is_masked(rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Say of each token whether it is marked."""
    found: npt.NDArray[np.bool_] = rows >= MASKED
    return found


def _may_have(rows: npt.NDArray[Any]) -> bool:
    return rows.dtype.itemsize >= 4 and bool(rows.size) and int(rows.max()) >= MASKED
