"""The gates of streamed adapters that no other test has: whole runs, four micro-batches, tiers.

docs/lora.md lists every gate with its test, and with what keeps it from passing for no reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardb
from tests.integration.test_lora_run import flags
from tests.parity.test_lora_equals_resident import resident_backward, rows_of
from tests.support.adapters import (
    ResidentLora,
    adapter_engine,
    adapter_gradients,
    differing,
    imported_store,
    plant_adapters,
    resident_gradients,
    settings_of,
    with_adapters,
)
from tests.support.packages import FAMILY_NAMES, resident
from tests.support.training import make_data, step_records, train_here
from trainer.lora.engine import AdapterEngine
from trainer.model.hf_family import hf_model

STEPS = 25
RATE = 1e-2
ADAM = {"beta1": 0.9, "beta2": 0.95, "adam_eps": 1e-8, "weight_decay": 0.0}


def prepared(root: Path, model_type: str) -> tuple[Path, AdapterEngine, Any]:
    """Give a store with random adapters, its engine, and the resident model with the same."""
    package, store = imported_store(root, model_type)
    lora = settings_of(model_type)
    engine = adapter_engine(store, lora, poison=True, grad_clip_mode="none", **ADAM)
    planted = plant_adapters(store, engine)
    model = resident(package)
    assert with_adapters(model, planted, lora.scale) == len(planted) > 0
    return store, engine, model


def streamed_losses(store: Path, engine: AdapterEngine) -> list[float]:
    losses = []
    with shardb.open(store) as opened:
        for step in range(1, STEPS + 1):
            with opened.begin() as txn:
                rows = [rows_of(step)]
                losses.append(engine.train_step(txn, rows, step=step, learning_rate=RATE).loss)
                txn.commit(step=step + 1)
    return losses


def resident_losses(model: Any) -> list[float]:
    trained = [p for m in model.modules() if isinstance(m, ResidentLora) for p in m.parameters()]
    trained = [p for p in trained if p.requires_grad]
    assert trained
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad(set_to_none=True)
        losses.append(resident_backward(model, [rows_of(step)]))
        optimizer.step()
    return losses


def test_a_run_of_25_steps_has_the_resident_runs_losses_and_the_same_ones_again(
    tmp_path: Path,
) -> None:
    store, engine, model = prepared(tmp_path / "one", "llama")
    streamed = streamed_losses(store, engine)
    assert streamed == pytest.approx(resident_losses(model), rel=1e-5)
    again, other_engine, _ = prepared(tmp_path / "two", "llama")
    assert streamed_losses(again, other_engine) == streamed
    assert len(set(streamed)) == STEPS, "control: it is trained, on other rows each step"


def test_gradients_over_four_micro_batches_are_the_resident_ones(tmp_path: Path) -> None:
    store, engine, model = prepared(tmp_path, "llama")
    batches = [rows_of(seed) for seed in range(4)]
    _, found = adapter_gradients(store, engine, batches)
    resident_backward(model, batches)
    expected = resident_gradients(model)
    assert differing(found, expected) == []
    _, fewer = adapter_gradients(store, engine, batches[:3])
    assert len(differing(fewer, expected)) == len(expected), "control: one batch is missing"


@pytest.mark.parametrize("model_type", [n for n in FAMILY_NAMES if n not in ("llama", "mistral")])
def test_no_layer_has_memory_of_its_own(model_type: str, tmp_path: Path) -> None:
    _, store = imported_store(tmp_path, model_type, stages="transformers")
    engine = adapter_engine(store, settings_of(model_type))
    layers = hf_model(engine.config.hf_config).layers
    parameters = [p for layer in layers for p in layer.parameters()]
    assert len(parameters) >= 3 * 6
    assert all(parameter.is_meta for parameter in parameters)


def test_a_base_that_is_read_again_trains_the_same_adapters(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    found = {}
    for name, more in (
        ("ram", ("--base-tier", "ram")),
        ("disk", ("--base-tier", "disk", "--disk-kind", "ssd")),
        ("other", ("--base-tier", "ram", "--seed", "8")),
    ):
        _, store = imported_store(tmp_path / name, "llama")
        assert train_here([*flags(store, data), *more, "--max-steps", "2"]) == 0
        shards = step_records(store)[2].shards
        found[name] = {n: d for n, d in shards.items() if n.startswith(("adapters/", "optim/"))}
    assert found["ram"] == found["disk"]
    assert not found["ram"].items() & found["other"].items(), "control"
