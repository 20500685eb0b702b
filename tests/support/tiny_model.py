"""Small models and random rows that tests of the engine share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trainer.model.config import ModelConfig

TINY = ModelConfig(
    vocab_size=131,
    hidden_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=112,
    max_position_embeddings=64,
    initializer_range=0.1,
)
TINY_TIED = replace(TINY, tied_embeddings=True)
TINY_QWEN = replace(TINY, attention_bias=True, attention_output_bias=True, qk_norm=True)


def random_rows(
    seed: int, rows: int = 3, positions: int = 20, vocab_size: int = TINY.vocab_size
) -> np.ndarray:
    """Give rows [rows, positions + 1] of ids; a skewed draw, so that ids repeat."""
    draw = np.random.default_rng(seed)
    return (vocab_size * draw.random((rows, positions + 1)) ** 2).astype(np.int64)


def micro_batches(step: int, count: int) -> list[np.ndarray]:
    """Give `count` batches of a step; each ignores another number of labels."""
    batches = [random_rows(1000 * step + index) for index in range(count)]
    for index, rows in enumerate(batches):
        rows[0, 5 : 5 + 4 * index] = -100
    return batches
