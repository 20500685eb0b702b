"""Does the pipeline with state in bf16 give what resident training with it gives, bit for bit?

The resident side rounds the moments anew, in numpy, after each step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.parity.test_encodings import ResidentEncoded, encoded_options
from tests.parity.test_pipeline_equals_resident import BITES_SOMETIMES, DEVICES, Pipelined
from tests.support.tiny_model import TINY, TINY_TIED
from trainer.engine import EngineOptions
from trainer.model.config import ModelConfig
from trainer.pipeline.pipeline import is_supported


class PipelinedEncoded(Pipelined):
    """The comparison, with bf16 state on both sides, or on the pipeline's alone."""

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        accumulation: int,
        device: str,
        *,
        resident_state: str = "bf16",
        **settings: Any,
    ) -> None:
        super().__init__(config, options, accumulation, device, **settings)
        theirs = replace(options, optimizer_state_dtype=resident_state)
        self.resident = ResidentEncoded(config, theirs, device)


def options_with(clip: str, accumulation: int) -> EngineOptions:
    options = encoded_options("bf16", clip, optimizer_state_dtype="bf16")
    return replace(options, max_grad_norm=BITES_SOMETIMES[accumulation])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("config", "clip", "accumulation", "settings"),
    [
        (TINY, "global", 1, {"gradients": "recompute"}),
        (TINY, "global", 3, {"activations_on_host": True}),
        (TINY_TIED, "shard", 1, {}),
    ],
)
def test_bf16_state_through_the_pipeline_equals_resident(
    config: ModelConfig, clip: str, accumulation: int, settings: dict[str, Any], device: str
) -> None:
    comparison = PipelinedEncoded(
        config, options_with(clip, accumulation), accumulation, device, **settings
    )
    assert comparison.differences() == []
    assert min(comparison.scales) < 1.0, "clipping never happened: the test shows nothing"


def test_stages_that_stay_keep_bf16_state() -> None:
    comparison = PipelinedEncoded(TINY, options_with("global", 1), 1, "cpu")
    pipeline = comparison.engine.pipeline
    assert pipeline is not None
    pipeline.keep_resident(["block_001", "embeddings"])
    pipeline.tiles.grow(6)
    assert comparison.differences() == []


def test_control_fp32_state_is_not_the_same() -> None:
    comparison = PipelinedEncoded(TINY, options_with("shard", 1), 1, "cpu", resident_state="fp32")
    found = comparison.differences()
    assert any(name.startswith("params/") for name in found), found


def test_codes_in_blocks_take_the_plain_way() -> None:
    assert not is_supported(encoded_options("bf16", "shard", optimizer_state_dtype="int8"))
