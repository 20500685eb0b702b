"""Is a walk through a step as short for an absurd step as for a small one, and as true?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.tiny_model import TINY
from trainer import head, host_walk, vram
from trainer.engine import EngineOptions
from trainer.lora import walk as adapter_walk
from trainer.model.adapter_settings import LoraSettings
from trainer.pipeline import walk as pipeline_walk
from trainer.pipeline.pipeline import PipelineSettings
from trainer.vram import StepShape

# Six whole chunks of logits and a shorter one, in every micro-batch.
SHAPE = StepShape(
    model=replace(TINY, num_layers=2, vocab_size=2**20),
    options=EngineOptions(lm_head_chunk_tokens=12),
    micro_batch_size=4,
    accumulation=2,
    seq_len=20,
)
LORA = LoraSettings(rank=2, alpha=4.0, targets=("q_proj",), base_quant="none")
Phases = Callable[[StepShape], dict[str, int]]
WALKS: dict[str, tuple[Phases, Any]] = {
    "host": (host_walk.predicted_host_phases, host_walk._walked),
    "device": (vram.predicted_phases, vram._walked),
    "pipeline": (
        lambda shape: pipeline_walk.predicted_pipeline_phases(
            shape, PipelineSettings(), is_host=False
        ),
        pipeline_walk._walked,
    ),
    "adapters": (
        lambda shape: adapter_walk.predicted_adapter_phases(shape, LORA, is_host=True),
        adapter_walk._walked,
    ),
}


@pytest.fixture(params=WALKS)
def phases(request: pytest.FixtureRequest) -> Phases:
    """Give a walk that remembers nothing."""
    predict, walked = WALKS[request.param]

    def fresh(shape: StepShape) -> dict[str, int]:
        walked.cache_clear()
        found = predict(shape)
        walked.cache_clear()
        return found

    return fresh


def test_chunks_that_are_left_out_hold_no_more(
    phases: Phases, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = phases(SHAPE)
    monkeypatch.setattr(head, "CHUNKS_WALKED", 1000)
    assert phases(SHAPE) == short
    # Control: the shorter last chunk alone is not enough.
    monkeypatch.setattr(head, "CHUNKS_WALKED", 1)
    assert phases(SHAPE) != short


def test_an_absurd_step_is_walked_through_in_few_chunks(
    phases: Phases, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_loss, calls = head._loss_sum, []

    def counted(*given: Any) -> torch.Tensor:
        calls.append(1)
        return true_loss(*given)

    monkeypatch.setattr(head, "_loss_sum", counted)
    few = phases(replace(SHAPE, accumulation=4))
    counts = [len(calls)]
    many = phases(replace(SHAPE, accumulation=2**20, micro_batch_size=2**20))
    assert max(many.values()) > max(few.values())
    assert len(calls) - counts[0] == counts[0]


def test_a_step_that_is_made_leaves_no_chunk_out() -> None:
    hidden, labels = torch.zeros(4, 20, 8), torch.zeros(4, 20, dtype=torch.int64)
    assert len(list(head._chunks(hidden, labels, 12))) == 7
    walked = list(head._chunks(hidden.to("meta"), labels.to("meta"), 12))
    assert [len(rows) for _, rows, _ in walked] == [12, 12, 12, 8]
