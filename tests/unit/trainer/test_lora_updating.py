"""Are adapters that are updated as one tensor those that are updated one after the other?

The host stands for a device here: the same copies, runs and rule, and nothing behind the back.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import shardb
from shardb import torch_adaptor
from tests.support.adapters import (
    Named,
    adapter_engine,
    differing,
    imported_store,
    plant_adapters,
    settings_of,
)
from trainer.device import Device
from trainer.engine import Rows
from trainer.errors import GradientOverflowError, NonFiniteError
from trainer.lora import runs, updating
from trainer.lora.engine import AdapterEngine
from trainer.lora.feeding import DeviceBase
from trainer.lora.runs import Runs
from trainer.lora.small_copies import SmallCopies
from trainer.lora.updating import FlatUpdates, UpdatesAtOnce
from trainer.step import StepResult

STEPS = 3
RULES = {
    "adamw": {},
    "adamw, one norm a shard": {"grad_clip_mode": "shard"},
    "adamw, not clipped": {"grad_clip_mode": "none"},
    "lion": {"optimizer": "lion"},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with random adapters."""
    _, store = imported_store(tmp_path_factory.mktemp("updating"), "llama")
    return store


def fed_engine(store: Path, options: Mapping[str, object], device: str = "cpu") -> AdapterEngine:
    """Give an engine that updates as on a device, or on one."""
    lora = settings_of("llama", rank=16)
    engine = adapter_engine(store, lora, device=device, max_grad_norm=0.02, **options)
    if device != "cpu":
        return engine
    base = DeviceBase(Device.from_name("cpu"), engine.options.torch_dtype)
    object.__setattr__(engine.adapted, "base", base)
    return engine


def rows_of(step: int) -> list[Rows]:
    """Give the micro-batches of a step."""
    generator = np.random.default_rng(step)
    return [generator.integers(3, 64, (2, 13)) for _ in range(2)]


def stepped(
    source: Path, root: Path, engine: AdapterEngine, ahead: Sequence[list[Rows]] = ()
) -> tuple[Named, list[StepResult]]:
    """Make some steps in a copy of a store; give adapters and state, and what steps said.

    ahead: what each step is told of the rows of the next.
    """
    told = iter(ahead)
    store = root / f"store-{len(list(root.iterdir()))}"
    shutil.copytree(source, store)
    plant_adapters(store, engine)
    results = []
    with shardb.open(store) as opened:
        for step in range(1, STEPS + 1):
            with opened.begin() as txn:
                result = engine.train_step(
                    txn,
                    rows_of(step),
                    step=step,
                    learning_rate=0.01,
                    next_rows=lambda: next(told, None),
                )
                results.append(result)
                txn.commit(step=step + 1)
        with opened.at() as view:
            found = {
                f"{shard}:{name}": tensor.clone()
                for shard in engine.shard_specs()
                for name, tensor in torch_adaptor.tensors(view.read(shard)).items()
            }
    return found, results


def watched(monkeypatch: pytest.MonkeyPatch, way: type) -> list[object]:
    """Note who updates."""
    seen: list[object] = []
    raw: Callable[..., None] = way.update  # type: ignore[attr-defined]

    def update(self: object, *given: object) -> None:
        seen.append(self)
        raw(self, *given)

    monkeypatch.setattr(way, "update", update)
    return seen


