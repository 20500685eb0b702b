"""Gradient norms and the factor that clips them.

Owns the definition of a norm over many tensors: the norm of the tensors' norms, taken in the order
of stages and parameters, as `torch.nn.utils.clip_grad_norm_` does, so that both give the same bits.
Norms are fp32 whatever the compute dtype. Knows nothing of stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.errors import NonFiniteError


def tensor_norms(gradients: Mapping[str, Tensor]) -> Tensor:
    """Give each tensor's 2-norm, fp32 [tensors], without a look at them: a device need not wait."""
    return torch.stack(list(torch._foreach_norm(list(gradients.values()), 2.0)))


def check_finite(shard: str, gradients: Mapping[str, Tensor], norms: Tensor) -> None:
    """Raise NonFiniteError, which names the first tensor whose norm is not finite."""
    if not bool(torch.isfinite(norms).all()):
        raise _non_finite(shard, gradients, norms)


def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """Give the 2-norm of everything that `norms` were taken of, an fp32 scalar."""
    norm: Tensor = torch.linalg.vector_norm(torch.cat(list(norms)), 2.0)
    return norm


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Give the factor that brings `norm` down to `max_norm`: 1.0 when it is not above."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def clip_scale(norm: Tensor, max_norm: float) -> float:
    """Give `clip_factor`, with a look at it."""
    return float(clip_factor(norm, max_norm))


def _non_finite(shard: str, gradients: Mapping[str, Tensor], norms: Tensor) -> NonFiniteError:
    index = int((~torch.isfinite(norms)).nonzero()[0])
    tensor = list(gradients)[index]
    bad_count = int((~torch.isfinite(gradients[tensor])).sum())
    fault = (
        f"has {bad_count} values of {gradients[tensor].numel()} that are not finite"
        if bad_count
        else "is so large that its norm exceeds fp32"
    )
    return NonFiniteError(
        f"the gradient of {shard}/{tensor} {fault}: training diverged and this step was not "
        "committed; resume with a lower --learning-rate or --max-grad-norm",
        shard=shard,
        tensor=tensor,
    )
