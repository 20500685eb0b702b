"""How rotary frequencies are stretched for sequences longer than a model was first trained on.

Owns the two published ways and the rules of their numbers; `layers.stretched` applies them. Knows
nothing of tensors. Invariant: a `RopeScaling` that exists can be applied.

Sources: `linear`: Chen et al. 2023, arXiv:2306.15595. `llama3`: the Llama 3.1 reference code. A
frequency whose wave is longer than original length / low factor is divided by the factor, one whose
wave is shorter than original length / high factor stays, and those between are mixed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

KINDS = ("none", "linear", "llama3")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """One way of stretching; the last three numbers count for `llama3` alone."""

    kind: str
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def fault(self) -> tuple[str, str, str] | None:
        """Give field, fault and remedy of the first broken rule; None where all hold."""
        if self.kind not in KINDS:
            return "type", f"is {self.kind!r}", f"choose from {', '.join(KINDS)}"
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                return name, f"is {value}", "give more than 0"
        if self.kind != "llama3":
            return None
        if self.high_freq_factor <= self.low_freq_factor:
            return (
                "high_freq_factor",
                f"{self.high_freq_factor} is not above low_freq_factor {self.low_freq_factor}",
                "waves between the two are mixed: give a larger one",
            )
        if self.original_max_position_embeddings < 1:
            return (
                "original_max_position_embeddings",
                f"is {self.original_max_position_embeddings}",
                "llama3 needs the length that the model was first trained on, such as 8192",
            )
        return None
