"""Does the model agree with transformers' Llama, and its training with PyTorch's own optimizer?

The logits must have the same bits; 50 steps of training stay within 1e-5 of the loss, because the
two sum gradients in another order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.llama import llama_of
from tests.support.memory_training import MemoryTraining, random_ids
from tests.support.tiny_model import TINY, TINY_TIED, random_rows
from trainer.engine import EngineOptions
from trainer.model.config import ModelConfig

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[test]'")

STEPS = 50
MAX_NORM = 1.0
LEARNING_RATE = 1e-3
TOLERANCE = 1e-5
BIASED = replace(TINY, attention_bias=True, attention_output_bias=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("config", [TINY, TINY_TIED, BIASED], ids=["untied", "tied", "biased"])
def test_logits_have_the_same_bits(config: ModelConfig, dtype: str) -> None:
    options = EngineOptions(dtype=dtype)
    training = MemoryTraining(config, options)
    training.step([random_rows(1)])
    ids = random_ids(2, (2, config.max_position_embeddings), config.vocab_size)
    llama = llama_of(config, training.params(), options.torch_dtype)
    with torch.no_grad():
        expected = llama(ids).logits
    assert torch.equal(training.logits(ids), expected)


def test_control_other_angles_give_other_logits() -> None:
    training = MemoryTraining(TINY, EngineOptions())
    ids = random_ids(2, (2, 64), TINY.vocab_size)
    other = llama_of(replace(TINY, rope_theta=500000.0), training.params(), torch.float32)
    with torch.no_grad():
        assert not torch.allclose(training.logits(ids), other(ids).logits, atol=1e-3)


def largest_loss_difference(config: ModelConfig, beta2: float) -> float:
    """Train both ways and give the largest relative difference of the loss."""
    options = EngineOptions(max_grad_norm=MAX_NORM, beta2=0.95, weight_decay=0.1)
    training = MemoryTraining(config, options)
    llama = llama_of(config, training.params(), torch.float32)
    optimizer = torch.optim.AdamW(
        llama.parameters(), lr=LEARNING_RATE, betas=(0.9, beta2), eps=1e-8, weight_decay=0.1
    )
    worst = 0.0
    for step in range(1, STEPS + 1):
        rows = random_rows(step)
        ids, labels = torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())
        loss = F.cross_entropy(llama(ids).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(llama.parameters(), MAX_NORM)
        optimizer.step()
        result = training.step([rows], LEARNING_RATE)
        worst = max(worst, abs(result.loss - loss.item()) / loss.item())
    return worst


@pytest.mark.parametrize("config", [TINY, TINY_TIED], ids=["untied", "tied"])
def test_fifty_steps_stay_together(config: ModelConfig) -> None:
    assert largest_loss_difference(config, beta2=0.95) < TOLERANCE


def test_control_another_beta_does_not() -> None:
    assert largest_loss_difference(TINY, beta2=0.951) > TOLERANCE


def test_rows_are_not_alike() -> None:
    assert not np.array_equal(random_rows(1), random_rows(2))
