"""Does a streamed NF4 base compute what the resident NF4 model does, bit for bit?

The reference has `bitsandbytes`' own modules, quantised as a whole from the same weights: one in
another form would differ by its rounding and hide a mistake behind that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardb
from shardb import torch_adaptor
from tests.parity.test_lora_equals_resident import resident_backward, rows_of
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
from tests.support.training import make_data, step_records, train_here
from trainer.lora import nf4
from trainer.lora.engine import AdapterEngine

bnb = pytest.importorskip("bitsandbytes", reason="the extra `nf4` is not installed")


def resident_nf4(package: Path) -> Any:
    """Give transformers' model with every linear module of its layers quantised."""
    model = resident(package)  # in fp32, from values that bf16 holds
    layers = next(m for n, m in model.named_modules() if n.endswith("layers"))
    for name, module in list(layers.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            packed = bnb.nn.Linear4bit(
                module.in_features,
                module.out_features,
                bias=module.bias is not None,
                compute_dtype=torch.float32,
                compress_statistics=True,
                quant_type="nf4",
            )
            packed.weight = bnb.nn.Params4bit(
                module.weight.data.bfloat16(), requires_grad=False, quant_type="nf4", module=packed
            )
            if module.bias is not None:
                packed.bias = nn.Parameter(module.bias.data)
            setattr(layers.get_submodule(parent), child, packed.to("cpu"))
    return model


def quantise_store(store: Path, engine: AdapterEngine) -> None:
    """Make the packed base a commit of its own, as the first step of a run has it."""
    with shardb.open(store) as opened, opened.begin() as txn:
        assert engine.prepare_base(txn)
        txn.commit(step=1)


@pytest.fixture(scope="module", params=FAMILY_NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    lora = settings_of(request.param, base_quant="nf4")
    package, store = imported_store(tmp_path_factory.mktemp("nf4"), request.param)
    engine = adapter_engine(store, lora, poison=True)
    quantise_store(store, engine)
    planted = plant_adapters(store, engine, step=2)
    model = resident_nf4(package)
    assert with_adapters(model, planted, lora.scale) == len(planted) > 0
    return store, engine, model


def test_are_the_streamed_bytes_those_of_the_resident_model(case: Any) -> None:
    store, _, model = case
    count = 0
    layers = next(m for n, m in model.named_modules() if n.endswith("layers"))
    with shardb.open(store) as opened, opened.at() as view:
        for index, layer in enumerate(layers):
            tensors = torch_adaptor.tensors(view.read(f"nf4/block_{index:03d}"))
            for name, module in layer.named_modules():
                if isinstance(module, bnb.nn.Linear4bit):
                    key = name.removesuffix(".base_layer") + ".weight.nf4"
                    state = module.weight.quant_state
                    pairs = {
                        key: module.weight.data,
                        key + "_absmax": state.absmax,
                        key + "_nested": state.state2.absmax,
                        key + "_offset": state.offset.reshape(1),
                    }
                    assert all(torch.equal(tensors[n], t) for n, t in pairs.items()), name
                    count += len(pairs)
    assert count >= 4 * 4 * 3


def test_are_logits_and_gradients_bit_equal(case: Any) -> None:
    store, engine, model = case
    ids = torch.from_numpy(rows_of(1)[:, :-1])
    with shardb.open(store) as opened, opened.at() as view:
        streamed = engine.logits(view, ids)
    with torch.no_grad():
        assert torch.equal(streamed, model(ids).logits)
    batches = [rows_of(2), rows_of(3)]
    loss, found = adapter_gradients(store, engine, batches)
    assert loss == pytest.approx(resident_backward(model, batches), rel=1e-6)
    expected = resident_gradients(model)
    model.zero_grad()
    assert found.keys() == expected.keys()
    assert [n for n, g in expected.items() if not torch.equal(found[n], g)] == []
    assert all(float(gradient.abs().max()) > 0 for gradient in found.values())


def test_would_another_packing_be_noticed(case: Any) -> None:
    store, engine, model = case
    with shardb.open(store) as opened, opened.begin() as txn:
        tensors = torch_adaptor.tensors(txn.read("nf4/block_001"))
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        first = next(name for name in changed if name.endswith(".nf4"))
        changed[first][0] ^= 0x10
        torch_adaptor.write(txn, "nf4/block_001", changed, trainable=False)
        ids = torch.from_numpy(rows_of(1)[:, :-1])
        with torch.no_grad():
            assert not torch.equal(engine.logits(txn, ids), model(ids).logits)


def test_a_run_packs_the_base_once_and_says_what_it_takes(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    _, store = imported_store(tmp_path, "llama")
    flags = [
        *("--store", str(store), "--data-dir", str(data / "train"), "--device", "cpu"),
        *("--threads", "1", "--micro-batch-size", "4", "--lora-rank", "4", "--base-quant", "nf4"),
    ]
    assert train_here([*flags, "--max-steps", "2"]) == 0
    assert train_here(["--store", str(store), "--max-steps", "3"]) == 0
    records = step_records(store)
    packed = {n for n in records[1].shards if n.startswith("nf4/")}
    assert packed == {f"nf4/block_{index:03d}" for index in range(3)}
    assert all(records[3].shards[name] == records[1].shards[name] for name in packed)


def test_a_large_matrix_takes_little_more_than_half_a_byte_a_parameter() -> None:
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed = nf4._packed("w", weight)
    size = sum(tensor.nbytes for tensor in packed.values())
    assert 0.515 < size / weight.numel() < 0.517
