"""Does streaming a step through a store give what resident training gives, bit for bit?

Every parameter, moment, loss and norm over 20 steps. The control arms break the engine in ways
that are easy to make by mistake, and the same comparison must notice each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import pytest

from shardb.views import ShardView
from tests.support.memory_transaction import MemoryStore, MemoryTransaction
from tests.support.resident import ResidentStep, ResidentTrainer
from tests.support.tiny_model import TINY, TINY_QWEN, TINY_TIED, micro_batches
from trainer.device import Device
from trainer.engine import Engine, EngineOptions, StepResult
from trainer.model.config import ModelConfig

STEPS = 20
SEED = 7
# Tight enough that clipping bites in most steps and not in all of them.
MAX_NORM = {"global": 1.4, "shard": 0.7, "none": 1.0}

READ_BY_RESIDENT = (
    *("dtype", "grad_clip_mode", "max_grad_norm", "lm_head_chunk_tokens", "optimizer"),
    *("beta1", "beta2", "adam_eps", "weight_decay", "weight_decay_scope"),
)


def options_of(dtype: str, clip: str, prefetch: str = "off", chunk: int = 16) -> EngineOptions:
    return EngineOptions(
        dtype=dtype,
        grad_clip_mode=clip,
        max_grad_norm=MAX_NORM[clip],
        lm_head_chunk_tokens=chunk,
        prefetch=prefetch,
    )


def learning_rate_of(step: int) -> float:
    return 3e-3 * step / STEPS


@dataclass(frozen=True, kw_only=True)
class ResidentRun:
    """What training in memory gave: every step, and the arrays after the last one."""

    steps: list[ResidentStep | None]
    arrays: dict[str, np.ndarray]


def run_resident(trainer: ResidentTrainer, accumulation: int, steps: int) -> ResidentRun:
    made = [
        trainer.step(micro_batches(step, accumulation), learning_rate_of(step))
        for step in range(1, steps + 1)
    ]
    return ResidentRun(steps=made, arrays=trainer.arrays())


@lru_cache(maxsize=64)
def known_run(
    config: ModelConfig, options: EngineOptions, accumulation: int, steps: int
) -> ResidentRun:
    """Give the run on a processor that every way of streaming these options is held against."""
    return run_resident(ResidentTrainer(config, options, SEED), accumulation, steps)


def as_resident(options: EngineOptions) -> EngineOptions:
    """Give the options as far as resident training reads them."""
    return EngineOptions(**{name: getattr(options, name) for name in READ_BY_RESIDENT})


class Comparison:
    """Trains both ways and collects every difference."""

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        accumulation: int,
        device: str = "cpu",
    ) -> None:
        self.engine = Engine(config, options, Device.from_name(device))
        self.config, self.options, self.device = config, options, device
        self.accumulation = accumulation
        self.store = MemoryStore()
        self.scales: list[float] = []
        with_initial = self.store.begin()
        self.engine.initialise(with_initial, SEED)
        with_initial.commit()

    @cached_property
    def resident(self) -> ResidentTrainer:
        """The reference, for who changes or replaces it; else that of an equal run is taken."""
        return ResidentTrainer(self.config, self.options, SEED, self.device)

    def expected(self) -> ResidentRun:
        """Train in memory. On a GPU, whose kernels depend on what is set, it is made each time."""
        if "resident" in self.__dict__ or self.device != "cpu":
            return run_resident(self.resident, self.accumulation, STEPS)
        return known_run(self.config, as_resident(self.options), self.accumulation, STEPS)

    def transaction(self, step: int) -> MemoryTransaction:
        assert step >= 1
        return self.store.begin()

    def train(self, step: int, rate: float) -> StepResult:
        """Make a step in a transaction of its own."""
        batches = micro_batches(step, self.accumulation)
        txn = self.transaction(step)
        streamed = self.engine.train_step(txn, batches, step=step, learning_rate=rate)
        txn.commit()
        return streamed

    def differences(self) -> list[str]:
        found: list[str] = []
        resident = self.expected()
        for step, expected in enumerate(resident.steps, start=1):
            streamed = self.train(step, learning_rate_of(step))
            self.scales.append(streamed.clip_scale)
            found.extend(
                f"step {step}: {field}"
                for field in ("loss", "grad_norm", "clip_scale")
                if getattr(streamed, field) != getattr(expected, field)
            )
            self.check_counts(streamed)
        mine, theirs = self.store.arrays(), resident.arrays
        assert mine.keys() == theirs.keys()
        return found + [name for name in mine if not np.array_equal(mine[name], theirs[name])]

    def check_counts(self, streamed: StepResult) -> None:
        limit = 2 if self.engine.options.prefetch == "cpu" else 1
        assert streamed.updated_shards == len(self.engine.stages)
        assert streamed.max_active_param_shards <= limit
        assert streamed.max_active_optimizer_shards <= limit


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("clip", ["global", "shard", "none"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("config", [TINY, TINY_TIED], ids=["untied", "tied"])
def test_streamed_equals_resident(
    config: ModelConfig, dtype: str, clip: str, accumulation: int
) -> None:
    comparison = Comparison(config, options_of(dtype, clip), accumulation)
    assert comparison.differences() == []
    if clip != "none":
        assert min(comparison.scales) < 1.0, "clipping never happened: the test shows nothing"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_biases_and_query_key_norms(dtype: str) -> None:
    assert Comparison(TINY_QWEN, options_of(dtype, "global"), 2).differences() == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("config", [TINY, TINY_TIED, TINY_QWEN], ids=["untied", "tied", "qwen"])
def test_keeping_activations_changes_nothing(config: ModelConfig, dtype: str) -> None:
    options = replace(options_of(dtype, "global"), activations="keep")
    assert Comparison(config, options, 2).differences() == []


@pytest.mark.parametrize("clip", ["global", "shard"])
def test_reading_ahead_changes_nothing(clip: str) -> None:
    assert Comparison(TINY, options_of("fp32", clip, prefetch="cpu"), 2).differences() == []


class SkippedUpdate(Comparison):
    """Control: at one step, one shard is committed as it was."""

    def transaction(self, step: int) -> MemoryTransaction:
        return SkippingTransaction(self.store) if step == 9 else super().transaction(step)


class SkippingTransaction(MemoryTransaction):
    def commit(self) -> None:
        old = self.read_base("params/block_001")
        for name, array in self._staged["params/block_001"].arrays().items():
            array[...] = old.array(name)
        super().commit()

    def read_base(self, name: str) -> ShardView:
        return self._store.shards[name]


class StaleBuffer(Comparison):
    """Control: at one step, the replay sees the shard of the step before."""

    previous: ShardView | None = None

    def transaction(self, step: int) -> MemoryTransaction:
        current = self.store.shards["params/block_001"]
        stale = self.previous
        self.previous = ShardView(current.name, current.layout, current.image.copy(), None)
        if step == 9:
            assert stale is not None
            return StaleTransaction(self.store, stale)
        return super().transaction(step)


class StaleTransaction(MemoryTransaction):
    def __init__(self, store: MemoryStore, stale: ShardView) -> None:
        super().__init__(store)
        self.stale = stale
        self.reads = 0

    def read(self, name: str) -> ShardView:
        self.reads += name == "params/block_001"
        return self.stale if name == "params/block_001" and self.reads == 2 else super().read(name)


@pytest.mark.parametrize("control", [SkippedUpdate, StaleBuffer])
@pytest.mark.parametrize("clip", ["global", "shard"])
def test_control_a_broken_step_is_noticed(control: type[Comparison], clip: str) -> None:
    assert control(TINY, options_of("fp32", clip), 1).differences() != []


def test_control_a_slightly_different_setting_is_noticed() -> None:
    comparison = Comparison(TINY, options_of("fp32", "global"), 1)
    comparison.engine = Engine(
        TINY,
        replace(comparison.options, beta2=0.9501),
        Device.from_name("cpu"),
    )
    assert comparison.differences() != []
