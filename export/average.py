"""The mean of several commits' weights.

Owns the rule of the mean: the values of the commits, in the order given, are added in fp64, divided
by their count in fp64, and rounded once to fp32. Knows nothing of stores. Memory is that of the
result and one tile, whatever the size of the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TILE_ELEMENTS = 1 << 20


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    """Give the mean of tensors of one shape, in fp32."""
    first = tensors[0]
    assert all(tensor.shape == first.shape for tensor in tensors), "shapes were compared before"
    result = torch.empty(first.shape, dtype=torch.float32)
    flat, parts = result.view(-1), [tensor.reshape(-1) for tensor in tensors]
    for start in range(0, flat.numel(), TILE_ELEMENTS):
        tile = slice(start, start + TILE_ELEMENTS)
        total = parts[0][tile].double()
        for part in parts[1:]:
            total += part[tile].double()
        flat[tile] = total / len(tensors)
    return result
