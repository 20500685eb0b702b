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
from trainer.model.layers import stretched
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
LINEAR = replace(SMALL, rope_scaling_type="linear", rope_scaling_factor=4.0)
# Short waves stay, long ones are stretched, and one lies between: all three parts of the formula.
LLAMA3 = replace(
    SMALL,
    head_dim=8,
    rope_scaling_type="llama3",
    rope_scaling_factor=8.0,
    rope_scaling_original_max_position_embeddings=128,
)
TIED = replace(SMALL, tied_embeddings=True)
STAGES = {
    "embeddings": Embeddings(SMALL),
    "block": Block(SMALL, 0),
    "block with biases and norms": Block(EVERYTHING, 0),
    "one key head": Block(replace(SMALL, num_kv_heads=1), 0),
    "a key head each": Block(replace(SMALL, num_kv_heads=4), 0),
    "linear scaling of positions": Block(LINEAR, 0),
    "Llama 3 scaling of positions": Block(LLAMA3, 0),
    "everything, scaled": Block(
        replace(LLAMA3, attention_bias=True, attention_output_bias=True, qk_norm=True), 0
    ),
    "final norm": FinalNorm(SMALL),
    "head": LmHead(SMALL),
    "tied head": LmHead(TIED),
}


class GradientOff(Block):
    """Control: a block that loses the gradient of its residual path."""

    def forward(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return super().forward(params, x) - x + x.detach()


def values_of(stage: Stage) -> dict[str, Tensor]:
    """Give values away from their first ones: zero biases and unit scales hide mistakes."""
    return {
        name: (p.detach().double() + 0.1 * torch.randn(p.shape).double()).requires_grad_()
        for name, p in first_values(stage, 5).items()
    }


def is_correct(stage: Stage) -> bool:
    torch.manual_seed(3)
    params = values_of(stage)
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


def is_correct_when_shared(*, head_is_cut: bool) -> bool:
    """Check a whole model whose one matrix both looks ids up and scores them."""
    torch.manual_seed(3)
    ids = torch.from_numpy(random_rows(1, 2, 4, TIED.vocab_size))
    middle = [Block(TIED, 0), FinalNorm(TIED)]
    params = [values_of(stage) for stage in middle]

    def scores(weight: Tensor) -> Tensor:
        x = Embeddings(TIED).forward({"weight": weight}, ids)
        for stage, values in zip(middle, params, strict=True):
            x = stage.forward(values, x)
        return LmHead(TIED).forward({"weight": weight.detach() if head_is_cut else weight}, x)

    weight = values_of(Embeddings(TIED))["weight"]
    return torch.autograd.gradcheck(scores, (weight,), raise_exception=False)


def test_a_shared_matrix_gets_both_gradients() -> None:
    assert is_correct_when_shared(head_is_cut=False)


def test_control_half_of_a_shared_gradient_is_noticed() -> None:
    assert not is_correct_when_shared(head_is_cut=True)


def test_control_every_part_of_the_scaling_is_met() -> None:
    assert LLAMA3.rope_scaling is not None
    exponents = torch.arange(0, LLAMA3.head_dim, 2).float() / LLAMA3.head_dim
    frequencies = 1.0 / LLAMA3.rope_theta**exponents
    ratios = stretched(frequencies, LLAMA3.rope_scaling) / frequencies
    assert float(ratios.max()) == 1.0
    assert float(ratios.min()) == 1 / LLAMA3.rope_scaling_factor
    assert bool(((ratios > 1 / LLAMA3.rope_scaling_factor) & (ratios < 1.0)).any())


def test_head_loss_is_the_derivative_too() -> None:
    logits = torch.randn(4, SMALL.vocab_size, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, -100, 3, 10])
    assert torch.autograd.gradcheck(
        lambda x: F.cross_entropy(x, labels, ignore_index=-100, reduction="sum"), (logits,)
    )
