"""Byte planes: the first bytes of all items, then the second ones, and so on.

The high bytes of floating-point numbers (sign, exponent) are alike and compress; the low ones are
noise and do not. Apart, each is stored in the way that suits it. Owns the way there and back, and
the difference to another version of the same numbers. Knows nothing of files or compression.

Arrays are uint8; a chunk has whole items of 1, 2, 4 or 8 bytes, little-endian.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardb.buffers import Bytes
from shardb.layout import ITEM_BITS

ITEM_BYTES_ALLOWED = (1, 2, 4, 8)
BLOCK_BYTES = 128 << 10
Signed = NDArray[Any]


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


def difference(chunk: Bytes, base: Bytes, item_bytes: int) -> Bytes:
    """How far each item is from the same one of another version.

    Items are taken as whole numbers in the order of the floating-point numbers they may be (see
    `_ordered`), and their distance is folded: 0, -1, 1, -2 become 0, 1, 2, 3, so that small ones
    have high planes of zeros. Single bytes have their bits compared instead.
    """
    if item_bytes == 1:
        return np.bitwise_xor(chunk, base)
    out = np.empty_like(chunk)
    for items, others, folded in _blocks(item_bytes, chunk, base, out):
        distance = _ordered(items)
        distance -= _ordered(others)
        sign = distance >> (8 * item_bytes - 1)
        distance <<= 1
        np.bitwise_xor(distance, sign, out=folded)
    return out


def restored(differences: Bytes, base: Bytes, item_bytes: int) -> Bytes:
    """The chunk that `difference` was made of."""
    if item_bytes == 1:
        return np.bitwise_xor(differences, base)
    out = np.empty_like(differences)
    for folded, others, items in _blocks(item_bytes, differences, base, out):
        distance = (folded.view(f"<u{item_bytes}") >> 1).view(f"<i{item_bytes}")
        distance ^= -(folded & 1)
        distance += _ordered(others)
        items[:] = _ordered(distance)
    return out


def _blocks(item_bytes: int, *arrays: Bytes) -> Iterator[tuple[Signed, ...]]:
    """The same items of several arrays as signed numbers, in pieces that a core's cache holds."""
    whole = [array.view(f"<i{item_bytes}") for array in arrays]
    step = BLOCK_BYTES // item_bytes
    for start in range(0, len(whole[0]), step):
        yield tuple(array[start : start + step] for array in whole)


def _ordered(items: Signed) -> Signed:
    """Bit patterns of floating-point numbers as whole numbers in the same order; its own inverse.

    A positive number's bits are in order already; those of a negative one, but for the sign, are
    turned over. Every pattern has one of its own: -0.0 and NaNs of any kind come back as they were.
    """
    bits = 8 * items.dtype.itemsize - 1
    flipped = items >> bits
    flipped &= (1 << bits) - 1
    flipped ^= items
    return flipped
