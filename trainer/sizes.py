"""Sizes as people write and read them: `8GiB`, `500 MB`, a count of bytes.

Owns the units of every command: those with an `i` are powers of 1024, the others of 1000. Knows
nothing of what the sizes are for.
"""

from __future__ import annotations

import re
from decimal import Decimal

from trainer.errors import InputError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
# What a file or an address can count.
SIZE_MAX = 2**63 - 1


def size_of(text: str, flag: str, least: int = 1) -> int:
    """Give the bytes that a text means; InputError names the flag that it was given to."""
    match = SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise InputError(f"{flag} is {_shown(text)}: give a size, such as 8GiB, 500MB or 4096")
    units = BINARY_UNITS if match[3] else UNITS
    size = int(Decimal(match[1]) * units[match[2].lower()])
    if not least <= size <= SIZE_MAX:
        raise InputError(
            f"{flag} is {_shown(text)}: give a size from {least:,} bytes to {in_bytes(SIZE_MAX)}"
        )
    return size


def in_bytes(count: float) -> str:
    """Give a size for people: `1.50 GB`, in powers of ten as disks are sold."""
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:,.2f} TB"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "…")
