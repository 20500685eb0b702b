"""Sizes on a command line: `5GB`, `200MiB`, `4096`.

Owns the units: those with an `i` are powers of 1024, the others of 1000, as transformers has them.
"""

from __future__ import annotations

import re

from trainer.errors import InputError

UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def parse_bytes(text: str, flag: str) -> int:
    """Read a size; InputError names the flag."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = match[2].upper() if match else ""
    size = int(float(match[1]) * UNITS[unit]) if match and unit in UNITS else 0
    if size < 1:
        raise InputError(f"{flag} is {text!r}: give a size such as 5GB, 200MiB or 4096")
    return size


def in_bytes(count: float) -> str:
    """Give a size for people, in powers of ten as disks are sold."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
