"""Does the bracket hold where a step is mostly asking for operations, and where it is not?

Nothing is timed here. What steps of small models took on one core of a processor is written down,
by its own time, with the rates that were measured beside them; in fp32, adapters of rank 8 on two
matrices. The first three are of the geometry of stories260K.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tools.bench.lora_grid import QV
from trainer.ceiling import Ceiling
from trainer.lora.forecast import bracket_of, token_operations
from trainer.lora.pace import Pace
from trainer.lora.work import step_work
from trainer.model.adapter_settings import LoraSettings
from trainer.model.config import ModelConfig
from trainer.options import EngineOptions
from trainer.vram import StepShape

RATES = Ceiling(matmul_flops_per_second=1.097e11, copy_bytes_per_second=2.12e10)
VALUE_SECONDS = 6.1e-10
CALL_SECONDS = {"none": 3.0e-6, "nf4": 6.1e-6}
PLAIN_CALLS = Pace(call_seconds=0.0, value_seconds=0.0)


def model_of(width: int, layers: int, heads: int, keys: int, inner: int, words: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=words,
        hidden_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys,
        intermediate_size=inner,
        max_position_embeddings=512,
    )


STORIES = model_of(64, 5, 8, 4, 172, 512)
MIDDLE = model_of(256, 4, 8, 4, 512, 4000)
LARGER = model_of(576, 4, 9, 3, 1536, 8000)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Tokens a second of steps of rows x tokens x micro-batches, by base and what was kept."""

    model: ModelConfig
    rows: int
    tokens: int
    batches: int
    again: float
    packed_kept: float


TAKEN = [
    Taken(model=STORIES, rows=8, tokens=128, batches=2, again=13100, packed_kept=12774),
    Taken(model=STORIES, rows=1, tokens=16, batches=2, again=1795, packed_kept=1064),
    Taken(model=STORIES, rows=1, tokens=512, batches=1, again=5074, packed_kept=4717),
    Taken(model=MIDDLE, rows=2, tokens=128, batches=1, again=3398, packed_kept=3134),
    Taken(model=LARGER, rows=2, tokens=256, batches=1, again=818, packed_kept=925),
]


def shape_of(taken: Taken, activations: str) -> StepShape:
    return StepShape(
        model=taken.model,
        options=EngineOptions(activations=activations),
        micro_batch_size=taken.rows,
        accumulation=taken.batches,
        seq_len=taken.tokens,
    )


@pytest.mark.parametrize("way", ["none, recompute", "nf4, keep"])
@pytest.mark.parametrize("taken", TAKEN, ids=lambda t: f"{t.model.hidden_size}-{t.rows}x{t.tokens}")
def test_the_bracket_holds_what_small_steps_took(taken: Taken, way: str) -> None:
    quant, activations = way.split(", ")
    rate = taken.again if quant == "none" else taken.packed_kept
    lora = LoraSettings(rank=8, alpha=32.0, targets=QV.targets, base_quant=quant)
    shape = shape_of(taken, activations)
    tokens = taken.rows * taken.tokens * taken.batches
    each = token_operations(taken.model, lora, taken.tokens, activations)
    pace = Pace(call_seconds=CALL_SECONDS[quant], value_seconds=VALUE_SECONDS)
    given = (tokens, each * tokens, 0.0, step_work(shape, lora, is_host=True), RATES)
    how = {"is_host": True, "is_compiled": False}
    found = bracket_of(*given, pace, **how)
    assert found.least < rate < found.most
    assert found.most < 8 * found.least
    if taken.model is STORIES:  # products alone stay far above such a model
        assert bracket_of(*given, PLAIN_CALLS, **how).least > rate
