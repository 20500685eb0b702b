from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardb
from tests.support.adapters import (
    adapter_engine,
    adapter_gradients,
    imported_store,
    plant_adapters,
    settings_of,
)
from trainer.device import Device
from trainer.errors import InputError, NonFiniteError
from trainer.lora.linears import AdaptedLinears
from trainer.lora.slots import Lease, SlotPool, StaleSlotError
from trainer.lora.stages import Binding
from trainer.model.adapter_settings import ALL_LINEAR
from trainer.model.adapters import Adapter

HOST = Device.from_name("cpu")
ROWS = [np.random.default_rng(5).integers(3, 64, (2, 13))]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with random adapters."""
    _, store = imported_store(tmp_path_factory.mktemp("lora"), "llama")
    plant_adapters(store, adapter_engine(store, settings_of("llama")))
    return store


@contextmanager
def block_views(store: Path, *indices: int) -> Iterator[list[shardb.ShardView]]:
    with shardb.open(store) as opened, opened.at() as view:
        yield [view.read(f"params/block_{index:03d}") for index in indices]


def test_a_lease_that_ended_gives_nothing(store: Path) -> None:
    pool = SlotPool(HOST, slot_bytes=1 << 20)
    with block_views(store, 0, 1) as [first, second]:
        with pool.lease(first, torch.float32) as old:
            assert old.tensors()
        with pytest.raises(StaleSlotError):
            old.tensors()
        with pool.lease(second, torch.float32), pytest.raises(StaleSlotError):
            old.tensors()


def test_a_slot_that_was_given_back_and_filled_again_is_another_generation(store: Path) -> None:
    pool = SlotPool(HOST, slot_bytes=1 << 20)
    with block_views(store, 0) as [view], pool.lease(view, torch.float32) as lease:
        slot = lease._slot
        assert slot is not None
        slot.generation += 1
        with pytest.raises(StaleSlotError, match="given back"):
            lease.tensors()


def test_what_computes_as_it_is_stored_is_not_copied(store: Path) -> None:
    pool = SlotPool(HOST, slot_bytes=1 << 20)
    with block_views(store, 0) as [view]:
        with pool.lease(view, torch.bfloat16):
            assert pool.filled_bytes == 0
        with pool.lease(view, torch.float32):
            assert pool.filled_bytes > 0


def test_a_slot_that_is_given_back_holds_nan_in_every_form(store: Path) -> None:
    pool = SlotPool(HOST, slot_bytes=1 << 20, poison=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with block_views(store, 0) as [view], pool.lease(view, dtype) as lease:
            held = dict(lease.tensors())
            assert all(bool(torch.isfinite(tensor).all()) for tensor in held.values())
        assert all(bool(torch.isnan(tensor).all()) for tensor in held.values())


def test_autograd_refuses_a_graph_that_holds_what_was_overwritten(store: Path) -> None:
    pool = SlotPool(HOST, slot_bytes=1 << 20)
    x = torch.ones(2, 32, requires_grad=True)
    with block_views(store, 0, 1) as [first, second]:
        with pool.lease(first, torch.float32) as lease:
            output = torch.nn.functional.linear(x, lease.tensors()["mlp.up_proj.weight"])
        with pool.lease(second, torch.float32), pytest.raises(RuntimeError, match="inplace"):
            output.sum().backward()


class ForgetfulPool(SlotPool):
    """A pool that fills its slot once and never again: what comes later is stale."""

    @contextmanager
    def lease(self, view: Any, dtype: torch.dtype | None) -> Iterator[Lease]:
        is_block = len(view.specs) > 1
        with super().lease(view, dtype) as found:
            if is_block:
                held = self.__dict__.setdefault("held", {})
                for name, tensor in found.tensors().items():
                    first = held.setdefault(name, tensor.clone())
                    tensor.copy_(first)
            yield found


def test_would_stale_weights_be_noticed(store: Path) -> None:
    engine = adapter_engine(store, settings_of("llama"))
    loss, exact = adapter_gradients(store, engine, ROWS)
    again_loss, again = adapter_gradients(store, engine, ROWS)
    assert loss == again_loss
    assert all(torch.equal(gradient, again[name]) for name, gradient in exact.items())
    object.__setattr__(engine.adapted, "pool", ForgetfulPool(HOST, slot_bytes=1 << 20))
    stale_loss, stale = adapter_gradients(store, engine, ROWS)
    assert stale_loss != loss
    assert not any(torch.equal(gradient, stale[name]) for name, gradient in exact.items())


def test_would_poisoned_weights_be_noticed(store: Path) -> None:
    engine = adapter_engine(store, settings_of("llama"), poison=True)
    _, exact = adapter_gradients(store, engine, ROWS)
    assert all(bool(torch.isfinite(gradient).all()) for gradient in exact.values())
    pool = engine.adapted.pool

    class Early(SlotPool):
        """Gives a slot back before it is used."""

        @contextmanager
        def lease(self, view: Any, dtype: torch.dtype | None) -> Iterator[Lease]:
            with pool.lease(view, dtype) as found:
                tensors = dict(found.tensors())
            yield Lease(tensors, None)

    object.__setattr__(engine.adapted, "pool", Early(HOST, slot_bytes=0))
    with pytest.raises(NonFiniteError):
        adapter_gradients(store, engine, ROWS)


def test_a_stage_outside_a_visit_has_no_weights() -> None:
    with pytest.raises(StaleSlotError, match="outside"):
        Binding().weights()


def test_the_base_is_read_once_each_way_whatever_the_micro_batches(store: Path) -> None:
    engine = adapter_engine(store, settings_of("llama"))
    read: dict[int, int] = {}
    for count in (1, 4):
        before = engine.adapted.pool.filled_bytes
        adapter_gradients(store, engine, ROWS * count)
        read[count] = engine.adapted.pool.filled_bytes - before
    assert read[1] == read[4] > 0


def test_an_adapter_that_no_product_asks_for_is_counted() -> None:
    weight, other = torch.ones(3, 2), torch.ones(3, 2)
    adapter = Adapter(a_RI=torch.ones(1, 2), b_OR=torch.ones(3, 1), scale=2.0)
    linears = AdaptedLinears([(weight, adapter)])
    with linears:
        assert torch.nn.functional.linear(torch.ones(1, 2), other).tolist() == [[2.0] * 3]
        assert linears.unused == 1
        assert torch.nn.functional.linear(torch.ones(1, 2), weight).tolist() == [[6.0] * 3]
    assert linears.unused == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 0}, "--lora-rank is 0"),
        ({"alpha": 0.0}, "--lora-alpha"),
        ({"alpha": float("nan")}, "--lora-alpha"),
        ({"targets": ()}, "--lora-targets is empty"),
        ({"targets": ("q_proj", "qkv_proj")}, "no module of this model is called qkv_proj.*q_proj"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    changes: dict[str, Any], words: str, store: Path
) -> None:
    with pytest.raises(InputError, match=words):
        adapter_engine(store, settings_of("llama", **changes))
    found = adapter_engine(store, settings_of("llama", targets=(ALL_LINEAR,)))
    assert len(found.adapted.owners[0].parameters) == 14


@pytest.mark.parametrize(
    ("lora", "options", "words"),
    [({"dropout": 0.1}, {}, "--lora-dropout"), ({}, {"records_apart": True}, "kept apart")],
)
def test_compiled_blocks_are_refused_with_what_they_do_not_know(
    lora: dict[str, Any], options: dict[str, Any], words: str, store: Path
) -> None:
    with pytest.raises(InputError, match=f"--compile-blocks.*{words}"):
        adapter_engine(store, settings_of("llama", **lora), compile_blocks=True, **options)
    assert adapter_engine(store, settings_of("llama"), compile_blocks=True).options.compile_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("has_weight", [True, False])
def test_the_formula_of_a_norm_is_the_norm(has_weight: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(3, 5, 16, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(16, generator=generator, dtype=dtype) if has_weight else None
    expected = torch.nn.functional.rms_norm(x, (16,), weight, 1e-5)
    [wanted] = torch.autograd.grad(expected.square().sum(), x)
    with AdaptedLinears([]):
        found = torch.nn.functional.rms_norm(x, (16,), weight, 1e-5)
    [gradient] = torch.autograd.grad(found.square().sum(), x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, wanted)
