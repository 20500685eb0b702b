"""Does a layer as large as those of real models, streamed to a GPU, give resident training's bits?

A pooled buffer that is filled again while something still reads it shows only where copies take
longer than the computing beside them: small layers never show it. Here a layer has 268 MB.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from shardb import ShardView
from tests.support.memory_transaction import MemoryStore, MemoryTransaction
from tests.support.resident import ResidentTrainer
from trainer.device import Device
from trainer.engine import Engine
from trainer.model.config import ModelConfig
from trainer.options import EngineOptions
from trainer.pipeline.pipeline import PipelineSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LARGE = ModelConfig(
    vocab_size=4096,
    hidden_size=2048,
    num_layers=3,
    num_heads=16,
    num_kv_heads=8,
    intermediate_size=8192,
    max_position_embeddings=256,
)
OPTIONS = EngineOptions(dtype="bf16", max_grad_norm=0.5, lm_head_chunk_tokens=256)
WAYS: dict[str, tuple[EngineOptions, PipelineSettings | None]] = {
    "plain": (OPTIONS, None),
    "read and sent ahead": (replace(OPTIONS, prefetch="gpu", prefetch_window=2), None),
    "pipeline": (OPTIONS, PipelineSettings(poison=True)),
}
STEPS = 3
SEED = 5

Arrays = dict[str, np.ndarray]


class FirstReadStale(MemoryTransaction):
    """Control: at the third step the forward pass sees a layer of the step before."""

    def read(self, name: str) -> ShardView:
        kept = self._store.retired.pop(name, None) if "block_001" in name else None
        now = super().read(name)
        return now if kept is None else ShardView(name, now.layout, kept, None)


def batches_of(step: int) -> list[np.ndarray]:
    draw = np.random.default_rng(step)
    return [draw.integers(0, LARGE.vocab_size, (2, 129)) for _ in range(2)]


def arrays_of_resident() -> tuple[Arrays, list[float]]:
    trainer = ResidentTrainer(LARGE, OPTIONS, SEED, Device.from_name("cuda").name)
    losses = []
    for step in range(1, STEPS + 1):
        result = trainer.step(batches_of(step), 1e-3)
        assert result is not None
        losses.append(result.loss)
    return trainer.arrays(), losses


@pytest.fixture(scope="module")
def resident() -> tuple[Arrays, list[float]]:
    return arrays_of_resident()


def streamed(way: str, last: type[MemoryTransaction]) -> tuple[Arrays, list[float]]:
    """Train; the last step goes through a transaction of the class given."""
    options, pipeline = WAYS[way]
    engine = Engine(LARGE, options, Device.from_name("cuda"))
    if pipeline is not None:
        engine.use_pipeline(pipeline)
    store = MemoryStore(poison=last is MemoryTransaction)
    first = store.begin()
    engine.initialise(first, SEED)
    first.commit()
    losses = []
    try:
        for step in range(1, STEPS + 1):
            txn = store.begin() if step < STEPS else last(store)
            losses.append(
                engine.train_step(txn, batches_of(step), step=step, learning_rate=1e-3).loss
            )
            txn.commit()
    finally:
        engine.close()
    return store.arrays(), losses


def unlike(mine: Arrays, theirs: Arrays) -> list[str]:
    assert mine.keys() == theirs.keys()
    return [name for name in mine if not np.array_equal(mine[name], theirs[name])]


@pytest.mark.parametrize("way", WAYS)
def test_a_large_layer_streamed_is_resident(way: str, resident: tuple[Arrays, list[float]]) -> None:
    arrays, losses = streamed(way, MemoryTransaction)
    assert losses == resident[1]
    assert unlike(arrays, resident[0]) == []


def test_control_a_stale_layer_is_noticed(resident: tuple[Arrays, list[float]]) -> None:
    arrays, losses = streamed("plain", FirstReadStale)
    assert losses != resident[1]
    assert unlike(arrays, resident[0]) != []
