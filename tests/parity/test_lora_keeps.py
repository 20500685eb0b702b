"""Are losses and gradients the same to the bit where a replay takes what the first pass computed?

Every family, plain and in NF4, with dropout, and with records that share a row. Attention and
products are counted, so that what is taken was not computed; the controls take another
micro-batch's ledger, and write into what is kept.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.test_lora_equals_resident import CASES, rows_of
from tests.parity.test_records_apart import packed
from tests.support.adapters import (
    Named,
    adapter_engine,
    adapter_gradients,
    differing,
    imported_store,
    plant_adapters,
    settings_of,
)
from tests.support.packages import FAMILY_NAMES
from trainer.errors import NonFiniteError
from trainer.lora.ledger import Keeping, Ledger, Taking
from trainer.lora.ledger_tape import LedgerTape
from trainer.lora.linears import matrix_product
from trainer.lora.step import AdapterPass
from trainer.model.adapter_settings import LoraSettings
from trainer.model.micro_batch import drop_keys

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
RATE = 0.25
SEEDS = (2, 3)
KEYS = drop_keys(RATE, seed=1, step=1, count=len(SEEDS))
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts kernels that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        """Give the products of matrices."""
        return sum(self.counts[each] for each in PRODUCTS)


def found_with(
    store: Path, lora: LoraSettings, activations: str, *, is_apart: bool = False, **options: Any
) -> tuple[float, Named, Kernels]:
    """Give loss, gradients, and what was computed for them."""
    engine = adapter_engine(store, lora, poison=True, activations=activations, **options)
    rows = [packed(seed, apart=True) if is_apart else rows_of(seed) for seed in SEEDS]
    with Kernels() as kernels:
        loss, found = adapter_gradients(store, engine, rows, KEYS if lora.dropout else ())
    return loss, found, kernels


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Give a store with random adapters, and its family."""
    model_type, stages = request.param
    _, store = imported_store(tmp_path_factory.mktemp("keeps"), model_type, stages=stages)
    plant_adapters(store, adapter_engine(store, settings_of(model_type)))
    return store, model_type


@pytest.mark.parametrize(
    "how",
    [{}, {"dropout": RATE, "is_apart": True, "dtype": "bf16"}],
    ids=["plain", "everything"],
)
def test_nothing_changes_and_less_is_computed(how: dict[str, Any], stored: Any) -> None:
    store, model_type = stored
    others = dict(how)
    lora = settings_of(model_type, dropout=others.pop("dropout", 0.0))
    loss, found, kept = found_with(store, lora, "keep", **others)
    expected_loss, expected, computed = found_with(store, lora, "recompute", **others)
    assert loss == expected_loss
    assert differing(found, expected) == []
    assert all(float(gradient.abs().max()) > 0 for gradient in found.values())
    assert kept.products < computed.products
    if ATTENTION in computed.counts:  # Gemma 2 caps scores: by a formula
        assert 2 * kept.counts[ATTENTION] == computed.counts[ATTENTION]
    else:
        assert model_type == "gemma2"


@pytest.mark.parametrize(
    "how",
    [{"dtype": "bf16"}, {"dropout": RATE, "is_apart": True}],
    ids=["bf16", "dropout, apart"],
)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_changes_on_a_device(how: dict[str, Any], stored: Any) -> None:
    store, model_type = stored
    others = {**how, "device": "cuda"}
    lora = settings_of(model_type, dropout=others.pop("dropout", 0.0))
    loss, found, kept = found_with(store, lora, "keep", **others)
    expected_loss, expected, computed = found_with(store, lora, "recompute", **others)
    assert loss == expected_loss
    assert differing(found, expected) == []
    assert kept.products < computed.products


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_nothing_changes_over_a_packed_base(
    model_type: str, dtype: str, device: str, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra `nf4` is not installed")
    from tests.parity.test_lora_nf4 import quantise_store

    lora = settings_of(model_type, base_quant="nf4")
    _, store = imported_store(tmp_path, model_type)
    engine = adapter_engine(store, lora)
    quantise_store(store, engine)
    plant_adapters(store, engine, step=2)
    how = {"dtype": dtype, "device": device}
    loss, found, _ = found_with(store, lora, "keep", **how)
    expected_loss, expected, _ = found_with(store, lora, "recompute", **how)
    assert loss == expected_loss
    assert differing(found, expected) == []


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Path, LoraSettings]:
    """Give a store with random adapters and their settings."""
    lora = settings_of("llama")
    _, store = imported_store(tmp_path, "llama")
    plant_adapters(store, adapter_engine(store, lora))
    return store, lora


def test_a_ledger_of_another_micro_batch_is_noticed(
    llama: tuple[Path, LoraSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected, _ = found_with(*llama, "recompute")
    original = LedgerTape.backward

    def exchanged(tape: LedgerTape, *given: Any) -> None:
        tape._ledgers.reverse()
        original(tape, *given)

    monkeypatch.setattr(LedgerTape, "backward", exchanged)
    _, found, _ = found_with(*llama, "keep")
    assert len(differing(found, expected)) == len(expected)


def test_what_is_kept_goes_when_a_step_fails(
    llama: tuple[Path, LoraSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledgers: list[weakref.ref[Any]] = []

    class Noted(Ledger):
        def put(self, piece: Any) -> None:
            output = getattr(piece, "_result", None)
            ledgers.append(weakref.ref(piece.value if output is None else output))
            super().put(piece)

    def failing(*_given: Any) -> None:
        raise NonFiniteError("no number", shard="params/lm_head", tensor="weight")

    monkeypatch.setattr("trainer.lora.ledger_tape.Ledger", Noted)
    monkeypatch.setattr(AdapterPass, "_head", failing)
    with pytest.raises(NonFiniteError):
        found_with(*llama, "keep")
    gc.collect()
    assert len(ledgers) > len(SEEDS)
    assert [each() for each in ledgers if each() is not None] == []


def test_a_kept_output_that_was_written_into_is_refused() -> None:
    product = matrix_product(torch.randn(3, 4))
    book = Ledger()
    output = Keeping(book).product(product, torch.randn(2, 4), None)
    output.add_(1)
    with pytest.raises(AssertionError, match="written into"):
        Taking(book).product(product, torch.randn(2, 4, requires_grad=True), None)


def test_attention_by_its_formula_is_computed_again() -> None:
    function = F.scaled_dot_product_attention
    given = [torch.randn(1, 2, 40, 4) for _ in range(3)]
    mask = torch.zeros(40, 40, requires_grad=True)  # then no fused kernel is taken
    book = Ledger()
    expected = Keeping(book).attention(function, given, {"attn_mask": mask})
    assert book.take() is None
    book.put(None)
    assert torch.equal(Taking(book).attention(function, given, {"attn_mask": mask}), expected)
