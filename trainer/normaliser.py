"""The periodic normaliser: brings the shards' gradients nearer to one size, from scalars alone.

Owns its settings and formula. Knows nothing of passes, clipping or stores. In every N-th step, with
r the root mean square of a shard's gradient elements and R that of the whole model's:

    raw = R / r,   applied = 1 + blend (min(max(raw, min_scale), max_scale) - 1)

and the shard's gradients are multiplied by `applied` before they are clipped. A shard whose
gradients are all zero is left alone. Nothing is kept from one step to the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class NormaliserSettings:
    """How often (0: never), and how far."""

    every: int = 0
    blend: float = 0.25
    min_scale: float = 0.5
    max_scale: float = 2.0

    def is_due(self, step: int) -> bool:
        """Say whether the gradients of `step` are normalised."""
        return self.every > 0 and step % self.every == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalisation:
    """What one step's gradients are multiplied by, shard by shard, and why."""

    target_rms: float
    raw: Mapping[str, float]
    factors: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Give the record of the step log."""
        return {
            "target_grad_rms": self.target_rms,
            "raw_scale_min": min(self.raw.values()),
            "raw_scale_max": max(self.raw.values()),
            "applied_scale_min": min(self.factors.values()),
            "applied_scale_max": max(self.factors.values()),
        }


def normalisation(
    settings: NormaliserSettings, norms: Mapping[str, float], counts: Mapping[str, int]
) -> Normalisation:
    """Work out the factors from each shard's gradient norm and number of elements."""
    squares = math.fsum(norm * norm for norm in norms.values())
    target = math.sqrt(squares / sum(counts.values()))
    rms = {name: norm / math.sqrt(counts[name]) for name, norm in norms.items()}
    raw = {name: target / each if each > 0.0 else 1.0 for name, each in rms.items()}
    return Normalisation(
        target_rms=target,
        raw=raw,
        factors={name: _applied(settings, each) for name, each in raw.items()},
    )


def _applied(settings: NormaliserSettings, raw: float) -> float:
    clamped = min(max(raw, settings.min_scale), settings.max_scale)
    return 1.0 + settings.blend * (clamped - 1.0)
