"""How commands print: JSON that every parser reads, tables, sizes and times for people.

Owns these forms alone; knows nothing of stores.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

STEPS_SHOWN_MAX = 12


def print_json(value: Any) -> None:
    """Print one JSON document. What JSON cannot hold comes out as null (numbers) or hex (bytes)."""
    print(json.dumps(plain(value), indent=2, allow_nan=False), flush=True)


def compact_json(value: Any) -> str:
    """A value on one line, as JSON; a text as it is."""
    return value if isinstance(value, str) else json.dumps(plain(value), allow_nan=False)


def plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    return value


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Print aligned columns, the first `left` of them to the left and the last one open-ended."""
    widths = [
        max(len(heading), *(len(row[column]) for row in rows), 0)
        for column, heading in enumerate(headings)
    ]
    for row in (headings, *rows):
        cells = [
            cell.ljust(width) if column < left or column == len(headings) - 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def warn(message: str) -> None:
    """Say something that needs no action now, on standard error."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def in_bytes(count: float) -> str:
    """A size for people: three digits and a decimal unit."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB" if size < 1000 else f"{size:,.0f} TB"


def in_local_time(seconds: float) -> str:
    """A moment for people, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def number(value: Any, digits: str = ".4f") -> str:
    """A measured number for people; empty where nothing was measured."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return f"{value:,}" if isinstance(value, int) else format(value, digits)


def steps_text(steps: Sequence[int]) -> str:
    """Steps as people name them: each of a few, or how many there are."""
    if len(steps) > STEPS_SHOWN_MAX:
        return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
