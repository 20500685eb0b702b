"""Where the pipeline puts a stage: nothing overlaps, nothing is left out, memory is as told."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.tiny_model import TINY, TINY_QWEN, TINY_TIED
from trainer.device import Device
from trainer.device_lanes import HostLanes, Lane
from trainer.engine import Engine, EngineOptions
from trainer.model.config import ModelConfig
from trainer.pipeline.footprint import PipelineSizes, bank_bytes, lasting_bytes
from trainer.pipeline.pipeline import PipelineSettings
from trainer.pipeline.shapes import Run, StageShape
from trainer.pipeline.trace import write_trace


def shapes_of(config: ModelConfig, tile_elements: int) -> dict[str, StageShape]:
    engine = Engine(config, EngineOptions(), Device.from_name("cpu"))
    engine.use_pipeline(PipelineSettings(sizes=PipelineSizes(tile_elements=tile_elements)))
    assert engine.pipeline is not None
    return engine.pipeline.shapes


def covered(runs: list[Run]) -> list[tuple[int, int]]:
    return sorted((run.start, run.start + run.count) for run in runs)


@pytest.mark.parametrize("tile_elements", [100, 1 << 20])
@pytest.mark.parametrize("config", [TINY, TINY_TIED, TINY_QWEN])
def test_tiles_cover_both_images_once(config: ModelConfig, tile_elements: int) -> None:
    for shape in shapes_of(config, tile_elements).values():
        for image, runs in (
            (shape.params, [run for tile in shape.tiles for run in tile.params_runs]),
            (shape.state, [run for tile in shape.tiles for run in tile.state_runs]),
        ):
            ends = covered(runs)
            assert (ends[0][0], ends[-1][1]) == (0, image.count)
            assert all(left[1] == right[0] for left, right in pairwise(ends))
        assert all(sum(p.count for p in t.pieces) <= tile_elements for t in shape.tiles)


@pytest.mark.parametrize("config", [TINY, TINY_TIED])
def test_lasting_memory_is_what_the_buffers_take(config: ModelConfig) -> None:
    engine = Engine(config, EngineOptions(dtype="bf16"), Device.from_name("cpu"))
    sizes = PipelineSizes(tile_elements=512)
    engine.use_pipeline(PipelineSettings(sizes=sizes))
    pipeline = engine.pipeline
    assert pipeline is not None
    held = pipeline.weights.nbytes
    for ring in (pipeline.params, pipeline.gradients, pipeline.tiles):
        held += sum(slot.buffer.nbytes for slot in ring.slots)
    shapes = list(pipeline.shapes.values())
    told = lasting_bytes(shapes, sizes, item_bytes=2, tied=config.tied_embeddings)
    assert told == held
    assert bank_bytes(shapes, half=True) < bank_bytes(shapes, half=False)


def test_a_trace_names_each_lane_once(tmp_path: Path) -> None:
    lanes = HostLanes()
    lanes.begin_trace()
    for lane in (Lane.COMPUTE, Lane.OUT, Lane.COMPUTE):
        with lanes.on(lane, "work"):
            pass
    write_trace(tmp_path / "trace.json", lanes.take_trace())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["compute", "out"]
    assert [e["tid"] for e in events if e["ph"] == "X"] == [0, 1, 0]
