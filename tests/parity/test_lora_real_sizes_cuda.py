"""Is a base with layers of real sizes, streamed to a GPU, the resident model bit for bit?

Buffers that are filled again while something still reads them show only where copies take longer
than the computing beside them. A layer here has 218 million weights: 437 MB in bf16, 113 MB in
four bits; one is larger still. The reference is transformers' own model with `peft`'s arithmetic,
quantised by `bitsandbytes` as a whole where the base is. Needs 20 GB of GPU memory, 10 GB of RAM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardb
from shardb import torch_adaptor
from tests.support.adapters import (
    Named,
    adapter_engine,
    adapter_gradients,
    differing,
    plant_adapters,
    resident_gradients,
    settings_of,
    with_adapters,
)
from tests.support.large_layers import large_config, large_store
from tests.support.packages import FAMILY_NAMES, resident
from trainer.device_lanes import Lane
from trainer.lora import compiled_head, nf4
from trainer.lora.compiled import CompiledAdapted
from trainer.lora.compiled_head import CompiledHead
from trainer.lora.engine import AdapterEngine
from trainer.lora.feeding import DeviceBase
from trainer.lora.slots import Lease, StaleSlotError
from trainer.lora.stages import leased
from trainer.model.adapter_settings import LoraSettings
from trainer.model.hf_family import hf_model

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


COMPILED = [("llama", "none", {}), ("llama", "nf4", {}), ("qwen3", "nf4", {})]
FEW = ("q_proj", "v_proj")
# What is kept between the passes of a compiled block, and where.
WAYS = [("recompute", "vram"), ("recompute", "host"), ("attention", "vram"), ("attention", "host")]


def name_of(case: tuple[str, str, dict[str, int]]) -> str:
    """Name a case in a test's id."""
    return f"{case[0]}-{case[1]}{'-larger' if case[2] else ''}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A store with random adapters, its engine, and the resident model with the same."""

    store: Path
    engine: AdapterEngine
    model: Any
    planted: Named


class Stores:
    """The package and store of one model at a time: both forms of a base are of the same import."""

    def __init__(self) -> None:
        self._made = ExitStack()
        self._config: dict[str, Any] = {}
        self._paths: tuple[Path, Path] | None = None

    def of(self, config: dict[str, Any]) -> tuple[Path, Path]:
        """Give them; those of another model are gone."""
        if self._paths is None or config != self._config:
            self.close()
            self._config = config
            self._paths = self._made.enter_context(large_store(config, "cuda"))
        return self._paths

    def close(self) -> None:
        """Remove what was made."""
        self._made.close()
        self._paths = None


@pytest.fixture(scope="module")
def stores() -> Iterator[Stores]:
    found = Stores()
    yield found
    found.close()


@pytest.fixture(scope="module", params=CASES, ids=name_of)
def case(request: pytest.FixtureRequest, stores: Stores) -> Iterator[Case]:
    model_type, quant, changes = request.param
    lora = settings_of(model_type, rank=16, alpha=32.0, base_quant=quant)
    package, store = stores.of(large_config(model_type, **changes))
    engine = adapter_engine(store, lora, poison=True, device="cuda", dtype="bf16")
    step = 1
    if quant == "nf4":
        pytest.importorskip("bitsandbytes", reason="the extra `nf4` is not installed")
        with shardb.open(store) as opened, opened.begin() as txn:
            step = 1 + (txn.base.step if txn.base else 0)
            assert engine.prepare_base(txn)
            for name in engine.shard_specs() if step > 1 else ():
                torch_adaptor.write(txn, name, torch_adaptor.tensors(txn.read(name)))
            txn.commit(step=step)
        step += 1
    planted = plant_adapters(store, engine, step=step)
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
            device="meta",  # it would draw first values, on the processor
        )
        packed.weight = bitsandbytes.nn.Params4bit(
            module.weight.data, requires_grad=False, quant_type="nf4", module=packed
        )
        if module.bias is not None:
            packed.bias = torch.nn.Parameter(module.bias.data)
        parent, _, child = name.rpartition(".")
        setattr(layers.get_submodule(parent), child, packed.to("cuda"))


def compiled_engine(case: Case, lora: LoraSettings, kept: str, placement: str) -> AdapterEngine:
    return adapter_engine(
        case.store,
        lora,
        poison=True,
        device="cuda",
        dtype="bf16",
        compile_blocks=True,
        activations=kept,
        activation_placement=placement,
    )


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


def resident_weights(case: Case, view: shardb.ReadView) -> dict[str, dict[str, Tensor]]:
    """Give every frozen stage's weights on the device, unpacked by the library."""
    found = {}
    for stage in (*case.engine.adapted.trunk, case.engine.adapted.head):
        stored = torch_adaptor.tensors(view.read(stage.shard))
        on_device = {name: tensor.cuda() for name, tensor in stored.items()}
        if stage.is_packed:
            on_device = nf4.unpacked(stage.inner, on_device, torch.bfloat16)
        found[stage.name] = on_device
    return found


