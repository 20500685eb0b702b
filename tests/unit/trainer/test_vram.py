"""Does the walk through a step count what a step holds?

No device is needed: what is counted is checked against sums by hand and against the saved tensors
of real ones. `tools/bench/vram_grid.py` compares with a device.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.tiny_model import TINY, TINY_QWEN, TINY_TIED
from trainer.engine import EngineOptions
from trainer.vram import StepShape, predicted_bytes, predicted_phases
from trainer.vram_trace import META, FusedAttention, MemoryTrace, block_bytes

SHAPE = StepShape(
    model=replace(TINY, num_kv_heads=4),
    options=EngineOptions(),
    micro_batch_size=64,
    accumulation=2,
    seq_len=64,
)
BOUNDARY = 64 * 64 * TINY.hidden_size * 4


def test_a_storage_counts_while_it_is_held_and_views_are_free() -> None:
    trace = MemoryTrace()
    with trace, trace.phase("all"):
        one = torch.empty(1000, device=META)
        view = one[:10]
        other = one + 1
        held = trace.live_bytes
        del one, other
        assert trace.live_bytes == block_bytes(4000)
        del view
    assert held == 2 * block_bytes(4000)
    assert trace.live_bytes == 0
    assert trace.peaks == {"all": held}


def test_what_autograd_saves_counts() -> None:
    trace = MemoryTrace()
    with trace, trace.phase("all"):
        x = torch.empty(1024, device=META, requires_grad=True)
        y = (x * 1.5).exp()  # exp saves its result; the product is gone
        total = y.sum()
        del y
        kept = trace.live_bytes
        torch.autograd.grad(total, x)
    assert kept == 2 * 4096 + 512
    assert trace.peaks["all"] >= kept + 4096


def test_fused_attention_holds_no_scores() -> None:
    query = torch.empty(1, 4, 512, 64, device=META, dtype=torch.bfloat16, requires_grad=True)
    peaks = []
    for fused in (True, False):
        trace = MemoryTrace()
        with trace, trace.phase("all"):
            if fused:
                with FusedAttention():
                    torch.nn.functional.scaled_dot_product_attention(query, query, query)
            else:
                torch.nn.functional.scaled_dot_product_attention(query, query, query)
        peaks.append(trace.peaks["all"])
    assert peaks[0] < 4 * 512 * 512 * 2
    assert peaks[1] >= 4 * 512 * 512 * 2


def test_more_blocks_and_micro_batches_are_carried_on_as_if_they_were_walked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = replace(SHAPE, model=replace(SHAPE.model, num_layers=6), accumulation=5)
    carried = predicted_phases(shape)
    monkeypatch.setattr("trainer.vram.WALKED", 99)
    walked = predicted_phases(shape)
    assert carried.keys() == walked.keys()
    for phase, held in walked.items():
        assert held <= carried[phase] <= 1.001 * held, phase


def test_a_boundary_is_held_for_each_block_and_micro_batch() -> None:
    deeper = replace(SHAPE, model=replace(SHAPE.model, num_layers=TINY.num_layers + 2))
    more = predicted_bytes(deeper) - predicted_bytes(SHAPE)
    assert more == pytest.approx(2 * 2 * BOUNDARY, rel=0.01)


@pytest.mark.parametrize(
    ("change", "grows"),
    [
        ({"micro_batch_size": 128}, True),
        ({"accumulation": 4}, True),
        ({"options": EngineOptions(dtype="bf16")}, False),
        ({"options": EngineOptions(activations="keep")}, True),
        ({"options": EngineOptions(lm_head_chunk_tokens=64)}, False),
        ({"model": replace(TINY_TIED, vocab_size=50_000)}, True),
        ({"model": replace(TINY_QWEN, hidden_size=192)}, True),
    ],
    ids=str,
)
def test_memory_grows_where_it_should(change: dict[str, object], grows: bool) -> None:
    base, other = predicted_phases(SHAPE), predicted_phases(replace(SHAPE, **change))
    assert (sum(other.values()) > sum(base.values())) == grows


def test_block_sizes_are_the_allocators() -> None:
    mib = 1 << 20
    assert [block_bytes(n) for n in (1, 512, 513)] == [512, 512, 1024]
    assert block_bytes(5 * mib + 1) == 5 * mib + 512
    assert block_bytes(11 * mib) == 12 * mib
    assert block_bytes(10 * mib + 512) == 10 * mib + 512
