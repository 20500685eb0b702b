"""Matrix products whose rows do not depend on the rows beside them.

Owns the promise, on the CPU, that a row of a product has the same bits whatever other rows are
multiplied with it, and whether the weight was packed for the processor or not. Kernels keep one
order of summing for all numbers of rows but the smallest, for which they are written anew; so rows
come in multiples of four, and the first product of each shape tries many numbers of rows on values
of its own. Where a kernel does not keep the order, products of that shape go in tiles of a fixed
number of rows, and nothing is packed. On other devices nothing is promised.

Shapes: R rows, K inputs, N outputs. Knows nothing of models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

ROWS_MULTIPLE = 4
TILE_ROWS = 16
TRIED_ROWS = 96
TRIED_COUNTS = (4, 8, 12, 20, 28, 44, 52, 96)
# A pointwise kernel takes the last few values one by one, with another exponential, and cuts longer
# work between threads anywhere: pieces of whole vectors below the size that is cut have neither.
VECTOR_VALUES = 64
PIECE_VALUES = 32_704


class RowProducts:
    """The products of one dtype on one device; it remembers which shapes were tried."""

    def __init__(self, dtype: torch.dtype, *, is_host: bool) -> None:
        self.is_host = is_host
        self._packs = is_host and _can_pack(dtype)
        self._product: Product = _packable_product if self._packs else F.linear
        self._keeps_order: dict[tuple[int, int], bool] = {}
        self._trying = threading.Lock()

    def linear(self, x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Compute x weight^T + bias; on the CPU R is a multiple of `ROWS_MULTIPLE`."""
        if not self.is_host:
            return F.linear(x_RK, weight_NK, bias_N)
        assert x_RK.shape[0] % ROWS_MULTIPLE == 0, "rows come padded"
        if weight_NK.is_mkldnn or self.keeps_order(weight_NK):
            return self._product(x_RK, weight_NK, bias_N)
        return in_tiles(self._product, x_RK, weight_NK, bias_N)

    def pack(self, weight: Tensor) -> Tensor:
        """Give a copy of a weight that stays: laid out for the processor, where that is safe."""
        if self._packs and weight.ndim == 2 and self.keeps_order(weight):
            return _packed(weight)
        return weight.clone()

    def keeps_order(self, weight_NK: Tensor) -> bool:
        """Say whether any number of rows gives the bits that a tile gives; tried once a shape."""
        key = (weight_NK.shape[0], weight_NK.shape[1])
        with self._trying:
            found = self._keeps_order.get(key)
            if found is None:
                weights = [weight_NK, *([_packed(weight_NK)] if self._packs else [])]
                found = all(_keeps_order(self._product, each, weight_NK) for each in weights)
                self._keeps_order[key] = found
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


def in_tiles(
    product: Product, x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None
) -> Tensor:
    """Compute x weight^T + bias in tiles of `TILE_ROWS` rows."""
    missing = -x_RK.shape[0] % TILE_ROWS
    padded = F.pad(x_RK, (0, 0, 0, missing)) if missing else x_RK
    tiles = [product(tile, weight_NK, bias_N) for tile in torch.split(padded, TILE_ROWS)]
    return torch.cat(tiles)[: x_RK.shape[0]]


def _packable_product(x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """oneDNN's product, which takes packed weights and plain ones, to the same bits."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x_RK, weight_NK, bias_N, "none", [], "")
    return found


def _packed(weight_NK: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK, None)
    return found


def _can_pack(dtype: torch.dtype) -> bool:
    """Say whether this build and processor have packed products of a dtype."""
    try:
        weight = torch.ones(16, 16, dtype=dtype)
        return _packable_product(weight, _packed(weight), None).shape == (16, 16)
    except (AttributeError, RuntimeError):
        return False


def _keeps_order(product: Product, weight_NK: Tensor, plain_NK: Tensor) -> bool:
    """Compare products by many numbers of rows with tiles of the plain weight."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(TRIED_ROWS, plain_NK.shape[1], generator=generator)
    x_RK = values.to(plain_NK.dtype)
    expected = in_tiles(product, x_RK, plain_NK)
    for count in TRIED_COUNTS:
        for start in (0, TRIED_ROWS - count):
            piece = slice(start, start + count)
            if not torch.equal(product(x_RK[piece], weight_NK, None), expected[piece]):
                return False
    return True
