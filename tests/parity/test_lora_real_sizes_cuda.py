"""Is a base with layers of real sizes, streamed to a GPU, the resident model bit for bit?

Buffers that are filled again while something still reads them show only where copies take longer
than the computing beside them. A layer here has 218 million weights: 437 MB in bf16, 113 MB in
four bits; one is larger still. The reference is transformers' own model with `peft`'s arithmetic,
quantised by `bitsandbytes` as a whole where the base is. Needs 20 GB of GPU memory, 10 GB of RAM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardb
from tests.support.adapters import (
    Named,
    adapter_engine,
    adapter_gradients,
    plant_adapters,
    resident_gradients,
    settings_of,
    with_adapters,
)
from tests.support.large_layers import large_config, large_store
from tests.support.packages import FAMILY_NAMES, resident
from trainer.lora.engine import AdapterEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POSITIONS = 256
# Above about 165 MiB of packed weights a layer, gradients of another program were once wrong.
LARGER = {"hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 48}
CASES = [
    *[(name, quant, {}) for name in FAMILY_NAMES for quant in ("none", "nf4")],
    ("llama", "nf4", LARGER),
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A store with random adapters, its engine, and the resident model with the same."""

    store: Path
    engine: AdapterEngine
    model: Any
    planted: Named


@pytest.fixture(
    scope="module",
    params=CASES,
    ids=lambda case: f"{case[0]}-{case[1]}{'-larger' if case[2] else ''}",
)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    model_type, quant, changes = request.param
    lora = settings_of(model_type, rank=16, alpha=32.0, base_quant=quant)
    with large_store(large_config(model_type, **changes), "cuda") as (package, store):
        engine = adapter_engine(store, lora, poison=True, device="cuda", dtype="bf16")
        if quant == "nf4":
            pytest.importorskip("bitsandbytes", reason="the extra `nf4` is not installed")
            with shardb.open(store) as opened, opened.begin() as txn:
                assert engine.prepare_base(txn)
                txn.commit(step=1)
        planted = plant_adapters(store, engine, step=2)
        model = resident(package, torch.bfloat16)
        if quant == "nf4":
            quantise_layers(model)
        model = model.cuda()
        on_device = {name: tensor.cuda() for name, tensor in planted.items()}
        placed = with_adapters(model, on_device, lora.scale, rounds_first=quant == "nf4")
        assert placed == len(planted) > 0
        yield Case(store=store, engine=engine, model=model, planted=planted)
        engine.close()
        del model
        torch.cuda.empty_cache()


def quantise_layers(model: Any) -> None:
    """Put the library's own modules in the place of every linear one of a model's layers."""
    import bitsandbytes

    layers = next(m for n, m in model.named_modules() if n.endswith("layers"))
    for name, module in list(layers.named_modules()):
        if not isinstance(module, torch.nn.Linear):
            continue
        packed = bitsandbytes.nn.Linear4bit(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            compute_dtype=torch.bfloat16,
            compress_statistics=True,
            quant_type="nf4",
        )
        packed.weight = bitsandbytes.nn.Params4bit(
            module.weight.data, requires_grad=False, quant_type="nf4", module=packed
        )
        if module.bias is not None:
            packed.bias = torch.nn.Parameter(module.bias.data)
        parent, _, child = name.rpartition(".")
        setattr(layers.get_submodule(parent), child, packed.to("cuda"))


def rows_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 512, (2, POSITIONS + 1))


def streamed_logits(case: Case, rows: np.ndarray) -> Tensor:
    with shardb.open(case.store) as opened, opened.at() as view:
        return case.engine.logits(view, torch.from_numpy(rows[:, :-1].copy()))


def resident_backward(model: Any, batches: list[np.ndarray]) -> float:
    count = sum(rows[:, 1:].size for rows in batches)
    total = 0.0
    for rows in batches:
        ids, labels = (torch.from_numpy(p.copy()).cuda() for p in (rows[:, :-1], rows[:, 1:]))
        logits: Tensor = model(ids).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (loss / count).backward()
        total += float(loss.detach())
    return total / count


def test_are_the_logits_bit_equal(case: Case) -> None:
    rows = rows_of(1)
    with torch.no_grad():
        expected = case.model(torch.from_numpy(rows[:, :-1].copy()).cuda()).logits
    assert torch.equal(streamed_logits(case, rows), expected)


def test_are_all_gradients_bit_equal_over_two_micro_batches(case: Case) -> None:
    batches = [rows_of(2), rows_of(3)]
    loss, found = adapter_gradients(case.store, case.engine, batches)
    expected_loss = resident_backward(case.model, batches)
    expected = resident_gradients(case.model)
    case.model.zero_grad()
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert found.keys() == expected.keys() == case.planted.keys()
    different = [name for name, g in expected.items() if not torch.equal(found[name], g)]
    assert different == []
    assert all(float(gradient.abs().max()) > 0 for gradient in found.values())
