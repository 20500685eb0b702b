"""Does training through the real store give the bytes of resident training, and keep them?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shardb
from tests.support.resident import ResidentTrainer
from tests.support.tiny_model import TINY, TINY_TIED, micro_batches
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.model.config import ModelConfig

STEPS = 6
RATE = 1e-3


@pytest.mark.parametrize("config", [TINY, TINY_TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("prefetch", ["off", "cpu"])
def test_store_equals_memory(
    config: ModelConfig, dtype: str, prefetch: str, tmp_path: Path
) -> None:
    options = EngineOptions(dtype=dtype, prefetch=prefetch, lm_head_chunk_tokens=16)
    engine = Engine(config, options, Device.from_name("cpu"))
    resident = ResidentTrainer(config, options, seed=3)
    with shardb.open(tmp_path / "run", create=True) as store, store.begin() as txn:
        engine.initialise(txn, 3)
        txn.commit(step=0)
    for step in range(1, STEPS + 1):
        batches = micro_batches(step, 2)
        # Opened anew for each step: nothing may live only in memory.
        with shardb.open(tmp_path / "run") as store, store.begin() as txn:
            result = engine.train_step(txn, batches, step=step, learning_rate=RATE)
            txn.commit(step=step)
        expected = resident.step(batches, RATE)
        assert (result.loss, result.grad_norm) == (expected.loss, expected.grad_norm)
    with shardb.open(tmp_path / "run") as store, store.at(step=STEPS) as view:
        stored = {
            f"{name}:{tensor}": array.copy()
            for name in view.names()
            for tensor, array in view.read(name).arrays().items()
        }
    expected_arrays = resident.arrays()
    assert stored.keys() == expected_arrays.keys()
    assert [n for n in stored if not np.array_equal(stored[n], expected_arrays[n])] == []


def test_a_step_that_fails_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    engine = Engine(TINY, EngineOptions(), Device.from_name("cpu"))
    with shardb.open(tmp_path / "run", create=True) as store:
        with store.begin() as txn:
            engine.initialise(txn, 3)
            before = txn.commit(step=0)
        with store.begin() as txn:
            engine.train_step(txn, micro_batches(1, 1), step=1, learning_rate=RATE)
        assert store.resolve("main").id == before.id
