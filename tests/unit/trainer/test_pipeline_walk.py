"""Is the predicted memory of the pipeline's steps what PyTorch's allocator hands out?

On a CPU the same code runs, in lanes that follow one another; what a GPU does otherwise (recorded
passes, its allocator, its libraries) is compared by `tools/bench/vram_grid.py --pipeline`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.tiny_model import TINY, TINY_TIED
from tools.bench.host_grid import Steps, tensor_peak
from trainer.engine import EngineOptions
from trainer.host_walk import SCALARS_BYTES
from trainer.model.presets import preset
from trainer.pipeline.footprint import PipelineSizes
from trainer.pipeline.pipeline import PipelineSettings
from trainer.pipeline.walk import _walked, predicted_pipeline_phases, predicted_spending
from trainer.preflight import need_of, vram_line
from trainer.recipe import Settings
from trainer.step_memory import device_need, step_bytes
from trainer.vram import StepShape

SHAPE = StepShape(
    model=replace(TINY, num_layers=2),
    options=EngineOptions(lm_head_chunk_tokens=64),
    micro_batch_size=8,
    accumulation=2,
    seq_len=64,
)
SIZES = PipelineSizes(tile_elements=512)
# Beside the tensors of the walk: norms and scales of each stage, a few bytes each.
BOUND_BYTES = SCALARS_BYTES


def observed(shape: StepShape, settings: PipelineSettings) -> int:
    """Give the most that was handed out, from the making of the pipeline on."""

    def steps() -> None:
        step = Steps(shape, settings)
        for _ in range(3):
            step()
        step.close()

    # Some processors have bf16 products of oneDNN, which takes room that no other one asks for.
    with torch.backends.mkldnn.flags(enabled=False):
        Steps(shape, settings)()  # what is made once, such as tables of angles, is made here
        return tensor_peak(steps)


def predicted(shape: StepShape, settings: PipelineSettings) -> int:
    return max(predicted_pipeline_phases(shape, settings, is_host=True).values())


@pytest.mark.parametrize(
    ("settings", "options", "other"),
    [
        ({}, {}, {}),
        ({"gradients": "recompute"}, {"dtype": "bf16"}, {"accumulation": 1}),
        ({"activations_on_host": True}, {"grad_clip_mode": "shard"}, {"model": TINY_TIED}),
    ],
    ids=str,
)
def test_the_prediction_is_the_allocators_peak(
    settings: dict[str, Any], options: dict[str, Any], other: dict[str, Any]
) -> None:
    shape = replace(SHAPE, options=replace(SHAPE.options, **options), **other)
    chosen = replace(PipelineSettings(sizes=SIZES), **settings)
    told, peak = predicted(shape, chosen), observed(shape, chosen)
    assert peak <= told <= peak + BOUND_BYTES


def test_control_one_slot_fewer_is_noticed() -> None:
    fewer = replace(SIZES, params_slots=SIZES.params_slots - 1)
    told = predicted(SHAPE, PipelineSettings(sizes=fewer))
    assert observed(SHAPE, PipelineSettings(sizes=SIZES)) > told + BOUND_BYTES


def test_a_gpus_prediction_has_the_recorded_passes_and_follows_the_settings() -> None:
    def told(**settings: Any) -> int:
        chosen = replace(PipelineSettings(sizes=SIZES), **settings)
        return max(predicted_pipeline_phases(SHAPE, chosen, is_host=False).values())

    assert told() > told(records_passes=False) > predicted(SHAPE, PipelineSettings(sizes=SIZES))
    assert told(gradients="recompute") < told()
    assert told(activations_on_host=True) < told()


@pytest.mark.parametrize("is_host", [True, False])
def test_more_blocks_are_carried_on_as_if_they_were_walked(is_host: bool) -> None:
    deep = replace(SHAPE, model=replace(TINY, num_layers=9), accumulation=1)
    settings = PipelineSettings(sizes=SIZES)
    carried = predicted_pipeline_phases(deep, settings, is_host=is_host)
    walked = _walked(deep, 9, settings=settings, is_host=is_host)
    lasting = {carried[phase] - walked[phase] for phase in carried}
    assert len(lasting) == 1


@pytest.mark.parametrize(("rows", "peak"), [(330, 7_847_335_424), (1031, 23_437_170_688)])
def test_recorded_blocks_that_are_compiled_are_foretold(rows: int, peak: int) -> None:
    """Peaks that steps took on an H200: `docs/evidence.md`, most rows in one micro-batch."""
    options = EngineOptions(
        dtype="bf16",
        compile_blocks=True,
        lm_head_chunk_tokens=2048,
        activation_placement="host",
    )
    shape = StepShape(
        model=preset("perkunas-v2.9-100m"),
        options=options,
        micro_batch_size=rows,
        accumulation=1,
        seq_len=512,
    )
    way = PipelineSettings(activations_on_host=True, gradients="recompute")
    foretold = max(predicted_pipeline_phases(shape, way, is_host=False).values())
    assert peak <= foretold <= 1.01 * peak


@pytest.mark.parametrize("placement", ["vram", "host"])
def test_a_budget_is_never_exceeded_by_the_prediction(placement: str) -> None:
    shape = replace(SHAPE, options=replace(SHAPE.options, activation_placement=placement))
    way = PipelineSettings(activations_on_host=placement == "host")
    on = Settings(data_dir="rows", device_pipeline="on")
    alone = step_bytes(shape, on)
    _, _, every = predicted_spending(shape, way, 1 << 40)
    margin = PipelineSizes().margin_bytes
    for budget in (alone + margin + every // 2, alone + margin + 2 * every):
        need = device_need(shape, replace(on, vram_budget=str(budget)))
        assert alone <= need.most_bytes <= budget - margin
        assert 0 < need.kept <= need.stages
        assert vram_line(need, 2 * budget, budget).share <= 1
    assert need.most_bytes == alone + every
    small = need_of(shape, None, replace(on, vram_budget=str(alone - 1)))
    line = vram_line(small, 2 * alone, alone - 1)
    assert line.share > 1
    assert "--vram-budget" in line.remedy
    assert step_bytes(shape, replace(on, device_pipeline="off")) != alone
