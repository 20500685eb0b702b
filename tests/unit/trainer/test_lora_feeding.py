"""Are stages that are fed ahead through slots those that the plain way brings, bit for bit?

On a host nothing runs behind the caller's back, so what is tested here is the order of copies, the
slots and what stays; on a device `tests/parity/test_lora_real_sizes_cuda.py` has the races too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import shardb
from shardb import torch_adaptor
from tests.support.adapters import (
    Named,
    adapter_engine,
    adapter_gradients,
    imported_store,
    plant_adapters,
    settings_of,
)
from trainer.device import Device
from trainer.errors import NonFiniteError
from trainer.lora.engine import AdapterEngine
from trainer.lora.feeding import DeviceBase, Feed
from trainer.lora.slots import Slot, StaleSlotError

HOST = Device.from_name("cpu")
ROWS = [np.random.default_rng(seed).integers(3, 64, (2, 13)) for seed in (5, 6)]
BLOCKS = [f"params/block_{index:03d}" for index in range(3)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with random adapters."""
    _, store = imported_store(tmp_path_factory.mktemp("feeding"), "llama")
    plant_adapters(store, adapter_engine(store, settings_of("llama")))
    return store


def fed_engine(store: Path, **how: bool) -> AdapterEngine:
    """Give an engine whose frozen stages come through slots, as on a device."""
    engine = adapter_engine(store, settings_of("llama"))
    base = DeviceBase(HOST, engine.options.torch_dtype, **how)
    object.__setattr__(engine.adapted, "base", base)
    return engine


def base_of(engine: AdapterEngine) -> DeviceBase:
    assert engine.adapted.base is not None
    return engine.adapted.base


def are_same(mine: Named, theirs: Named) -> bool:
    assert mine.keys() == theirs.keys()
    return all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


WAYS = {"streamed": [], "one stays": BLOCKS[1:2], "all stay": BLOCKS}


