"""Does fp16 with a dynamic loss scale, streamed, give what resident training gives, bit for bit?

The scale begins so high that the first steps overflow, and grows often, so that it overflows again.
The resident side keeps a scale of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.parity.test_streamed_equals_resident import SEED, learning_rate_of, options_of
from tests.support.memory_transaction import MemoryStore
from tests.support.resident import ResidentTrainer
from tests.support.tiny_model import TINY, TINY_TIED, micro_batches
from trainer.device import Device
from trainer.engine import Engine
from trainer.errors import GradientOverflowError, NonFiniteError
from trainer.model.config import ModelConfig
from trainer.scaler import LossScaler

BATCHES = 26
FIRST_SCALE = 2.0**24
GROWTH_STEPS = 4
SAMPLED = [(TINY, "global", 1), (TINY, "shard", 3), (TINY, "none", 1), (TINY_TIED, "global", 3)]


@dataclass
class ResidentScale:
    """The reference: halve on overflow, double after enough good steps."""

    scale: float = FIRST_SCALE
    good: int = 0

    def note(self, *, overflowed: bool) -> None:
        self.good = 0 if overflowed else self.good + 1
        if overflowed:
            self.scale *= 0.5
        elif self.good == GROWTH_STEPS:
            self.scale, self.good = min(self.scale * 2.0, FIRST_SCALE), 0


class Fp16Comparison:
    """Trains both ways over the same batches; some are skipped."""

    growth_steps = GROWTH_STEPS

    def __init__(
        self, config: ModelConfig, clip: str, accumulation: int, device: str = "cpu"
    ) -> None:
        options = options_of("fp16", clip)
        self.engine = Engine(config, options, Device.from_name(device))
        self.resident = ResidentTrainer(config, options, SEED, device)
        self.store = MemoryStore()
        self.accumulation = accumulation
        self.skipped: list[int] = []
        self.losses: list[float] = []
        first = self.store.begin()
        self.engine.initialise(first, SEED)
        first.commit()

    def differences(self) -> list[str]:
        found: list[str] = []
        scaler, reference, step = LossScaler(scale=FIRST_SCALE), ResidentScale(), 1
        for number in range(1, BATCHES + 1):
            batches = micro_batches(number, self.accumulation)
            rate = learning_rate_of(step)
            expected = self.resident.step(batches, rate, loss_scale=reference.scale)
            reference.note(overflowed=expected is None)
            txn = self.store.begin()
            try:
                result = self.engine.train_step(
                    txn, batches, step=step, learning_rate=rate, loss_scale=scaler.scale
                )
            except GradientOverflowError:
                self.skipped.append(number)
                scaler = scaler.after_overflow()
                found += [] if expected is None else [f"batch {number}: skipped"]
                continue
            txn.commit()
            step += 1
            scaler = scaler.after_success(self.growth_steps)
            self.losses.append(result.loss)
            found += [
                f"batch {number}: {field}"
                for field in ("loss", "grad_norm", "clip_scale")
                if getattr(result, field) != getattr(expected, field, None)
            ]
        mine, theirs = self.store.arrays(), self.resident.arrays()
        assert mine.keys() == theirs.keys()
        return found + [name for name in mine if not np.array_equal(mine[name], theirs[name])]


@pytest.mark.parametrize(("config", "clip", "accumulation"), SAMPLED)
def test_streamed_equals_resident(config: ModelConfig, clip: str, accumulation: int) -> None:
    comparison = Fp16Comparison(config, clip, accumulation)
    assert comparison.differences() == []
    assert {1, 2} <= set(comparison.skipped), "nothing overflowed at the start"
    assert len(comparison.skipped) < comparison.skipped[-1], "the scale never grew too large again"
    assert len(comparison.losses) >= 12


class OtherGrowth(Fp16Comparison):
    """Control: the streamed side's scale grows a step later."""

    growth_steps = GROWTH_STEPS + 1


def test_control_another_growth_is_noticed() -> None:
    assert OtherGrowth(TINY, "global", 1).differences() != []


@pytest.mark.parametrize("clip", ["global", "shard"])
def test_an_overflow_leaves_nothing_behind(clip: str) -> None:
    comparison = Fp16Comparison(TINY, clip, 1)
    before = {name: array.copy() for name, array in comparison.store.arrays().items()}
    with pytest.raises(GradientOverflowError, match=r"params/.* overflowed at loss scale"):
        comparison.engine.train_step(
            comparison.store.begin(),
            micro_batches(1, 1),
            step=1,
            learning_rate=1e-3,
            loss_scale=FIRST_SCALE,
        )
    after = comparison.store.arrays()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_an_overflow_is_told_from_a_true_nan() -> None:
    comparison = Fp16Comparison(TINY, "global", 1)
    engine, store, batches = comparison.engine, comparison.store, micro_batches(1, 1)
    assert engine.find_non_finite(store, batches) is None
    store.shards["params/block_001"].image.flags.writeable = True
    store.shards["params/block_001"].array("mlp.up_proj.weight")[0, 0] = np.nan
    error = engine.find_non_finite(store, batches)
    assert isinstance(error, NonFiniteError)
    assert error.shard == "params/block_001"
    with pytest.raises(NonFiniteError) as raised:
        engine.train_step(store.begin(), batches, step=1, learning_rate=1e-3, loss_scale=2.0**16)
    assert not isinstance(raised.value, GradientOverflowError), "no scale can mend it"


def test_gradients_too_small_for_fp16_need_the_scale() -> None:
    """Control for scaling itself: without it the same training differs."""
    options = replace(options_of("fp16", "none"), lm_head_chunk_tokens=16)
    norms = []
    for scale in (1.0, 2.0**10):
        comparison = Fp16Comparison(TINY, "none", 1)
        comparison.engine = Engine(TINY, options, Device.from_name("cpu"))
        result = comparison.engine.train_step(
            comparison.store.begin(),
            micro_batches(1, 1),
            step=1,
            learning_rate=1e-3,
            loss_scale=scale,
        )
        norms.append(result.grad_norm)
    assert norms[0] != norms[1]
