"""Adapters' products in compiled blocks of a GPU: fp32's precision from products of bf16.

Owns how an fp32 matrix is taken apart into bf16 ones, and an adapter's four products each way. A
block's input and its output's gradient are bf16 already, so that only adapters, what is between A
and B, and that one's gradient are taken apart. Knows nothing of blocks. Invariants: three parts are
the matrix to the last bit, since 24 bits are three times 8; of the products of parts those are left
out that are below the last bit of the first.

Tensor cores cut off where fp32 would round, which shows in long sums: those are cut into pieces,
whose sums are added in fp32. On an H200 errors of the pieces' lengths below are those of fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Of 32 bits of an fp32 value: sign, exponent, and the first 7 bits behind the leading one.
UPPER_BITS = -(1 << 16)
# The longest pieces of sums over a width, and of those over a micro-batch's tokens, which kernels
# for fp32 add up in several parts themselves; short sums are cut all the same.
PIECE, TOKENS_PIECE = 512, 256
SHORTEST, AT_LEAST = 128, 8
# Which parts of two matrices are multiplied; the smallest products come first.
PAIRS = ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0))


def takes(x: Tensor) -> bool:
    """Say whether products with x go this way."""
    return x.device.type != "cpu" and x.dtype == torch.bfloat16


def parts_of(wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take an fp32 tensor apart into three of bf16 whose sum it is, the largest first."""
    first = _upper(wide)
    rest = wide - first
    second = _upper(rest)
    found = (first, second, rest - second)
    return found[0].to(torch.bfloat16), found[1].to(torch.bfloat16), found[2].to(torch.bfloat16)


def _upper(wide: Tensor) -> Tensor:
    """Cut off what bf16 has no room for. Bits are cut, for compilers leave out a cast to and fro.

    (They compute bf16 in fp32, and then the rest would be zero.)
    """
    return (wide.view(torch.int32) & UPPER_BITS).view(torch.float32)


def narrowed(x_NI: Tensor, a_RI: Tensor) -> Tensor:
    """Give x A^T, fp32 [N, R]."""
    return _joined(_summed(x_NI, torch.cat(parts_of(a_RI)).t(), PIECE), dim=1)


def raised(low_NR: Tensor, b_OR: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Give scale * low B^T, [N, O]."""
    return _of_pairs(low_NR * scale, b_OR.t(), dtype)


def back_raised(
    gradient_NO: Tensor, low_NR: Tensor, b_OR: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Give the gradients of low and of B."""
    of_low = _summed(gradient_NO, torch.cat(parts_of(b_OR), dim=1), PIECE)
    of_b = _summed(gradient_NO.t(), torch.cat(parts_of(low_NR), dim=1), TOKENS_PIECE)
    return _joined(of_low, dim=1) * scale, _joined(of_b, dim=1) * scale


def back_narrowed(gradient_NR: Tensor, x_NI: Tensor, a_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Give the gradients of x, in its dtype, and of A."""
    of_a = _summed(torch.cat(parts_of(gradient_NR), dim=1).t(), x_NI, TOKENS_PIECE)
    return _of_pairs(gradient_NR, a_RI, x_NI.dtype), _joined(of_a, dim=0)


def _joined(of_parts: Tensor, dim: int) -> Tensor:
    """Add the products of three parts."""
    first, second, third = of_parts.chunk(3, dim=dim)
    return third + second + first


def _of_pairs(left_NK: Tensor, right_KM: Tensor, dtype: torch.dtype) -> Tensor:
    """Give the product of two fp32 matrices whose sums are short: all pairs of parts in one."""
    lefts, rights = parts_of(left_NK), parts_of(right_KM)
    left = torch.cat([lefts[i] for i, _ in PAIRS], dim=1)
    right = torch.cat([rights[i] for _, i in PAIRS], dim=0)
    return _product(left, right, dtype)


def _summed(left_NK: Tensor, right_KM: Tensor, longest: int) -> Tensor:
    """Give the fp32 product of two bf16 matrices, sums in pieces."""
    (rows, width), columns = left_NK.shape, right_KM.shape[1]
    count = _pieces(width, longest)
    if count == 1:
        return _product(left_NK, right_KM, torch.float32)
    left = left_NK.view(rows, count, width // count).transpose(0, 1)
    right = right_KM.reshape(count, width // count, columns)
    return _product(left, right, torch.float32).sum(0)


def _pieces(width: int, longest: int) -> int:
    """Give into how many a sum is cut: a power of two, as far as the width allows it."""
    longest, count = min(longest, max(SHORTEST, width // AT_LEAST)), 1
    while width % (2 * count) == 0 and width // count > longest:
        count *= 2
    return count


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply bf16 matrices or stacks of them; sums are fp32, and are rounded once."""
    if left.device.type == "cpu":
        return (left.float() @ right.float()).to(dtype)
    multiply = torch.mm if left.dim() == 2 else torch.bmm
    return multiply(left, right) if dtype == left.dtype else multiply(left, right, out_dtype=dtype)
