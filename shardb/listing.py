"""Many things in a sentence: a few by name, the rest by number.

Owns that form alone. Invariant: what is left out is counted, so nobody takes a part for the whole.
"""

from __future__ import annotations

from collections.abc import Iterable


def listed(items: Iterable[object], *, most: int = 8) -> str:
    """Name the first ones: `a, b and 3 more`; empty where there is nothing."""
    texts = [str(item) for item in items]
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def last_listed(items: Iterable[object], *, most: int = 8) -> str:
    """Name the last ones, in order: `x, y and 3 before them`; empty where there is nothing."""
    texts = [str(item) for item in items]
    more = f" and {len(texts) - most:,} before them" if len(texts) > most else ""
    return ", ".join(texts[-most:]) + more