@pytest.mark.parametrize("rule", RULES)
def test_flat_is_one_after_the_other(
    rule: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_flat(rule, store, tmp_path, monkeypatch, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", RULES)
def test_flat_is_one_after_the_other_on_a_device(
    rule: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_flat(rule, store, tmp_path, monkeypatch, "cuda")


def check_flat(
    rule: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    flat, at_once = watched(monkeypatch, FlatUpdates), watched(monkeypatch, UpdatesAtOnce)
    found, said = stepped(store, tmp_path, fed_engine(store, RULES[rule], device))
    assert len(flat) == STEPS
    monkeypatch.setattr(updating, "ELEMENTWISE", ())
    expected, expected_said = stepped(store, tmp_path, fed_engine(store, RULES[rule], device))
    assert (len(flat), len(at_once)) == (STEPS, STEPS)
    assert differing(found, expected) == []
    for mine, theirs in zip(said, expected_said, strict=True):
        assert (mine.grad_norm, mine.clip_scale) == (theirs.grad_norm, theirs.clip_scale)
        assert mine.shard_norms == theirs.shard_norms
        assert (mine.clip_scale < 1.0) == (RULES[rule].get("grad_clip_mode") != "none")


def test_state_in_another_order_is_noticed(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = stepped(store, tmp_path, fed_engine(store, {}))
    raw = Runs.flat

    def turned(self: Runs, tensors: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        """Give the first two elements of all in the other order."""
        row = raw(self, tensors)
        return torch.cat([row[:, 1:2], row[:, :1], row[:, 2:]], dim=1)

    monkeypatch.setattr(Runs, "flat", turned)
    other, _ = stepped(store, tmp_path, fed_engine(store, {}))
    assert len(differing(found, other)) > 0


@pytest.mark.parametrize(
    ("options", "whole"),
    [({"optimizer": "adafactor"}, 16), ({"optimizer_state_dtype": "bf16"}, 16), ({}, 4096)],
    ids=["rows and columns", "other state", "odd sizes"],
)
def test_what_is_not_flat_is_updated_tensor_by_tensor(
    options: dict[str, object],
    whole: int,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flat, at_once = watched(monkeypatch, FlatUpdates), watched(monkeypatch, UpdatesAtOnce)
    monkeypatch.setattr(runs, "WHOLE_ELEMENTS", whole)
    stepped(store, tmp_path, fed_engine(store, options))
    assert (len(flat), len(at_once)) == (0, STEPS)


def test_a_step_whose_gradients_overflow_is_forgotten(store: Path, tmp_path: Path) -> None:
    engine = fed_engine(store, {"dtype": "fp16"})
    copied = tmp_path / "store"
    shutil.copytree(store, copied)
    plant_adapters(copied, engine)
    rows = [np.random.default_rng(1).integers(3, 64, (2, 13))]
    with shardb.open(copied) as opened, opened.begin() as txn:
        with pytest.raises(GradientOverflowError):
            engine.train_step(txn, rows, step=1, learning_rate=0.01, loss_scale=2.0**30)
        result = engine.train_step(txn, rows, step=1, learning_rate=0.01)
        txn.commit(step=2)
    assert result.updated_shards == len(engine.adapted.owners)


def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note how many ids are looked up at a time."""
    counts: list[int] = []
    raw = SmallCopies._looked_up

    def look_up(self: SmallCopies, table: Tensor, ids: Tensor) -> Tensor:
        counts.append(ids.numel())
        return raw(self, table, ids)

    monkeypatch.setattr(SmallCopies, "_looked_up", look_up)
    return counts


@pytest.mark.parametrize("is_right", [True, False], ids=["the next ones", "others"])
def test_rows_are_looked_up_once_ahead_of_their_step(
    is_right: bool, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, said = stepped(store, tmp_path, fed_engine(store, {}))
    counts = looked_up(monkeypatch)
    ahead = [[*rows_of(step + (0 if is_right else 7))] for step in range(2, STEPS + 1)]
    found, said_too = stepped(store, tmp_path, fed_engine(store, {}), ahead)
    assert differing(found, expected) == []
    assert [each.loss for each in said] == [each.loss for each in said_too]
    assert len(set(counts)) == 1
    assert len(counts) == 2 * STEPS + (0 if is_right else STEPS - 1)


def test_a_loss_that_is_not_finite_is_told_before_gradients(store: Path, tmp_path: Path) -> None:
    engine = fed_engine(store, {})
    copied = tmp_path / "store"
    shutil.copytree(store, copied)
    plant_adapters(copied, engine)
    shard = next(iter(engine.shard_specs()))
    with shardb.open(copied) as opened:
        with opened.begin() as txn:
            for name in engine.shard_specs():
                factor = 1e38 if name == shard else 1.0
                tensors = torch_adaptor.tensors(txn.read(name))
                torch_adaptor.write(txn, name, {n: t * factor for n, t in tensors.items()})
            txn.commit(step=2)
        with opened.begin() as txn:
            with pytest.raises(NonFiniteError, match="the loss is nan: training diverged"):
                engine.train_step(txn, rows_of(1), step=1, learning_rate=0.01)
            for name, specs in engine.shard_specs().items():  # UsageError where it is staged
                assert txn.stage(name, specs).name == name
