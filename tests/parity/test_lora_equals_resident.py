"""Does a model whose frozen base is streamed compute what the resident one does, bit for bit?

The resident model is transformers' own, with every adapted module replaced by one that computes as
`peft` does. Rows leave the padding token out, as in the tests of imports.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardb
from tests.support.adapters import (
    adapter_engine,
    adapter_gradients,
    imported_store,
    plant_adapters,
    resident_gradients,
    settings_of,
    with_adapters,
)
from tests.support.packages import FAMILY_NAMES, resident

POSITIONS = 40
CASES = [*[(name, "auto") for name in FAMILY_NAMES], ("llama", "transformers")]


def rows_of(seed: int, rows: int = 2) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.integers(3, 64, (rows, POSITIONS + 1))


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Give a store with random adapters, its engine, and the resident model with the same."""
    model_type, stages = request.param
    lora = settings_of(model_type)
    package, store = imported_store(tmp_path_factory.mktemp("case"), model_type, stages=stages)
    engine = adapter_engine(store, lora, poison=True)
    planted = plant_adapters(store, engine)
    model = resident(package)
    placed = with_adapters(model, planted, lora.scale)
    assert placed == len(planted) > 0
    return store, engine, model


def test_are_the_logits_bit_equal(case: Any) -> None:
    store, engine, model = case
    ids = torch.from_numpy(rows_of(1)[:, :-1])
    with torch.no_grad():
        expected = model(ids).logits
    with shardb.open(store) as opened, opened.at() as view:
        assert torch.equal(engine.logits(view, ids), expected)


def test_are_loss_and_gradients_bit_equal_over_two_micro_batches(case: Any) -> None:
    store, engine, model = case
    batches = [rows_of(2), rows_of(3)]
    loss, found = adapter_gradients(store, engine, batches)
    expected_loss = resident_backward(model, batches)
    expected = resident_gradients(model)
    model.zero_grad()
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert found.keys() == expected.keys()
    different = [n for n, g in expected.items() if not torch.equal(found[n], g)]
    assert different == []
    assert all(float(gradient.abs().max()) > 0 for gradient in found.values())


def resident_backward(model: Any, batches: list[np.ndarray]) -> float:
    """Sum gradients over micro-batches by ordinary autograd over the whole model."""
    count = sum(rows[:, 1:].size for rows in batches)
    total = 0.0
    for rows in batches:
        ids, labels = (torch.from_numpy(part.copy()) for part in (rows[:, :-1], rows[:, 1:]))
        logits: Tensor = model(ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (loss / count).backward()
        total += float(loss.detach())
    return total / count
