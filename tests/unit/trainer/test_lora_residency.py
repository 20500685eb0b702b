from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import shardb
from tests.support.adapters import (
    adapter_engine,
    adapter_gradients,
    imported_store,
    plant_adapters,
    settings_of,
)
from trainer.device import Device
from trainer.lora.exact_trace import exact_bytes
from trainer.lora.feeding import DeviceBase
from trainer.lora.model import brought_bytes
from trainer.lora.need import adapter_need
from trainer.lora.residency import MARGIN_BYTES, STEPS_SEEN, Residency, kept_count, spread
from trainer.lora.small_copies import copy_small
from trainer.model.stored import read_model
from trainer.options import EngineOptions
from trainer.vram import StepShape

ROWS = [np.random.default_rng(5).integers(3, 64, (2, 13))]


@pytest.mark.parametrize(
    ("budget", "kept"),
    [(0, 0), (MARGIN_BYTES + 100, 0), (MARGIN_BYTES + 125, 2), (MARGIN_BYTES + 10_000, 3)],
)
def test_as_many_blocks_stay_as_fit_beside_a_step(budget: int, kept: int) -> None:
    assert kept_count(budget, 100, 10, 3) == kept


@pytest.mark.parametrize(("count", "chosen"), [(0, ""), (1, "e"), (2, "cg"), (4, "bdfh")])
def test_those_that_stay_are_spread(count: int, chosen: str) -> None:
    assert spread(list("abcdefgh"), count) == list(chosen)
    assert spread(list("abc"), 3) == list("abc")


def test_blocks_stay_once_steps_were_seen_and_only_with_a_budget(tmp_path: Path) -> None:
    _, store = imported_store(tmp_path, "llama")
    engine = adapter_engine(store, settings_of("llama"))
    plant_adapters(store, engine)
    _, expected = adapter_gradients(store, engine, ROWS)
    base = DeviceBase(Device.from_name("cpu"), torch.float32)
    object.__setattr__(engine.adapted, "base", base)
    block = next(stage for stage in engine.adapted.trunk if stage.is_block)
    size = exact_bytes(brought_bytes(block, torch.float32))
    for budget, count in ((None, 0), (MARGIN_BYTES + 2 * size, 2)):
        residency = Residency(engine.adapted, budget)
        for _ in range(STEPS_SEEN + 1):
            assert not base.resident_names
            residency.stepped()
            if budget is not None and base.resident_names:
                break
        assert len(base.resident_names) == count
    _, found = adapter_gradients(store, engine, ROWS)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_a_budget_is_foretold_to_be_filled_and_never_exceeded(tmp_path: Path) -> None:
    _, store = imported_store(tmp_path, "llama")
    with shardb.open(store) as opened, opened.at() as view:
        model = read_model(view)
    shape = StepShape(
        model=model, options=EngineOptions(), micro_batch_size=2, accumulation=1, seq_len=16
    )
    lora = settings_of("llama")
    plain = adapter_need(shape, lora, None)
    assert (plain.stages, plain.kept) == (0, 0)
    tight = adapter_need(shape, lora, plain.most_bytes)
    assert (tight.kept, tight.most_bytes) == (0, plain.most_bytes)
    wide = adapter_need(shape, lora, plain.most_bytes + (1 << 30))
    assert wide.kept == wide.stages == model.num_layers
    assert plain.most_bytes < wide.most_bytes < plain.most_bytes + (1 << 30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_small_copy_has_the_bytes(dtype: torch.dtype) -> None:
    source = torch.arange(12).view(3, 4).to(dtype)
    target = torch.zeros(3, 4, dtype=dtype)
    copy_small(source, target)
    assert torch.equal(source, target)
