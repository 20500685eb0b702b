"""Is the memory of a step with adapters on a CUDA device foretold to the byte?

What phases of steps took is written down here: of a Llama of four blocks, hidden 1024, in four
bits, on an H200 with torch 2.11, whose allocator gave tensors what they asked for
(`tools/bench/lora_grid.py`). A device, where there is one, is asked anew by that tool.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tools.bench.lora_grid import QV, SMALL
from trainer.device import ALLOCATOR_SETTINGS, Device
from trainer.lora.exact_trace import ExactTrace, exact_bytes
from trainer.lora.need import OVER_AT_MOST, adapter_need
from trainer.lora.residency import MARGIN_BYTES
from trainer.lora.stages import adapted
from trainer.lora.update_walk import walk_update
from trainer.lora.walk import predicted_adapter_phases
from trainer.model.stages import build_trunk
from trainer.options import EngineOptions
from trainer.vram import StepShape
from trainer.vram_trace import META, FusedAttention, MemoryTrace

# Rows, tokens of each; bytes of a forward pass through blocks, of the head, of the way back.
TAKEN = {
    (1, 128): (122_309_120, 110_149_632, 112_183_296),
    (4, 128): (133_521_920, 152_524_800, 136_900_096),
    (16, 128): (178_373_120, 223_721_472, 241_040_896),
    (1, 512): (133_620_224, 152_623_104, 142_272_000),
    (4, 512): (178_471_424, 223_819_776, 241_139_200),
    (16, 512): (357_876_224, 311_998_464, 657_702_400),
    (1, 2048): (178_864_640, 224_212_992, 262_626_816),
    (4, 2048): (358_269_440, 312_391_680, 658_095_616),
    (16, 2048): (1_075_888_640, 665_106_432, 2_324_348_416),
    (1, 8192): (359_842_304, 313_964_544, 744_046_080),
    (4, 8192): (1_077_461_504, 666_679_296, 2_325_921_280),
    (16, 8192): (3_947_938_304, 2_077_538_304, 8_990_932_480),
}


def shape_of(rows: int, tokens: int, **changes: Any) -> StepShape:
    options = EngineOptions(**{"dtype": "bf16", "lm_head_chunk_tokens": 1024, **changes})
    return StepShape(
        model=SMALL, options=options, micro_batch_size=rows, accumulation=1, seq_len=tokens
    )


@pytest.mark.parametrize("case", TAKEN, ids=lambda case: f"{case[0]} x {case[1]}")
def test_every_byte_is_foretold(case: tuple[int, int]) -> None:
    found = predicted_adapter_phases(shape_of(*case), QV, is_host=False)
    forward, head, backward = TAKEN[case]
    # Ids were on the device as well then, and the loss was not kept.
    ids, loss = exact_bytes(8 * case[0] * case[1]), exact_bytes(8)
    phases = found["forward block"] + ids, found["head"] + ids, found["backward block"] + ids - loss
    assert phases == (forward, head, backward)


def test_a_tied_head_has_memory_of_its_own_too() -> None:
    """Its weights are those of the table, which waits in host memory, and come as a copy."""
    apart = shape_of(1, 128)
    tied = replace(apart, model=replace(SMALL, tied_embeddings=True))
    phases = [predicted_adapter_phases(each, QV, is_host=False) for each in (apart, tied)]
    assert phases[0] == phases[1]


def test_blocks_that_stay_are_counted_and_never_more_than_the_budget() -> None:
    shape = shape_of(1, 128)
    alone = adapter_need(shape, QV, None).most_bytes
    every = adapter_need(shape, QV, alone + (1 << 30))
    one = (every.most_bytes - alone) // every.kept
    for blocks in (1, 2, 3):
        need = adapter_need(shape, QV, alone + MARGIN_BYTES + blocks * one)
        assert need.kept == blocks
        assert alone + blocks * one <= need.most_bytes <= alone + blocks * one
    # A step that takes a hundredth less than foretold leaves room for one more.
    close = adapter_need(shape, QV, alone + MARGIN_BYTES + one - alone // (2 * OVER_AT_MOST))
    assert close.kept == 0
    assert alone < close.most_bytes < alone + one


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adafactor"])
def test_an_update_holds_old_and_new_values(optimizer: str) -> None:
    options = EngineOptions(optimizer=optimizer)
    trunk = [adapted(stage, QV) for stage in build_trunk(SMALL)]
    trace = ExactTrace()
    with trace, trace.phase("update"):
        with trace.left_out():
            gradients = {
                stage.name: {
                    n: torch.empty(p.shape, device=META) for n, p in stage.parameters.items()
                }
                for stage in trunk
                if stage.parameters
            }
        walk_update(trace, trunk, gradients, options.update_rule())
    values = sum(4 * g.numel() for named in gradients.values() for g in named.values())
    # As one tensor: a run of adapters and state, flat copies of the state, and of the gradients.
    held = {"adamw": 6 * values, "lion": 4 * values}.get(optimizer, 2 * values)
    assert held <= trace.peaks["update"] < held + (2 << 20 if optimizer == "adamw" else 4 * values)


@pytest.mark.parametrize("trace", [MemoryTrace(), ExactTrace()], ids=["plain", "exact"])
def test_the_formula_of_attention_holds_scores_inside_its_kernels(trace: MemoryTrace) -> None:
    """In fp32 no fused kernel shares key heads; its softmax goes back by way of a product."""
    scores = 4 * 16 * 512 * 512
    with trace, FusedAttention():
        query = torch.empty(1, 16, 512, 64, device=META, requires_grad=True)
        key = torch.empty(1, 4, 512, 64, device=META, requires_grad=True)
        found = F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
        torch.autograd.grad(found, [query, key], torch.empty_like(found))
    held = 4 if isinstance(trace, ExactTrace) else 3
    assert held * scores < trace.peaks[""] < (held + 1) * scores


def test_only_a_device_without_settings_of_its_own_is_told_to_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    Device(torch.device("cpu")).split_exactly()
    assert told == []
    Device(META).split_exactly()
    assert told == ["expandable_segments:True"]
    monkeypatch.setenv(ALLOCATOR_SETTINGS[0], "max_split_size_mb:64")
    Device(META).split_exactly()
    assert len(told) == 1


def test_sizes_are_whole_units() -> None:
    assert [exact_bytes(size) for size in (0, 1, 512, 513, (10 << 20) + 1)] == [
        0,
        512,
        512,
        1024,
        (10 << 20) + 512,
    ]
