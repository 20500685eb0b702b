"""Does a row of a product keep its bits whatever rows are beside it, and a tree sum its order?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serve.attention import sum_as_tree
from serve.row_products import RowProducts, row_multiple, silu_

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(131, 48), (96, 112), (257, 640)])
def test_rows_and_packing_change_no_bit(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    products = RowProducts(dtype, is_host=True)
    weight, x = values(*shape, dtype=dtype), values(96, shape[1], dtype=dtype)
    packed = products.pack(weight)
    whole = products.linear(x, weight)
    for rows in (4, 8, 24, 60):
        for start in (0, 96 - rows):
            piece = slice(start, start + rows)
            assert torch.equal(products.linear(x[piece], weight), whole[piece])
            assert torch.equal(products.linear(x[piece], packed), whole[piece])
    assert torch.allclose(whole.float(), F.linear(x.float(), weight.float()), atol=0.5, rtol=0.02)


def test_a_kernel_that_minds_its_rows_goes_in_tiles() -> None:
    def minds_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Sum in another order when there are many rows."""
        if x.shape[0] > 16:
            return F.linear(x.flip(1), weight.flip(1), bias)
        return F.linear(x, weight, bias)

    products = RowProducts(torch.float32, is_host=True)
    products._packs, products._product = False, minds_rows
    weight, x = values(64, 512), values(64, 512)
    assert not products.keeps_order(weight)
    assert torch.equal(products.linear(x, weight)[:16], products.linear(x[:16], weight))
    assert not torch.equal(minds_rows(x, weight, None)[:16], minds_rows(x[:16], weight, None))


@pytest.mark.parametrize("width", [16, 48, 100, 112, 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pointwise_kernel_minds_no_row(width: int, dtype: torch.dtype) -> None:
    multiple = row_multiple(width)
    assert multiple % 4 == 0
    assert multiple * width % 64 == 0
    x = 4 * values(32 * multiple, width, dtype=dtype)
    whole = silu_(x.clone(), is_host=True)
    piece = silu_(x[multiple : 2 * multiple].clone(), is_host=True)
    assert torch.equal(piece, whole[multiple : 2 * multiple])
    assert torch.allclose(whole.float(), F.silu(x.float()), atol=0.1)


def test_later_zeros_change_no_sum() -> None:
    parts = values(3, 11, 40) * 1000
    for count in range(1, 12):
        padded = torch.cat((parts[:, :count], torch.zeros(3, 5, 40)), dim=1)
        assert torch.equal(sum_as_tree(padded), sum_as_tree(parts[:, :count]))
    # An order that depends on the number of parts would not do.
    halves = [parts[:, :5], torch.cat((parts[:, :5], torch.zeros(3, 6, 40)), dim=1)]
    folded = [h[:, : h.shape[1] // 2].sum(1) + h[:, h.shape[1] // 2 :].sum(1) for h in halves]
    assert not torch.equal(*folded)
