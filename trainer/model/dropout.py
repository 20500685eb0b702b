"""Dropout whose mask follows from a seed alone, so that it is there again whenever it is asked for.

Owns the mask's arithmetic. Knows nothing of where seeds come from. The random numbers are those of
the device that computes: a CPU and a GPU draw different masks from one seed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dropped(x: Tensor, rate: float, seed: int) -> Tensor:
    """Give x with elements set to zero with probability `rate`, the others divided by 1 - rate."""
    # The generator makes whole numbers; any other form would be made by way of a second tensor.
    drawn = torch.empty(x.shape, dtype=torch.int32, device=x.device)
    if not x.is_meta:
        drawn.bernoulli_(rate, generator=torch.Generator(x.device).manual_seed(seed))
    gone = drawn.bool()
    del drawn
    return x.masked_fill(gone, 0.0).mul_(1.0 / (1.0 - rate))
