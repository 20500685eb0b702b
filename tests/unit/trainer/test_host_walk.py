"""Is the predicted host memory of a step what PyTorch's allocator hands out?

`tools/bench/host_grid.py` asks the same of a larger grid.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.tiny_model import TINY, TINY_QWEN, TINY_TIED
from tools.bench.host_grid import Steps, tensor_peak
from trainer.engine import EngineOptions
from trainer.host_walk import SCALARS_BYTES, predicted_host_bytes
from trainer.tape import _backward
from trainer.vram import StepShape

SHAPE = StepShape(
    model=replace(TINY, num_layers=4),
    options=EngineOptions(lm_head_chunk_tokens=64),
    micro_batch_size=8,
    accumulation=4,
    seq_len=64,
)


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({}, {}),
        ({"grad_clip_mode": "shard", "optimizer": "lion"}, {"model": TINY_TIED}),
        ({"activations": "keep", "dtype": "bf16"}, {"model": TINY_QWEN}),
        ({"optimizer": "adafactor", "grad_clip_mode": "shard"}, {"accumulation": 1}),
        ({"optimizer_state_dtype": "int8"}, {"accumulation": 1, "micro_batch_size": 1}),
        ({"master_weight_dtype": "bf16"}, {"accumulation": 1, "micro_batch_size": 1}),
    ],
    ids=str,
)
def test_the_prediction_is_the_allocators_peak(
    options: dict[str, Any], other: dict[str, Any]
) -> None:
    shape = replace(SHAPE, options=replace(SHAPE.options, **options), **other)
    step = Steps(shape)
    step()
    peak = tensor_peak(step)
    predicted = predicted_host_bytes(shape)
    assert peak <= predicted <= peak + SCALARS_BYTES


def test_control_a_boundary_that_is_held_too_long_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = []
    clear = _backward

    def holding(*given: Any) -> Any:
        held.append(given[0])
        return clear(*given)

    step = Steps(SHAPE)
    step()
    monkeypatch.setattr("trainer.tape._backward", holding)
    assert tensor_peak(step) > predicted_host_bytes(SHAPE)
    assert held
