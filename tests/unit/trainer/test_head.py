"""The chunked loss: any chunk size gives the same sums, and ignored labels give nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.resident import first_values
from tests.support.tiny_model import TINY
from trainer.head import HeadGradients, head_backward, head_loss_sum
from trainer.model.stages import LmHead

HEAD = LmHead(TINY)
TOKENS = 3 * 20


def example() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 20, TINY.hidden_size, generator=generator)
    labels = torch.randint(0, TINY.vocab_size, (3, 20), generator=generator)
    labels[0, :7] = -100
    return hidden, labels


def run(chunk_tokens: int, dtype: torch.dtype = torch.float32) -> HeadGradients:
    hidden, labels = example()
    params = {n: p.detach().to(dtype) for n, p in first_values(HEAD, 1).items()}
    return head_backward(
        HEAD,
        params,
        [hidden.to(dtype)],
        [labels],
        valid_tokens=int((labels != -100).sum()),
        chunk_tokens=chunk_tokens,
    )


def test_one_chunk_is_plain_cross_entropy() -> None:
    hidden, labels = example()
    weight = first_values(HEAD, 1)["weight"]
    hidden.requires_grad_()
    loss = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())
    loss.backward()
    found = run(TOKENS)
    assert float(found.loss_sum) / (TOKENS - 7) == pytest.approx(float(loss.detach()), rel=1e-6)
    assert torch.allclose(found.hidden[0], hidden.grad, atol=1e-7)
    assert torch.allclose(found.params["weight"], weight.grad, atol=1e-6)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 20, 59, 60, 1000])
def test_chunks_change_the_order_of_sums_only(chunk_tokens: int) -> None:
    whole, chunked = run(TOKENS), run(chunk_tokens)
    assert float(chunked.loss_sum) == pytest.approx(float(whole.loss_sum), rel=1e-6)
    assert torch.allclose(chunked.hidden[0], whole.hidden[0], atol=1e-7)
    assert torch.allclose(chunked.params["weight"], whole.params["weight"], atol=1e-6)


def test_ignored_labels_give_no_gradient() -> None:
    found = run(16)
    assert bool((found.hidden[0][0, :7] == 0).all())
    assert bool((found.hidden[0][0, 7:] != 0).any(dim=-1).all())


def test_loss_without_gradients_is_the_same_number() -> None:
    hidden, labels = example()
    params = first_values(HEAD, 1)
    loss_sum = head_loss_sum(HEAD, params, [hidden], [labels], chunk_tokens=16)
    assert torch.equal(loss_sum, run(16).loss_sum)


def test_half_precision_sums_the_weight_in_fp32() -> None:
    """Many small terms vanish in a half-precision sum; the fp32 sum keeps them."""
    exact = run(TOKENS).params["weight"]
    found = run(1, torch.bfloat16)
    assert found.params["weight"].dtype == torch.float32
    assert found.hidden[0].dtype == torch.bfloat16
    summed_in_half = torch.zeros_like(exact, dtype=torch.bfloat16)
    hidden, labels = example()
    for x, label in zip(hidden.flatten(0, 1), labels.flatten(), strict=True):
        one = head_backward(
            HEAD,
            {n: p.detach().bfloat16() for n, p in first_values(HEAD, 1).items()},
            [x.bfloat16()[None, None]],
            [label[None, None]],
            valid_tokens=TOKENS - 7,
            chunk_tokens=1,
        )
        summed_in_half += one.params["weight"].bfloat16()
    error = (found.params["weight"] - exact).abs().mean()
    assert error < 0.7 * (summed_in_half.float() - exact).abs().mean()
