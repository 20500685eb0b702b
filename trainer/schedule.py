"""The learning rate as a pure function of the tokens that were trained on.

Owns the shape of the schedule. Knows nothing of steps, stores or clocks: a run that is stopped and
resumed, or that is given a later stop, asks the same question and gets the same answer.
Invariant: no quantity here depends on where a run will stop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SHAPES = ("constant", "tokens", "linear", "cosine")


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A warm-up over `warmup_tokens`, then `shape` over the next `decay_tokens`.

    `tokens` and `linear` fall in a straight line to `min_lr_ratio` of the peak, `cosine` along half
    a cosine; `constant` stays at the peak. After the decay the rate stays at its floor.
    """

    shape: str
    peak: float
    warmup_tokens: int
    decay_tokens: int
    min_lr_ratio: float

    def learning_rate(self, tokens: int) -> float:
        """Give the rate of the step that brings the count of trained tokens to `tokens`.

        The step's own tokens are counted, so that the first step of a warm-up is not wasted at
        a rate of zero.
        """
        if tokens < self.warmup_tokens:
            return self.peak * tokens / self.warmup_tokens
        return self.peak * self._ratio(tokens - self.warmup_tokens)

    def _ratio(self, tokens_after_warmup: int) -> float:
        if self.shape == "constant" or self.decay_tokens == 0:
            return 1.0
        progress = min(1.0, tokens_after_warmup / self.decay_tokens)
        fall = 0.5 * (1.0 - math.cos(math.pi * progress)) if self.shape == "cosine" else progress
        return 1.0 - (1.0 - self.min_lr_ratio) * fall
