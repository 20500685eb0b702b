"""Matrix products whose rows do not depend on the rows beside them.

Owns the promise, on the CPU, that a row of a product has the same bits whatever other rows are
multiplied with it. Kernels keep one order of summing for all numbers of rows but the smallest, for
which they are written anew; so rows come in multiples of four, and the first product of each shape
tries many numbers of rows on values of its own. Where a kernel does not keep the order, products
of that shape go in tiles of a fixed number of rows. On other devices nothing is promised.

Shapes: R rows, K inputs, N outputs. Knows nothing of models.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS_MULTIPLE = 4
TILE_ROWS = 16
TRIED_ROWS = 96
TRIED_COUNTS = (4, 8, 12, 20, 28, 44, 52, 96)
# A pointwise kernel takes the last few values one by one, with another exponential, and cuts longer
# work between threads anywhere: pieces of whole vectors below the size that is cut have neither.
VECTOR_VALUES = 64
PIECE_VALUES = 32_704


class RowProducts:
    """The products of one device; it remembers which shapes were tried."""

    def __init__(self, *, is_host: bool) -> None:
        self.is_host = is_host
        self._keeps_order: dict[tuple[int, int, torch.dtype], bool] = {}

    def linear(self, x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Compute x weight^T + bias; on the CPU R is a multiple of `ROWS_MULTIPLE`."""
        if not self.is_host:
            return F.linear(x_RK, weight_NK, bias_N)
        assert x_RK.shape[0] % ROWS_MULTIPLE == 0, "rows come padded"
        if self.keeps_order(weight_NK):
            return F.linear(x_RK, weight_NK, bias_N)
        return in_tiles(x_RK, weight_NK, bias_N)

    def keeps_order(self, weight_NK: Tensor) -> bool:
        """Say whether any number of rows gives the bits that a tile gives; tried once a shape."""
        key = (*weight_NK.shape, weight_NK.dtype)
        found = self._keeps_order.get(key)
        if found is None:
            found = self._keeps_order[key] = _try_counts(weight_NK)
        return found


def row_multiple(pointwise_width: int) -> int:
    """Give the number of rows whose multiples fill whole vectors of a pointwise kernel."""
    rows = ROWS_MULTIPLE
    while rows * pointwise_width % VECTOR_VALUES:
        rows *= 2
    return rows


def silu_(x_RF: Tensor, *, is_host: bool) -> Tensor:
    """Replace each value by x * sigmoid(x), on the CPU piece by piece."""
    if not is_host:
        return F.silu(x_RF, inplace=True)
    flat = x_RF.view(-1)
    assert flat.shape[0] % VECTOR_VALUES == 0, "rows come in multiples of `row_multiple`"
    for start in range(0, flat.shape[0], PIECE_VALUES):
        F.silu(flat[start : start + PIECE_VALUES], inplace=True)
    return x_RF


def in_tiles(x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Compute x weight^T + bias in tiles of `TILE_ROWS` rows."""
    missing = -x_RK.shape[0] % TILE_ROWS
    padded = F.pad(x_RK, (0, 0, 0, missing)) if missing else x_RK
    tiles = [F.linear(tile, weight_NK, bias_N) for tile in torch.split(padded, TILE_ROWS)]
    return torch.cat(tiles)[: x_RK.shape[0]]


def _try_counts(weight_NK: Tensor) -> bool:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(TRIED_ROWS, weight_NK.shape[1], generator=generator)
    x_RK = values.to(weight_NK.dtype)
    expected = in_tiles(x_RK, weight_NK)
    for count in TRIED_COUNTS:
        for start in (0, TRIED_ROWS - count):
            piece = slice(start, start + count)
            if not torch.equal(F.linear(x_RK[piece].contiguous(), weight_NK), expected[piece]):
                return False
    return True
