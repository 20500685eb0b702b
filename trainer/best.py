"""The lowest validation loss of a run so far, and which losses may be compared.

Owns that record and its rule: two losses are compared only where they were measured on the same
rows. It travels in the state of each commit, so a resumed or branched run goes on with it. Knows
nothing of stores or snapshots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The lowest loss, its step, and `measure`: on what it was taken."""

    loss: float
    step: int
    measure: str

    def to_json(self) -> dict[str, Any]:
        """Give a plain dictionary, for the state of a commit."""
        return {"loss": self.loss, "step": self.step, "measure": self.measure}

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> Best | None:
        """Read what `to_json` gave; None where nothing was validated yet."""
        return None if values is None else cls(**values)

    def is_beaten_by(self, loss: float, measure: str) -> bool:
        """Say whether a loss is the new best; one of another measure always is."""
        return loss < self.loss or measure != self.measure


def best_after(best: Best | None, *, loss: float, step: int, measure: str) -> Best | None:
    """Take a new loss in; one that is not a number is never a best."""
    if not math.isfinite(loss) or (best is not None and not best.is_beaten_by(loss, measure)):
        return best
    return Best(loss=loss, step=step, measure=measure)