def stages_backward(
    case: Case, batches: list[np.ndarray], *, compiled: bool
) -> tuple[float, Named]:
    """Train with the same stages, all weights resident, by autograd over the whole."""
    blocks, work, model = CompiledAdapted(), CompiledHead(), case.engine.adapted
    leaves = {name: t.cuda().requires_grad_() for name, t in case.planted.items()}
    count = sum(rows[:, 1:].size for rows in batches)
    total = 0.0
    with (
        shardb.open(case.store) as opened,
        opened.at() as view,
        ExitStack() as bound,
        torch.enable_grad(),
    ):
        weights = resident_weights(case, view)
        for stage in (*model.trunk, model.head):
            bound.enter_context(leased(stage, Lease(weights[stage.name], None)))
        for rows in batches:
            ids, labels = (torch.from_numpy(p.copy()).cuda() for p in (rows[:, :-1], rows[:, 1:]))
            x = ids
            for stage in model.trunk:
                params = {name: leaves[f"{stage.name}:{name}"] for name in stage.parameters}
                is_compiled = compiled and blocks.takes(stage)
                x = blocks.run(stage, params, x) if is_compiled else stage.forward(params, x)
            if compiled and compiled_head.takes(model.head.inner):
                seed = torch.full((), 1.0, device="cuda") / count
                given = (x.detach().flatten(0, 1), labels.flatten(), seed)
                of_x, loss = work(model.head, *given)
                x.backward(of_x.view_as(x))
            else:
                logits = model.head.forward({}, x.flatten(0, 1)).float()
                loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
                (loss / count).backward()
            total += float(loss.detach())
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return total / count, gradients


@pytest.mark.parametrize("case", COMPILED, indirect=True, ids=name_of)
def test_are_compiled_blocks_those_of_compiled_resident_ones(case: Case) -> None:
    batches = [rows_of(2), rows_of(3)]
    expected_loss, expected = stages_backward(case, batches, compiled=True)
    for kept, placement in WAYS:
        compiled = compiled_engine(case, case.engine.lora, kept, placement)
        loss, found = adapter_gradients(case.store, compiled, batches)
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert found.keys() == expected.keys() == case.planted.keys()
        assert differing(found, expected) == [], (kept, placement)
        assert all(float(gradient.abs().max()) > 0 for gradient in found.values())
        assert adapter_gradients(case.store, compiled, batches)[0] == loss


@pytest.mark.parametrize("case", COMPILED[:1], indirect=True, ids=name_of)
def test_are_compiled_blocks_with_few_adapters_those_of_resident_ones(case: Case) -> None:
    batches = [rows_of(2), rows_of(3)]
    lora = replace(case.engine.lora, targets=FEW)
    compiled = compiled_engine(case, lora, "attention", "host")
    with shardb.open(case.store) as opened, opened.at() as view:
        step = 1 + view.commit.step
    planted = plant_adapters(case.store, compiled, seed=12, step=step)
    few = Case(store=case.store, engine=compiled, model=case.model, planted=planted)
    loss, found = adapter_gradients(case.store, compiled, batches)
    expected_loss, expected = stages_backward(few, batches, compiled=True)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert found.keys() == expected.keys() == planted.keys()
    assert differing(found, expected) == []
    plant_adapters(case.store, case.engine, step=step + 1)


def test_are_all_gradients_those_of_the_same_stages_resident(case: Case) -> None:
    batches = [rows_of(2), rows_of(3)]
    loss, found = adapter_gradients(case.store, case.engine, batches)
    expected_loss, expected = stages_backward(case, batches, compiled=False)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert found.keys() == expected.keys() == case.planted.keys()
    assert differing(found, expected) == []
    assert all(float(gradient.abs().max()) > 0 for gradient in found.values())


@pytest.mark.parametrize("case", COMPILED, indirect=True, ids=name_of)
def test_control_a_slot_that_was_not_filled_again_is_noticed(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [rows_of(2)]
    _, exact = adapter_gradients(case.store, case.engine, batches)
    copy_in = DeviceBase.copy_in
    first: list[Tensor] = []

    def stale(self: DeviceBase, view: shardb.ShardView, buffer: Tensor) -> Any:
        found = copy_in(self, view, buffer)
        if "block" in view.name:
            with self.lanes.on(Lane.PARAMS_IN):
                first.append(buffer.clone())
                buffer.copy_(first[0])
            return found[0], self.lanes.mark(Lane.PARAMS_IN)
        return found

    monkeypatch.setattr(DeviceBase, "copy_in", stale)
    _, found = adapter_gradients(case.store, case.engine, batches)
    assert not any(torch.equal(found[name], gradient) for name, gradient in exact.items())


def test_is_no_weight_held_between_passes(case: Case) -> None:
    """What a stage knows of its weights is their shapes: no tensor, or one on `meta`."""
    model = case.engine.adapted
    for stage in (*model.trunk, model.head):
        with pytest.raises(StaleSlotError):
            stage.binding.weights()
    if model.head.config.hf_config:
        layers = hf_model(model.head.config.hf_config).layers
        held = [tensor for layer in layers for tensor in layer.parameters()]
        assert len(held) > 0
        assert all(tensor.is_meta for tensor in held)


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
    assert differing(found, expected) == []
    assert all(float(gradient.abs().max()) > 0 for gradient in found.values())