HOW = {
    "kept on the host": {},
    "read again": {"keeps_host": False},
    "inputs on the host": {"inputs_on_host": True},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("way", WAYS)
def test_fed_is_plain(way: str, how: str, store: Path) -> None:
    plain = adapter_engine(store, settings_of("llama"))
    loss, expected = adapter_gradients(store, plain, ROWS)
    engine = fed_engine(store, poison=True, **HOW[how])
    base_of(engine).keep(WAYS[way])
    for _ in range(2):  # what stays is brought in by the first pass, and used by the second
        found_loss, found = adapter_gradients(store, engine, ROWS)
        assert found_loss == loss
        assert are_same(found, expected)
    ids = torch.from_numpy(ROWS[0])
    with shardb.open(store) as opened, opened.at() as view:
        assert torch.equal(engine.logits(view, ids), plain.logits(view, ids))


def test_what_stays_is_copied_once(store: Path) -> None:
    engine = fed_engine(store)
    copied = []
    for kept in ([], BLOCKS, BLOCKS):
        base_of(engine).keep(kept)
        before = base_of(engine).copied_bytes
        adapter_gradients(store, engine, ROWS)
        copied.append(base_of(engine).copied_bytes - before)
    streamed, first, second = copied
    head = second
    blocks = first - head
    assert head > 0
    assert streamed == head + 2 * blocks


def test_the_base_is_copied_once_each_way_whatever_the_micro_batches(store: Path) -> None:
    engine = fed_engine(store)
    copied = []
    for count in (1, 4):
        before = base_of(engine).copied_bytes
        adapter_gradients(store, engine, ROWS * count)
        copied.append(base_of(engine).copied_bytes - before)
    assert copied[0] == copied[1] > 0


@pytest.mark.parametrize("keeps_host", [True, False])
def test_a_base_that_became_another_one_is_noticed(keeps_host: bool, tmp_path: Path) -> None:
    _, store = imported_store(tmp_path, "llama")
    plant_adapters(store, adapter_engine(store, settings_of("llama")))
    engine = fed_engine(store, keeps_host=keeps_host)
    base_of(engine).keep(BLOCKS[:1])
    _, before = adapter_gradients(store, engine, ROWS)
    with shardb.open(store) as opened, opened.begin() as txn:
        for name in BLOCKS[:2]:
            tensors = torch_adaptor.tensors(txn.read(name))
            changed = {key: tensor * 1.5 for key, tensor in tensors.items()}
            torch_adaptor.write(txn, name, changed, trainable=False)
        for name in engine.shard_specs():
            torch_adaptor.write(txn, name, torch_adaptor.tensors(txn.read(name)))
        txn.commit(step=3)
    _, found = adapter_gradients(store, engine, ROWS)
    plain = adapter_engine(store, settings_of("llama"))
    _, expected = adapter_gradients(store, plain, ROWS)
    assert are_same(found, expected)
    assert not are_same(found, before)


def test_control_a_slot_that_is_given_back_too_early_is_noticed(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fed_engine(store, poison=True)
    bound = DeviceBase.tensors

    def early(self: DeviceBase, slot: Slot, form: object) -> object:
        slot.buffer.fill_(0xFF)
        return bound(self, slot, form)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceBase, "tensors", early)
    with pytest.raises(NonFiniteError):
        adapter_gradients(store, engine, ROWS)


def test_control_a_slot_that_is_not_filled_again_is_noticed(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = adapter_gradients(store, fed_engine(store), ROWS)
    engine = fed_engine(store)
    copy_in = DeviceBase.copy_in
    first: dict[int, torch.Tensor] = {}

    def stale(self: DeviceBase, view: shardb.ShardView, buffer: torch.Tensor) -> object:
        found = copy_in(self, view, buffer)
        if "block" in view.name:
            size = found[0].bytes
            buffer[:size].copy_(first.setdefault(0, buffer[:size].clone()))
        return found

    monkeypatch.setattr(DeviceBase, "copy_in", stale)
    _, found = adapter_gradients(store, engine, ROWS)
    assert not any(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_lease_ends_with_its_visit(store: Path) -> None:
    engine = fed_engine(store)
    model = engine.adapted
    block = next(stage for stage in model.trunk if stage.is_block)
    with shardb.open(store) as opened, opened.at() as view:
        with Feed(base_of(engine), view, [block, block]) as feed:
            with feed.visit(block):
                lease = block.binding._lease
                assert lease is not None
                assert lease.tensors()
            with pytest.raises(StaleSlotError):
                lease.tensors()
            with feed.visit(block), pytest.raises(StaleSlotError):
                lease.tensors()
        assert all(slot.is_free for slot in base_of(engine).slots)


def test_a_pass_that_breaks_off_leaves_the_slots_free(store: Path) -> None:
    engine = fed_engine(store)
    model = engine.adapted
    with shardb.open(store) as opened, opened.at() as view:
        with (
            pytest.raises(ZeroDivisionError),
            Feed(base_of(engine), view, model.gradient_order()) as feed,
            feed.visit(model.trunk[0]),
        ):
            raise ZeroDivisionError
        assert all(slot.is_free for slot in base_of(engine).slots)
    plain = adapter_engine(store, settings_of("llama"))
    assert are_same(
        adapter_gradients(store, engine, ROWS)[1], adapter_gradients(store, plain, ROWS)[1]
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"grad_clip_mode": "shard"},
        {"optimizer": "lion"},
        {"optimizer": "adafactor"},
        {"optimizer_state_dtype": "int8"},
    ],
    ids=str,
)
def test_updates_at_once_are_those_of_one_shard_after_the_other(
    options: dict[str, str], tmp_path: Path
) -> None:
    """Also the look-up of rows in a table, and the copies of adapters."""
    _, store = imported_store(tmp_path, "llama")
    plain, fed = (
        adapter_engine(store, settings_of("llama"), max_grad_norm=0.01, **options) for _ in range(2)
    )
    object.__setattr__(fed.adapted, "base", DeviceBase(HOST, torch.float32, poison=True))
    plant_adapters(store, plain)
    staged = []
    for engine in (plain, fed):
        with shardb.open(store) as opened, opened.begin() as txn:
            result = engine.train_step(txn, ROWS, step=2, learning_rate=1e-2)
            tensors = {
                f"{shard}:{name}": tensor.clone()
                for shard in engine.shard_specs()
                for name, tensor in torch_adaptor.tensors(txn.read(shard)).items()
            }
        staged.append(((result.loss, result.grad_norm, result.shard_norms), tensors))
    assert staged[0][0] == staged[1][0]
    assert are_same(staged[1][1], staged[0][1])


def test_a_step_that_is_not_finite_leaves_nothing_staged(store: Path) -> None:
    engine = fed_engine(store)
    with shardb.open(store) as opened, opened.begin() as txn:
        before = txn.names()
        with pytest.raises(NonFiniteError):
            engine.train_step(txn, ROWS, step=2, learning_rate=1e-2, loss_scale=float("inf"))
        assert txn.names() == before
        found = engine.train_step(txn, ROWS, step=2, learning_rate=1e-2)
        assert found.updated_shards == len(BLOCKS)


def test_inputs_wait_on_the_host_whatever_the_length_of_rows(store: Path) -> None:
    plain, fed = adapter_engine(store, settings_of("llama")), fed_engine(store, inputs_on_host=True)
    for positions in (13, 7, 9):
        rows = [each[:, :positions] for each in ROWS]
        _, expected = adapter_gradients(store, plain, rows)
        assert are_same(adapter_gradients(store, fed, rows)[1], expected)


def unpacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have blocks "unpacked" by copies, since the library is not everywhere."""

    def unpacked(_stage: object, packed: Named, _dtype: object, places: Named | None) -> Named:
        places = places or {name: torch.empty_like(each) for name, each in packed.items()}
        return {name: places[name].copy_(each) for name, each in packed.items()}

    monkeypatch.setattr("trainer.lora.feeding.nf4.unpacked", unpacked)
    monkeypatch.setattr(DeviceBase, "is_unpacked", lambda _self, stage, _view: stage.is_block)


def beside_unpacked(store: Path) -> Named:
    """Give gradients where blocks are unpacked to one place, which the head fits into."""
    engine = fed_engine(store, poison=True)
    base = base_of(engine)
    base.unpacked.keep(next(stage for stage in engine.adapted.trunk if stage.is_block))
    _, found = adapter_gradients(store, engine, ROWS)
    return found


def test_a_head_comes_where_unpacked_weights_lay(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = adapter_gradients(store, adapter_engine(store, settings_of("llama")), ROWS)
    taken: list[int] = []
    memory = DeviceBase.memory

    def noted(self: DeviceBase, size: int) -> torch.Tensor:
        taken.append(size)
        return memory(self, size)

    unpacking(monkeypatch)
    monkeypatch.setattr(DeviceBase, "memory", noted)
    assert are_same(beside_unpacked(store), expected)
    size = sum(4 * each.numel() for each in head_tensors(store).values())  # it computes in fp32
    assert size not in taken
    adapter_gradients(store, fed_engine(store), ROWS)
    assert size in taken


def head_tensors(store: Path) -> Named:
    with shardb.open(store) as opened, opened.at() as view:
        return dict(torch_adaptor.tensors(view.read("params/lm_head")))


def test_control_a_head_that_comes_too_early_is_noticed(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacking(monkeypatch)
    shared = Feed._shared

    def at_once(self: Feed, order: object) -> dict[str, int]:
        return dict.fromkeys(shared(self, order), 1)  # type: ignore[arg-type]

    monkeypatch.setattr(Feed, "_shared", at_once)
    with pytest.raises(NonFiniteError):  # blocks find what a head that was given back left
        beside_unpacked(store)
