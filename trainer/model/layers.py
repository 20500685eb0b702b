"""The decoder's arithmetic, as pure functions of tensors.

Shapes: B rows, T positions, D hidden size, H query heads, G key/value heads, K head width,
F intermediate size. Tensor names end in their shape where it helps (x_BTD).

Every function works in the dtype of its input; sums of squares and angles are taken in fp32, and
rounded to that dtype where Llama's published definition rounds, so that an exported model gives
the same bits. Knows nothing of stages, shards or autograd modes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.rope_scaling import RopeScaling


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square over the last axis, then scale by `weight`.

    In half precision the quotient is rounded before the scaling, as Llama does.
    """
    width = (x.shape[-1],)
    if x.dtype.itemsize >= 4:
        return F.rms_norm(x, width, weight, eps)
    return F.rms_norm(x.float(), width, None, eps).to(x.dtype) * weight


class AdaptedWeight(NamedTuple):
    """A matrix in the place of a weight, and what makes its product with x into the module's."""

    matrix: Tensor
    added_to: Callable[[Tensor, Tensor], Tensor]


Weight = Tensor | AdaptedWeight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + b, and what is added to it where a weight has more to it than a matrix."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    return weight.added_to(F.linear(x, weight.matrix, bias), x)


def swiglu(x_BTD: Tensor, gate_FD: Weight, up_FD: Weight, down_DF: Weight) -> Tensor:
    """Compute down(silu(gate(x)) * up(x))."""
    return linear(F.silu(linear(x_BTD, gate_FD)) * linear(x_BTD, up_FD), down_DF)


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Turn each pair (i, i + K/2) of a head by its position's angle."""
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK


@lru_cache(maxsize=8)
def rotary_angles(
    positions: int,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    device: torch.device,
    scaling: RopeScaling | None = None,
    *,
    made_on: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """Give cosine and sine [T, K] of position times theta^(-2i/K), rounded to `dtype`.

    `scaling` stretches those frequencies first. made_on: where cosines are taken, the host if it is
    not said; a device's may round otherwise in the last bit.

    The cache holds values that follow from the arguments alone; tables are never written to.
    """
    # What is made while only inferring could not serve a backward pass later.
    with torch.inference_mode(False):
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / (theta**exponents)
        if scaling is not None:
            frequencies = stretched(frequencies, scaling)
        place = made_on or torch.device("cpu")
        positions_T = torch.arange(positions, dtype=torch.float32, device=place)
        angles_TK2 = positions_T[:, None] * frequencies.to(place)[None, :]
        angles_TK = torch.cat((angles_TK2, angles_TK2), dim=-1)
        return angles_TK.cos().to(device, dtype), angles_TK.sin().to(device, dtype)


def stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Give rotary frequencies for longer sequences, fp32, rounded in the published code's order."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    assert scaling.kind == "llama3", "no scaling is no RopeScaling"
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    length = scaling.original_max_position_embeddings
    waves = 2 * math.pi / frequencies
    smooth = (length / waves - low) / (high - low)
    mixed = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    outer = torch.where(waves > length / low, frequencies / scaling.factor, frequencies)
    between = (waves >= length / high) & (waves <= length / low)
    return torch.where(between, mixed, outer)


def causal_attention(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Attend to the past with scale 1/sqrt(K); query head h reads key head h // (H / G).

    mask: added to scores instead, [B, 1, T, T].
    """
    grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
    if mask is not None:
        if grouped and q_BHTK.device.type != "cpu":  # no fused kernel has both
            times = q_BHTK.shape[1] // k_BGTK.shape[1]
            k_BGTK, v_BGTK = (each.repeat_interleave(times, 1) for each in (k_BGTK, v_BGTK))
            grouped = False
        return F.scaled_dot_product_attention(
            q_BHTK, k_BGTK, v_BGTK, attn_mask=mask, enable_gqa=grouped
        )
    return F.scaled_dot_product_attention(
        q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=grouped
    )


def split_heads(x_BTW: Tensor, head_dim: int) -> Tensor:
    """View [B, T, heads * K] as [B, heads, T, K]."""
    return x_BTW.view(*x_BTW.shape[:-1], -1, head_dim).transpose(1, 2)


def merge_heads(x_BHTK: Tensor) -> Tensor:
    """Lay [B, heads, T, K] out as [B, T, heads * K]."""
    return x_BHTK.transpose(1, 2).flatten(2)
