"""Does the pipeline give the same bits when the processor updates some stages or all of them?

On a CPU both places have the same kernel. On a GPU they round otherwise, so there a run is held
against one that updates the same stages and begins no step ahead, and against itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.parity.test_optimizer_placement import SPLIT, on_host
from tests.parity.test_pipeline_equals_resident import BITES_SOMETIMES, Pipelined
from tests.parity.test_streamed_equals_resident import Comparison, options_of
from tests.support.tiny_model import TINY, TINY_TIED
from trainer.model.config import ModelConfig
from trainer.pipeline.host_side import HostSide

STEPS = 8


@pytest.mark.parametrize("stages", [(), SPLIT], ids=["cpu", "split"])
@pytest.mark.parametrize(
    ("config", "dtype", "clip", "settings"),
    [
        (TINY, "bf16", "global", {}),
        (TINY, "bf16", "global", {"gradients": "recompute"}),
        (TINY, "fp32", "global", {"gradients": "host"}),
        (TINY_TIED, "bf16", "shard", {}),
        (TINY_TIED, "fp32", "none", {"activations_on_host": True}),
    ],
)
def test_updates_on_the_processor_change_nothing(
    config: ModelConfig,
    dtype: str,
    clip: str,
    settings: dict[str, Any],
    stages: tuple[str, ...],
) -> None:
    options = options_of(dtype, clip)
    if clip == "global":
        options = replace(options, max_grad_norm=BITES_SOMETIMES[3])
    comparison = Pipelined(config, on_host(options, *stages), 3, **settings)
    pipeline = comparison.engine.pipeline
    assert pipeline is not None
    pipeline.keep_resident(["block_001", "embeddings"])
    assert comparison.differences() == []
    assert comparison.engine.pipeline_steps > 0
    assert "embeddings" not in pipeline.residents  # what the processor updates cannot stay


def test_control_an_update_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    update: Any = HostSide.update

    def copied(side: HostSide, *arguments: Any) -> Any:
        return update(side, *arguments[:-1], lambda: None)

    monkeypatch.setattr(HostSide, "update", copied)
    assert Pipelined(TINY, on_host(options_of("fp32", "none"), "block_001"), 1).differences() != []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("clip", ["global", "none"])
def test_on_a_gpu_the_plain_way_gives_the_same_bits(clip: str) -> None:
    options = on_host(options_of("bf16", clip), *SPLIT)
    if clip == "global":
        options = replace(options, max_grad_norm=BITES_SOMETIMES[1])
    plain, piped = Comparison(TINY, options, 1, "cuda"), Pipelined(TINY, options, 1, "cuda")
    scales = []
    for step in range(1, STEPS + 1):
        plain.train(step, 1e-3)
        scales.append(piped.train(step, 1e-3).clip_scale)
    one, two = plain.store.arrays(), piped.store.arrays()
    assert [name for name in one if (one[name] != two[name]).any()] == []
    assert piped.engine.pipeline_steps == STEPS
