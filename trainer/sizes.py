"""Sizes as people write and read them: `8GiB`, `500 MB`, a count of bytes.

Knows nothing of what the sizes are for.
"""

from __future__ import annotations

import re

from trainer.errors import InputError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)


def size_of(text: str, flag: str) -> int:
    """Give the bytes that a text means; InputError names the flag that it was given to."""
    match = SIZE.match(text)
    if match is None or (match[3] and not match[2]) or float(match[1]) <= 0:
        raise InputError(f"{flag} {text!r}: give a size, such as 8GiB or 500MB")
    units = BINARY_UNITS if match[3] else UNITS
    return int(float(match[1]) * units[match[2].lower()])


def in_bytes(count: int) -> str:
    """Give a size for people: `1.50 GB`, in powers of ten as disks are sold."""
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"
