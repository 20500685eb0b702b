"""What a stage may have to know of a micro-batch beside what the stage before it gives.

Owns that record. Knows nothing of rows or steps. Invariant: it is the same on the way forward and
when a stage is computed again, so that both give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """drop_key: what dropout follows from; None where nothing is dropped."""

    drop_key: str | None = None

    def drop_seed(self, stage: str, module: str) -> int | None:
        """Give the seed of one module's dropout, 63 bits; None where nothing is dropped."""
        if self.drop_key is None:
            return None
        return xxhash.xxh3_64_intdigest(f"{self.drop_key}/{stage}/{module}".encode()) >> 1


def drop_keys(rate: float, *, seed: int, step: int, count: int) -> list[str | None]:
    """Give the keys of a step's micro-batches; none where `rate` is 0."""
    return [f"{seed}/{step}/{index}" if rate else None for index in range(count)]
