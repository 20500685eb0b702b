"""Is the predicted host memory of a step with adapters what PyTorch's allocator hands out?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardb
from tests.support.adapters import adapter_engine, imported_store, plant_adapters, settings_of
from tools.bench.host_grid import tensor_peak
from trainer.lora.walk import predicted_adapter_bytes, predicted_adapter_phases
from trainer.model.adapter_settings import LoraSettings
from trainer.model.hf_family import hf_model
from trainer.model.stored import read_model
from trainer.options import EngineOptions
from trainer.vram import StepShape

# The walk is of tensors alone: what the step of a tiny model leaves beside them is small.
OVER_MAX = 1.01
KEEPING = {"options": EngineOptions(lm_head_chunk_tokens=64, activations="keep")}


def shape_of(store: Path, **changes: Any) -> StepShape:
    with shardb.open(store) as opened, opened.at() as view:
        model = read_model(view)
    shape = StepShape(
        model=model,
        options=EngineOptions(lm_head_chunk_tokens=64),
        micro_batch_size=8,
        accumulation=2,
        seq_len=64,
    )
    return replace(shape, **changes)


def measured(store: Path, shape: StepShape, lora: LoraSettings) -> int:
    """Give the most bytes that tensors of a whole first step of an engine take."""
    options: dict[str, Any] = {
        "lm_head_chunk_tokens": shape.options.lm_head_chunk_tokens,
        "activations": shape.options.activations,
    }
    rows = np.random.default_rng(1).integers(3, 64, (shape.micro_batch_size, shape.seq_len + 1))
    batches = [rows] * shape.accumulation

    def step() -> None:
        engine = adapter_engine(store, lora, **options)
        with shardb.open(store) as opened, opened.begin() as txn:
            engine.train_step(txn, batches, step=2, learning_rate=1e-3)

    step()
    if shape.model.hf_config:  # what its layers are handed is made in a first step
        hf_model(shape.model.hf_config)._handed.clear()
    return tensor_peak(step)


@pytest.mark.parametrize(
    ("model_type", "changes", "dropout"),
    [
        ("llama", {}, 0.0),
        ("llama", {}, 0.1),
        ("qwen3", {}, 0.0),
        ("qwen3", {"accumulation": 1, "micro_batch_size": 4}, 0.1),
        ("llama", KEEPING, 0.0),
        ("qwen3", KEEPING, 0.1),
    ],
)
def test_the_prediction_is_the_allocators_peak(
    model_type: str, changes: dict[str, Any], dropout: float, tmp_path: Path
) -> None:
    _, store = imported_store(tmp_path, model_type)
    lora = settings_of(model_type, dropout=dropout)
    plant_adapters(store, adapter_engine(store, lora))
    shape = shape_of(store, **changes)
    peak = measured(store, shape, lora)
    predicted = predicted_adapter_bytes(shape, lora, is_host=True)
    assert peak <= predicted <= OVER_MAX * peak, (peak, predicted)


@pytest.mark.parametrize("changes", [{}, KEEPING], ids=["again", "keeping"])
@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "phi", "phi3"])
def test_what_layers_of_transformers_are_handed_is_foretold(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    _, store = imported_store(tmp_path, model_type)
    lora = settings_of(model_type)
    plant_adapters(store, adapter_engine(store, lora))
    # Large enough that what a tiny model has beside its tensors counts little.
    shape = shape_of(store, micro_batch_size=32, **changes)
    peak = measured(store, shape, lora)
    predicted = predicted_adapter_bytes(shape, lora, is_host=True)
    assert peak <= predicted <= OVER_MAX * peak, (peak, predicted)


def test_a_packed_base_needs_smaller_slots_and_a_device_more_beside_them(tmp_path: Path) -> None:
    _, store = imported_store(tmp_path, "llama")
    shape = shape_of(store)
    lora = settings_of("llama")
    plain = predicted_adapter_phases(shape, lora, is_host=True)
    packed = predicted_adapter_phases(shape, settings_of("llama", base_quant="nf4"), is_host=True)
    assert packed["head"] < plain["head"]
    on_device = predicted_adapter_phases(shape, lora, is_host=False)
    assert all(on_device[phase] > held for phase, held in plain.items())
