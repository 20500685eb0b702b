"""Are k micro-batches the same step as one batch of all their rows?

The two sum in another order, so they agree closely and not in every bit. Micro-batches here have
unequal counts of valid labels: a mean of their means is another number, and the control says so.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.memory_training import MemoryTraining
from tests.support.tiny_model import TINY, TINY_TIED, random_rows
from trainer.engine import EngineOptions
from trainer.model.config import ModelConfig

STEPS = 10
# fp32 sums of some hundred terms in another order; grows with the steps.
TOLERANCE = 2e-5


def unequal_rows(step: int) -> np.ndarray:
    """Give 12 rows; whole stretches of labels are ignored, most in the last rows."""
    rows = random_rows(step, rows=12)
    for index in range(12):
        rows[index, 1 : 1 + index] = -100
    return rows


@pytest.mark.parametrize("config", [TINY, TINY_TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("clip", ["global", "shard"])
@pytest.mark.parametrize("count", [2, 4, 12])
def test_micro_batches_equal_one_batch(config: ModelConfig, clip: str, count: int) -> None:
    options = EngineOptions(grad_clip_mode=clip, max_grad_norm=0.5)
    whole, split = MemoryTraining(config, options), MemoryTraining(config, options)
    for step in range(1, STEPS + 1):
        rows = unequal_rows(step)
        one = whole.step([rows])
        many = split.step(np.split(rows, count))
        assert many.valid_tokens == one.valid_tokens
        assert many.loss == pytest.approx(one.loss, rel=TOLERANCE)
        assert many.grad_norm == pytest.approx(one.grad_norm, rel=TOLERANCE)
        assert many.clip_scale == pytest.approx(one.clip_scale, rel=TOLERANCE)


def test_control_a_mean_of_means_is_another_loss() -> None:
    training = MemoryTraining(TINY, EngineOptions())
    rows = unequal_rows(1)
    means = [training.engine.evaluate(training.store, [part]).loss for part in np.split(rows, 4)]
    true_mean = training.engine.evaluate(training.store, [rows]).loss
    step = training.step(np.split(rows, 4))
    assert step.loss == pytest.approx(true_mean, rel=TOLERANCE)
    assert step.loss != pytest.approx(float(np.mean(means)), rel=10 * TOLERANCE)
