"""Does the periodic normaliser, streamed, give what resident training gives, bit for bit?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.parity.test_streamed_equals_resident import SEED, learning_rate_of, options_of
from tests.support.memory_transaction import MemoryStore
from tests.support.resident import ResidentTrainer
from tests.support.tiny_model import TINY, TINY_TIED, micro_batches
from trainer.device import Device
from trainer.engine import Engine, StepResult
from trainer.model.config import ModelConfig

STEPS = 12
EVERY = 3


class NormalisedComparison:
    """Trains both ways; `results` are the streamed side's."""

    resident_every = EVERY

    def __init__(
        self, config: ModelConfig, clip: str, dtype: str, accumulation: int, device: str = "cpu"
    ) -> None:
        options = replace(
            options_of(dtype, clip), global_optimizer_every=EVERY, global_optimizer_blend=0.7
        )
        self.engine = Engine(config, options, Device.from_name(device))
        self.resident = ResidentTrainer(config, options, SEED, device)
        self.store = MemoryStore()
        self.accumulation = accumulation
        self.results: list[StepResult] = []
        first = self.store.begin()
        self.engine.initialise(first, SEED)
        first.commit()

    def differences(self) -> list[str]:
        found: list[str] = []
        for step in range(1, STEPS + 1):
            batches, rate = micro_batches(step, self.accumulation), learning_rate_of(step)
            txn = self.store.begin()
            result = self.engine.train_step(txn, batches, step=step, learning_rate=rate)
            txn.commit()
            self.results.append(result)
            is_normalised = step % self.resident_every == 0
            expected = self.resident.step(batches, rate, is_normalised=is_normalised)
            assert expected is not None
            found += [
                f"step {step}: {field}"
                for field in ("loss", "grad_norm", "clip_scale")
                if getattr(result, field) != getattr(expected, field)
            ]
        mine, theirs = self.store.arrays(), self.resident.arrays()
        assert mine.keys() == theirs.keys()
        return found + [name for name in mine if not np.array_equal(mine[name], theirs[name])]


@pytest.mark.parametrize(
    ("config", "clip", "dtype", "accumulation"),
    [
        (TINY, "shard", "fp32", 1),
        (TINY, "global", "bf16", 3),
        (TINY, "none", "fp32", 3),
        (TINY_TIED, "shard", "bf16", 1),
    ],
)
def test_streamed_equals_resident(
    config: ModelConfig, clip: str, dtype: str, accumulation: int
) -> None:
    comparison = NormalisedComparison(config, clip, dtype, accumulation)
    assert comparison.differences() == []
    records = [result.normaliser for result in comparison.results]
    assert [record is not None for record in records] == [
        step % EVERY == 0 for step in range(1, STEPS + 1)
    ]
    for record in records:
        if record is not None:
            assert record["raw_scale_min"] < 1.0 < record["raw_scale_max"]
            assert 1.0 + 0.7 * (0.5 - 1.0) <= record["applied_scale_min"] < 1.0
            assert 1.0 < record["applied_scale_max"] <= 1.0 + 0.7 * (2.0 - 1.0)
            assert record["target_grad_rms"] > 0.0
    assert all(result.max_active_param_shards == 1 for result in comparison.results)


class NeverNormalised(NormalisedComparison):
    """Control: the resident side leaves it out."""

    resident_every = STEPS + 1


def test_control_a_run_without_it_is_noticed() -> None:
    assert NeverNormalised(TINY, "shard", "fp32", 1).differences() != []
