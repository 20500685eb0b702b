"""Eight-bit codes of a tensor, block by block, each block with a scale of its own.

Owns the arithmetic of the codes: blocks of 256 elements of the flattened tensor, linear in the
block's largest magnitude. Block-wise coding of optimizer state is from Dettmers et al. 2021, "8-bit
Optimizers via Block-wise Quantization" (arXiv:2110.02861); their codes are not linear, these are.
Knows nothing of optimizers. Invariant: the same tensor gives the same codes on every device:
every operation is one that IEEE 754 rounds exactly.

Shapes: N blocks, E = 256 elements a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ELEMENTS = 256
SIGNED_LEVELS = 127
UNSIGNED_LEVELS = 255


def block_count(elements: int) -> int:
    """Give how many blocks hold so many elements; the last one may be part empty."""
    return -(-elements // BLOCK_ELEMENTS)


def encode_signed(values: Tensor) -> tuple[Tensor, Tensor]:
    """Give int8 codes in the shape of `values` and fp32 scales [N]; rounds to nearest."""
    x_NE = _blocks(values)
    scale_N = _scale(x_NE.abs().amax(dim=1), SIGNED_LEVELS)
    code_NE = (x_NE / _divisor(scale_N)).round().clamp(-SIGNED_LEVELS, SIGNED_LEVELS)
    return _cut(code_NE, values).to(torch.int8), scale_N


def encode_unsigned(values: Tensor) -> tuple[Tensor, Tensor]:
    """Give uint8 codes of values of 0 or more; one above 0 never becomes 0.

    These are denominators: a moment whose root rounds to 0 would make its update boundless.
    """
    x_NE = _blocks(values)
    scale_N = _scale(x_NE.amax(dim=1), UNSIGNED_LEVELS)
    code_NE = (x_NE / _divisor(scale_N)).round().clamp(0, UNSIGNED_LEVELS)
    code_NE = torch.where(x_NE > 0, code_NE.clamp_min(1), code_NE)
    return _cut(code_NE, values).to(torch.uint8), scale_N


def root(values: Tensor) -> Tensor:
    """Give the fp32 square roots, rounded to nearest.

    Libraries differ in the last bit of an fp32 root; that of a float64 root is far below it.
    """
    return values.double().sqrt_().float()


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Give the fp32 values of codes of either kind."""
    return _cut(_blocks(codes.float()) * scales[:, None], codes)


def _blocks(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    count = block_count(flat.numel())
    missing = count * BLOCK_ELEMENTS - flat.numel()
    return F.pad(flat, (0, missing)).view(count, BLOCK_ELEMENTS)


def _cut(blocks_NE: Tensor, like: Tensor) -> Tensor:
    return blocks_NE.reshape(-1)[: like.numel()].view(like.shape)


def _scale(largest_N: Tensor, levels: int) -> Tensor:
    """Divide by a tensor: by a plain number, CUDA multiplies with its rounded reciprocal."""
    return largest_N / largest_N.new_full((), levels)


def _divisor(scale_N: Tensor) -> Tensor:
    """A block of zeros has scale 0: its codes are 0 whatever they are divided by."""
    return torch.where(scale_N > 0, scale_N, torch.ones_like(scale_N))[:, None]
