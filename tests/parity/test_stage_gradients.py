"""Is every stage's gradient the derivative of its output? Finite differences in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.resident import first_values
from tests.support.tiny_model import random_rows
from trainer.model.config import ModelConfig
from trainer.model.stages import Block, Embeddings, FinalNorm, LmHead, Stage

SMALL = ModelConfig(
    vocab_size=11,
    hidden_size=6,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=10,
    initializer_range=0.5,
)
EVERYTHING = replace(SMALL, attention_bias=True, attention_output_bias=True, qk_norm=True)
STAGES = {
    "embeddings": Embeddings(SMALL),
    "block": Block(SMALL, 0),
    "block with biases and norms": Block(EVERYTHING, 0),
    "one key head": Block(replace(SMALL, num_kv_heads=1), 0),
    "final norm": FinalNorm(SMALL),
    "head": LmHead(SMALL),
}


class GradientOff(Block):
    """Control: a block that loses the gradient of its residual path."""

    def forward(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return super().forward(params, x) - x + x.detach()


def is_correct(stage: Stage) -> bool:
    torch.manual_seed(3)
    # Values away from their first ones: zero biases and unit scales hide mistakes.
    params = {
        name: (p.detach().double() + 0.1 * torch.randn(p.shape).double()).requires_grad_()
        for name, p in first_values(stage, 5).items()
    }
    if isinstance(stage, Embeddings):
        x = torch.from_numpy(random_rows(1, 2, 4, SMALL.vocab_size))
    else:
        x = torch.randn(2, 5, SMALL.hidden_size, dtype=torch.float64, requires_grad=True)

    def output(x: Tensor, *values: Tensor) -> Tensor:
        return stage.forward(dict(zip(params, values, strict=True)), x)

    return torch.autograd.gradcheck(output, (x, *params.values()), raise_exception=False)


@pytest.mark.parametrize("name", STAGES)
def test_gradient_is_the_derivative(name: str) -> None:
    assert is_correct(STAGES[name])


def test_control_a_lost_gradient_is_noticed() -> None:
    assert not is_correct(GradientOff(SMALL, 0))


def test_head_loss_is_the_derivative_too() -> None:
    logits = torch.randn(4, SMALL.vocab_size, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, -100, 3, 10])
    assert torch.autograd.gradcheck(
        lambda x: F.cross_entropy(x, labels, ignore_index=-100, reduction="sum"), (logits,)
    )
