"""Norms are those of `clip_grad_norm_`, bit for bit, and what is not finite is named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainer.clipping import check_finite, clip_scale, tensor_norms, total_norm
from trainer.errors import NonFiniteError


def gradients() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"q.weight": (61, 37), "norm.weight": (37,), "down.weight": (19, 53)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("limit", [0.1, 1.0, 1e6])
def test_norm_and_scale_are_those_of_torch(limit: float) -> None:
    found = gradients()
    leaves = [torch.nn.Parameter(torch.zeros_like(g)) for g in found.values()]
    for leaf, gradient in zip(leaves, found.values(), strict=True):
        leaf.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(leaves, limit)
    norm = total_norm([tensor_norms(found)])
    assert torch.equal(norm, expected)
    for leaf, gradient in zip(leaves, found.values(), strict=True):
        assert torch.equal(leaf.grad, gradient * clip_scale(norm, limit))


def test_scale_never_grows_a_gradient() -> None:
    assert clip_scale(torch.tensor(0.0), 1.0) == 1.0
    assert clip_scale(torch.tensor(0.5), 1.0) == 1.0
    assert clip_scale(torch.tensor(4.0), 1.0) == pytest.approx(0.25)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_first_tensor_that_is_not_finite_is_named(value: float) -> None:
    bad = gradients()
    bad["norm.weight"][5] = value
    bad["down.weight"][0, 0] = value
    with pytest.raises(NonFiniteError, match=r"block_002/norm\.weight has 1 values of 37") as e:
        check_finite("params/block_002", bad, tensor_norms(bad))
    assert (e.value.shard, e.value.tensor) == ("params/block_002", "norm.weight")


def test_a_norm_beyond_fp32_is_told_apart() -> None:
    large = {"w": torch.full((10,), 1e30)}
    with pytest.raises(NonFiniteError, match="its norm exceeds fp32"):
        check_finite("params/x", large, tensor_norms(large))
