"""Byte planes: the first bytes of all items, then the second ones, and so on.

The high bytes of floating-point numbers (sign, exponent) are alike and compress; the low ones are
noise and do not. Apart, each is stored in the way that suits it. Owns the way there and back, and
the difference to another version of the same bytes. Knows nothing of files or compression.

Arrays are uint8; a chunk has whole items of 1, 2, 4 or 8 bytes, little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardb.buffers import Bytes
from shardb.layout import ITEM_BITS

ITEM_BYTES_ALLOWED = (1, 2, 4, 8)


def item_bytes_of(dtype: str) -> int:
    """Bytes of one number of a data type; a complex one is two numbers."""
    return 4 if dtype == "C64" else ITEM_BITS[dtype] // 8


def split(chunk: Bytes, item_bytes: int) -> list[Bytes]:
    """The planes of a chunk, lowest byte first, each contiguous."""
    assert len(chunk) % item_bytes == 0
    return [np.ascontiguousarray(chunk[plane::item_bytes]) for plane in range(item_bytes)]


def join(planes: Sequence[Bytes], out: Bytes) -> None:
    """Write the items that planes were split from into `out`."""
    assert sum(map(len, planes)) == len(out)
    for position, plane in enumerate(planes):
        out[position :: len(planes)] = plane


def difference(chunk: Bytes, base: Bytes) -> Bytes:
    """The bits in which two versions differ. The same again, of it and the base, is the chunk."""
    return np.bitwise_xor(chunk, base)
