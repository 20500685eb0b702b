"""Tokens that are read and not learned: how a row marks them.

Owns the mark, which is the highest bit of a 32-bit id: no vocabulary reaches it, one array holds
both, and whoever does not know the mark refuses such an id as outside the vocabulary. A set whose
rows have marks says so in its manifest. Knows nothing of files.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

MASKED: Final = 1 << 31


def with_marks(ids: npt.NDArray[Any], counts: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """Give ids [N] with a mark wherever `counts` is false."""
    return np.where(counts, ids, ids | np.uint32(MASKED)).astype(np.uint32)


def ids_of(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Give the ids without marks; what is negative stays as it is."""
    return np.where(rows >= MASKED, rows - MASKED, rows) if _may_have(rows) else rows


def is_masked(rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Say of each token whether it is marked."""
    found: npt.NDArray[np.bool_] = rows >= MASKED
    return found


def _may_have(rows: npt.NDArray[Any]) -> bool:
    return rows.dtype.itemsize >= 4 and bool(rows.size) and int(rows.max()) >= MASKED
