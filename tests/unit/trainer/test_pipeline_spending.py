"""What is spare memory spent on, and in which order is what stays there written?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny_model import TINY
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.pipeline.boundaries import OnHost
from trainer.pipeline.footprint import (
    PipelineSizes,
    growth_bytes,
    resident_bytes,
    small_stages,
    spending,
)
from trainer.pipeline.pipeline import FILLING_STEPS, Pipeline, PipelineSettings
from trainer.pipeline.shapes import ImageShape, StageShape
from trainer.pipeline.writing import HELD_SHARE, Target, new_writes

DEEP = replace(TINY, num_layers=10)
SIZES = PipelineSizes(tile_elements=512)


def pipeline_of(sizes: PipelineSizes = SIZES) -> Pipeline:
    engine = Engine(DEEP, EngineOptions(), Device.from_name("cpu"))
    engine.use_pipeline(PipelineSettings(sizes=sizes))
    assert engine.pipeline is not None
    return engine.pipeline


def shapes() -> dict[str, StageShape]:
    return dict(pipeline_of().shapes)


def needed_of(known: dict[str, StageShape]) -> dict[str, int]:
    """Give what stages take, without those that stay anyway."""
    always = small_stages(known)
    assert always == ["final_norm"]
    return {n: resident_bytes(shape) for n, shape in known.items() if n not in always}


@pytest.mark.parametrize(("spare_slots", "slots"), [(0, 3), (1, 4), (2.5, 5), (4, 6)])
def test_are_there_as_many_more_tiles_as_a_small_budget_has_room_for(
    spare_slots: float, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(DEEP, EngineOptions(), Device.from_name("cpu"))
    sizes = replace(SIZES, tile_elements=5 << 9)
    engine.use_pipeline(PipelineSettings(sizes=sizes, vram_budget_bytes=1 << 30))
    pipeline = engine.pipeline
    assert pipeline is not None
    tile_bytes = max(shape.tile_bytes for shape in pipeline.shapes.values())
    assert 8 * tile_bytes < resident_bytes(pipeline.shapes["block_000"])
    free = sizes.margin_bytes + int(spare_slots * tile_bytes)
    monkeypatch.setattr(Device, "peak_bytes", lambda _: (1 << 30) - free)
    for pipeline.steps_done in FILLING_STEPS:
        pipeline.fill_budget()
    assert len(pipeline.tiles) == slots
    assert [*pipeline.residents] == ["final_norm"]


@pytest.mark.parametrize(("spare_slots", "slots"), [(5, 8), (4, 3)])
def test_do_hidden_states_on_the_host_get_slots_before_anything_else(
    spare_slots: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = PipelineSettings(sizes=SIZES, activations_on_host=True, vram_budget_bytes=1 << 30)
    engine = Engine(DEEP, EngineOptions(), Device.from_name("cpu"))
    engine.use_pipeline(settings)
    pipeline = engine.pipeline
    assert isinstance(pipeline, Pipeline)
    assert isinstance(pipeline.boundaries, OnHost)
    pipeline.boundaries.keep(0, 0, torch.zeros(5, 7))
    pipeline.boundaries.begin_replay([(0, 0)])
    slot_bytes = pipeline.boundaries.slot_bytes
    assert slot_bytes == 4 * 5 * 7
    free = SIZES.margin_bytes + spare_slots * slot_bytes
    monkeypatch.setattr(Device, "peak_bytes", lambda _: (1 << 30) - free)
    for pipeline.steps_done in FILLING_STEPS:
        pipeline.fill_budget()
    assert pipeline.boundaries._ring is not None
    assert len(pipeline.boundaries._ring) == slots


def test_are_slots_left_out_where_every_stage_can_stay() -> None:
    known = shapes()
    everything = sum(needed_of(known).values())
    chosen = spending(known, SIZES, everything)
    assert chosen.more_tiles == 0
    assert not chosen.more_gradients
    assert set(chosen.stages) == set(known)
    less = spending(known, SIZES, everything - 1)
    assert less.more_tiles == SIZES.more_tile_slots - SIZES.tile_slots
    assert less.more_gradients


def test_do_kept_stages_lie_apart_from_one_another() -> None:
    known = shapes()
    block = resident_bytes(known["block_000"])
    spare = sum(growth_bytes([*known.values()], SIZES)) + resident_bytes(known["embeddings"])
    chosen = spending(known, SIZES, spare + 4 * block)
    assert chosen.more_gradients
    assert set(chosen.stages) == {"final_norm", "embeddings", "block_000"} | {
        f"block_{n:03}" for n in (2, 4, 8)
    }


def test_is_no_more_spent_than_there_is_and_little_left() -> None:
    known = shapes()
    needed = needed_of(known)
    everything, grown = sum(needed.values()), set()
    for spare in range(0, 2 * everything, everything // 40):
        chosen = spending(known, SIZES, spare)
        left = spare - sum(needed.get(n, 0) for n in chosen.stages) - chosen.slot_bytes
        grown.add((chosen.more_tiles > 0, chosen.more_gradients))
        assert left >= 0
        assert set(chosen.stages) == set(known) or left < max(needed.values())
    assert grown == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize(
    ("residents", "later"),
    [
        ([], set()),
        # Something that is written from a slot comes behind it.
        (["block_004", "block_008"], {"block_004", "block_008"}),
        (["embeddings", "block_000"], {"embeddings", "block_000"}),
        ([*shapes()], {"embeddings", "block_000"}),
    ],
)
def test_may_what_resident_stages_write_wait(residents: list[str], later: set[str]) -> None:
    pipeline = pipeline_of()
    pipeline.keep_resident(residents)
    order = list(reversed(list(pipeline.shapes.items())))
    common = pipeline.lanes, pipeline.sealer, order, pipeline.residents, 512
    writes = new_writes(*common, activations_on_host=False)
    assert later <= writes.later <= {*residents, "final_norm"}
    assert 0 < writes.held_bytes_max < sum(resident_bytes(shape) for _, shape in order) / 2
    assert new_writes(*common, activations_on_host=True).held_bytes_max == 0


def test_does_what_is_held_grow_with_what_was_updated() -> None:
    """Else a link that has time while a resident is computed stands still until the end."""
    pipeline = pipeline_of()
    names = [*reversed(list(pipeline.shapes))]
    residents = names[3::2]
    pipeline.keep_resident(residents)
    order = [(name, pipeline.shapes[name]) for name in names]
    common = pipeline.lanes, pipeline.sealer, order, pipeline.residents, 512
    writes = new_writes(*common, activations_on_host=False)
    passed = 0
    for name, shape in order:
        images = shape.params, shape.state
        staged: list[Any] = [
            Staged(f"{kind}/{name}", each) for kind, each in zip(KINDS, images, strict=True)
        ]
        targets = [
            Target(staged=one, elements=torch.empty(each.count), shape=each)
            for one, each in zip(staged, images, strict=True)
        ]
        resident = pipeline.residents.get(name)
        if resident is None:
            count = max(tile.state_count for tile in shape.tiles)
            for tile in shape.tiles:
                writes.tile(name, tile, torch.empty(shape.count), torch.empty(count), targets)
        else:
            writes.whole(name, resident, targets)
        passed += resident_bytes(shape)
        assert writes._passed_bytes == passed
        assert writes._held_bytes <= HELD_SHARE * passed
    assert writes._held_bytes > 0
    # None is far ahead of another: one thread digests an image, and slower than it could come.
    behind = {}
    for share, _, part in sorted(writes._held):
        behind.setdefault(id(part.target), share - part.count / part.target.shape.count)
    assert len(behind) > 2
    assert max(behind.values()) - min(behind.values()) <= max(
        512 / part.target.shape.count for _, _, part in writes._held
    )
    writes.flush()
    assert not writes._held
    assert set(writes.staged) == {f"{k}/{n}" for k in KINDS for n in names}
    assert all(each.written is None for each in writes.staged.values())


KINDS = ("params", "optim")


class Staged:
    """A staged image without bytes."""

    def __init__(self, name: str, shape: ImageShape) -> None:
        self.name = name
        self.image = np.empty(shape.start_bytes, dtype=np.uint8)

    def filled(self, size_bytes: int) -> None:
        """It has no bytes."""

    def seal(self) -> None:
        """It has no bytes."""
