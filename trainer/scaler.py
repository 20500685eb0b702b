"""Dynamic loss scaling for fp16: the scale of the next step, from what the last ones did.

Owns the scale's rules (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2) and its form in a
commit. Knows nothing of gradients. Invariant: the scale is a power of two from 1 to 2^24, so that
scaling and unscaling change no bit of an fp32 number in range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.recipe import Recipe

LARGEST = 2.0**24


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaler:
    """The scale, and how many steps went well since it last changed."""

    scale: float
    good_steps: int = 0

    def __post_init__(self) -> None:
        assert 1.0 <= self.scale <= LARGEST
        assert math.frexp(self.scale)[0] == 0.5, "a power of two"

    def after_success(self, growth_steps: int) -> LossScaler:
        """Count a step; double the scale after `growth_steps` of them."""
        good_steps = self.good_steps + 1
        if good_steps < growth_steps:
            return LossScaler(scale=self.scale, good_steps=good_steps)
        return LossScaler(scale=min(2.0 * self.scale, LARGEST))

    def after_overflow(self) -> LossScaler:
        """Halve the scale and count anew."""
        return LossScaler(scale=max(self.scale / 2.0, 1.0))

    def to_json(self) -> dict[str, Any]:
        """Give the scaler's part of a commit's state."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LossScaler:
        """Read what `to_json` gave."""
        return cls(scale=float(values["scale"]), good_steps=int(values["good_steps"]))


def scaler_of(recipe: Recipe, stored: Mapping[str, Any] | None) -> LossScaler | None:
    """Give the scaler of a recipe's next step; None where nothing is scaled."""
    if recipe.dtype != "fp16":
        return None
    return LossScaler(scale=recipe.loss_scale) if stored is None else LossScaler.from_json(stored)
