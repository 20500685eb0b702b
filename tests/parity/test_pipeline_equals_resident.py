"""Does the pipeline give what resident training gives, bit for bit?

On a CPU its lanes run one after the other, so this holds what is computed and in which buffers it
lies; with `poison` each slot is NaN once it is given back. On a GPU the same runs overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.parity.test_streamed_equals_resident import Comparison, SkippedUpdate, options_of
from tests.support.tiny_model import TINY, TINY_QWEN, TINY_TIED, micro_batches
from trainer.engine import EngineOptions, StepResult
from trainer.errors import NonFiniteError
from trainer.model.config import ModelConfig
from trainer.pipeline.feeding import Brought
from trainer.pipeline.footprint import PipelineSizes
from trainer.pipeline.pipeline import PipelineSettings
from trainer.pipeline.updating import Updates

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
    # Not the device that CUDA takes where none is named.
    pytest.param(
        "cuda:1",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
        ],
    ),
]
# Tiles smaller than a matrix, so that one is cut.
SMALL = PipelineSizes(tile_elements=512)
# Limits of the norm that some steps exceed and some do not, by micro-batches.
BITES_SOMETIMES = {1: 3.0, 3: 1.8}


class Pipelined(Comparison):
    """The comparison, with the engine's steps through the pipeline."""

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        accumulation: int,
        device: str = "cpu",
        **settings: object,
    ) -> None:
        super().__init__(config, options, accumulation, device)
        chosen = replace(PipelineSettings(sizes=SMALL, poison=True), **settings)
        self.engine.use_pipeline(chosen)
        self.ahead: list[np.ndarray] | None = None

    def train(self, step: int, rate: float) -> StepResult:
        """Let the engine begin the step after this one, from what this one staged."""
        batches = self.ahead if self.ahead is not None else micro_batches(step, self.accumulation)
        self.ahead = None

        def following() -> list[np.ndarray]:
            self.ahead = micro_batches(step + 1, self.accumulation)
            return self.ahead

        txn = self.transaction(step)
        result = self.engine.train_step(
            txn, batches, step=step, learning_rate=rate, next_rows=following
        )
        txn.commit()
        return result

    def check_counts(self, streamed: StepResult) -> None:
        assert streamed.updated_shards == len(self.engine.stages)
        assert self.engine.pipeline_steps > 0


@pytest.fixture(autouse=True)
def same_kernels_in_the_same_order() -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("config", "dtype", "clip", "accumulation"),
    [
        (TINY, "bf16", "global", 1),
        (TINY, "bf16", "global", 3),
        (TINY, "fp32", "shard", 3),
        (TINY_TIED, "bf16", "shard", 1),
        (TINY_TIED, "fp32", "global", 1),
        (TINY_TIED, "bf16", "none", 3),
    ],
)
def test_pipeline_equals_resident(
    config: ModelConfig, dtype: str, clip: str, accumulation: int, device: str
) -> None:
    options = options_of(dtype, clip)
    if clip == "global":
        options = replace(options, max_grad_norm=BITES_SOMETIMES[accumulation])
    comparison = Pipelined(config, options, accumulation, device)
    assert comparison.differences() == []
    if clip != "none":
        assert min(comparison.scales) < 1.0, "clipping never happened: the test shows nothing"
    if clip == "global":
        assert max(comparison.scales) == 1.0, "no update was made ahead of the norm"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "setting", [{"activations_on_host": True}, {"gradients": "host"}, {"gradients": "recompute"}]
)
def test_where_tensors_wait_changes_nothing(setting: dict[str, Any], device: str) -> None:
    options = replace(options_of("bf16", "global"), max_grad_norm=BITES_SOMETIMES[3])
    comparison = Pipelined(TINY_QWEN, options, 3, device, **setting)
    assert comparison.differences() == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("config", "clip"), [(TINY, "global"), (TINY_TIED, "shard")])
def test_what_a_budget_is_spent_on_changes_nothing(
    config: ModelConfig, clip: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not a divisor of the width: the last columns of the embeddings are fewer.
    monkeypatch.setattr("trainer.pipeline.graphs.COLUMNS_BYTES", 4 * config.vocab_size * 7)
    comparison = Pipelined(config, options_of("bf16", clip), 2, device)
    pipeline = comparison.engine.pipeline
    assert pipeline is not None
    pipeline.keep_resident(["block_001", "embeddings"])
    pipeline.tiles.grow(6)
    pipeline.gradients.grow(4)
    assert comparison.differences() == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gradients", ["vram", "recompute"])
def test_what_a_budget_keeps_in_the_middle_of_a_run_changes_nothing(
    gradients: str, device: str
) -> None:
    class Filling(Pipelined):
        """At some steps more stages stay, among them what the step before left in slots."""

        def train(self, step: int, rate: float) -> StepResult:
            result = super().train(step, rate)
            assert self.engine.pipeline is not None
            if step in (3, 6):
                self.engine.pipeline.keep_resident(["embeddings"] if step == 3 else ["block_000"])
            return result

    options = replace(options_of("bf16", "global"), max_grad_norm=BITES_SOMETIMES[1])
    assert Filling(TINY, options, 1, device, gradients=gradients).differences() == []


def test_control_a_skipped_update_is_noticed() -> None:
    class Skipped(Pipelined, SkippedUpdate):
        """Both."""

    assert Skipped(TINY, options_of("fp32", "global"), 1).differences() != []


def test_control_a_slot_that_is_given_back_too_early_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(updates: Updates, brought: Brought, gradients: Tensor, ready: object) -> None:
        gradients.fill_(float("nan"))  # what a slot holds once it is given back
        update(updates, brought, gradients, None)

    update = Updates.update
    monkeypatch.setattr(Updates, "update", late)
    with pytest.raises(NonFiniteError):
        Pipelined(TINY, options_of("fp32", "none"), 1).differences()
