"""When a step is accepted, and what is tried next when it is not.

Owns the rule and its numbers. Knows nothing of engines or transactions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardPolicy:
    """Settings of the guard; `on_exhaust` is `accept` or `skip`.

    Attempt i uses the i-th learning rate and norm scale; the last of each list holds for the rest.
    """

    attempts_max: int
    tolerance: float
    tolerance_ratio: float
    learning_rate_scales: tuple[float, ...]
    grad_norm_scales: tuple[float, ...]
    on_exhaust: str

    def accepts(self, loss_before: float, loss_after: float) -> bool:
        """Say whether the batch's loss rose by no more than the larger of the two tolerances."""
        allowed = max(self.tolerance, self.tolerance_ratio * loss_before)
        return math.isfinite(loss_after) and loss_after <= loss_before + allowed

    def scales(self, attempt: int) -> tuple[float, float]:
        """Give the factors of learning rate and maximum norm for an attempt, counted from 0."""
        rates, norms = self.learning_rate_scales, self.grad_norm_scales
        return rates[min(attempt, len(rates) - 1)], norms[min(attempt, len(norms) - 1)]
