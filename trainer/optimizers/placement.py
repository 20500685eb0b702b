"""Which stages' updates run on the processor, and which where the step computes.

Owns the choice by measured speed and the stages of a split. A processor and a GPU round a fused
update otherwise in the last bits, so the stages are part of a run's recipe: whoever goes on with
the run updates each shard where it always was. Knows nothing of how an update runs. Invariant: a
split follows from sizes and one share alone, and takes turns along the order of updates, so that
both sides have work all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A split has to be worth its second copy of code and caches.
WORTH = 1.05
# Beside copies and digests, which use the same memory, a processor updates so much slower.
CONTENDED = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRates:
    """Parameters a second: on the processor, and where the step computes, its copies included."""

    host: float
    device: float

    @property
    def host_share(self) -> float:
        """Give the part of the parameters with which both sides end together."""
        return self.host / (self.host + self.device)


def chosen_place(rates: UpdateRates) -> str:
    """Give `gpu`, `cpu` or `split`: the fastest, a split only where it gains."""
    alone = "cpu" if rates.host > rates.device else "gpu"
    return "split" if rates.host + rates.device > WORTH * max(rates.host, rates.device) else alone


def host_share_beside_link(host: float, link_bytes: float) -> float:
    """Give the part of the parameters with which the processor and the link end together.

    host: parameters a second; link_bytes: a second, each way. What is updated on the device costs
    16 bytes in (parameters for both passes, both moments), what is not 8 of them.
    """
    return min(1.0, (16 / link_bytes) / (CONTENDED / host + 8 / link_bytes))


def host_stages(order: Sequence[tuple[str, int]], host_share: float) -> tuple[str, ...]:
    """Give the stages that the processor updates, of stages and sizes in the order of updates."""
    chosen: list[str] = []
    seen = taken = 0
    for name, size in order:
        seen += size
        # Taken where that leaves less of a difference to the share than leaving it would.
        if taken + size / 2 <= host_share * seen:
            chosen.append(name)
            taken += size
    return tuple(chosen)
