"""Stop strings in a text that arrives in pieces.

Owns what is held back. Knows nothing of tokens. Invariants: whatever the pieces, the released text
is the same; no part of a stop string that ends the text is ever released; what was held back is
released once, by the next piece or by `finish`.

Of several stop strings the one that is complete first ends the text, which makes the end
independent of where the pieces were cut.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back what may become a stop string."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Take in a piece, give what may be said; after a hit nothing is said any more."""
        if self.hit is not None:
            return ""
        self._held += text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if found:
            end, start, self.hit = min(found)
            said = self._held[: end if self._include else start]
            self._held = ""
            return said
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        said = self._held[: len(self._held) - keep]
        self._held = self._held[len(said) :]
        return said

    def finish(self) -> str:
        """Give what was held back and became no stop string."""
        said, self._held = self._held, ""
        return said


def _overlap(text: str, stop: str) -> int:
    """Give the length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
