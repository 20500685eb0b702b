"""Does a recorded pass of a block with adapters give what the block itself gives, bit for bit?

A recording is stood for by work that is done again on the memory that it was recorded on: what is
tested is what is copied to fixed places and from there, for which weights, and when. The pieces of
blocks are left as they are. `tests/parity/test_lora_recorded_cuda.py` has a device's recordings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

import shardb
from tests.support.adapters import (
    Named,
    adapter_engine,
    adapter_gradients,
    differing,
    imported_store,
    plant_adapters,
    settings_of,
)
from trainer.device import Device
from trainer.device_lanes import HostLanes
from trainer.lora import compiled, compiled_head
from trainer.lora.compiled import CompiledAdapted
from trainer.lora.engine import AdapterEngine
from trainer.lora.feeding import DeviceBase
from trainer.lora.model import AdaptedModel
from trainer.lora.recorded import RECORDINGS_MAX, SWITCH, Recorder
from trainer.lora.unpacked import UnpackedMemory

T = TypeVar("T")
FAMILY, FEW = "qwen3", ("q_proj", "v_proj", "down_proj")
HOST = Device.from_name("cpu")
LONG, SHORT = 41, 23


class RepeatingLanes(HostLanes):
    """Lanes whose recordings do their work again; counts what was recorded and repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.captured = self.repeated = 0

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]] | None:
        result = work()
        self.captured += 1

        def again() -> None:
            self.repeated += 1
            work()

        return result, again


class FailingLanes(RepeatingLanes):
    """Lanes that cannot record: always, or every other time."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.asked = 0
        self._always = always

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]] | None:
        self.asked += 1
        if self._always or self.asked % 2:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return super().capture(work)


def left_as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (compiled, compiled_head):
        monkeypatch.setattr(module, "compiled_closed", left_as_it_is)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with random adapters."""
    _, store = imported_store(tmp_path_factory.mktemp("recorded"), FAMILY)
    plant_adapters(store, adapter_engine(store, settings_of(FAMILY, targets=FEW)))
    return store


def engine_of(
    store: Path, lanes: HostLanes | None, *, activations: str = "attention", away: bool = True
) -> AdapterEngine:
    """Give an engine that compiles, and records in `lanes`; without them it goes by autograd."""
    lora = settings_of(FAMILY, targets=FEW)
    engine = adapter_engine(store, lora, dtype="bf16", compile_blocks=True, activations=activations)
    base = DeviceBase(HOST, torch.bfloat16, poison=True, inputs_on_host=away)
    base.lanes = lanes or base.lanes
    base.recorder = Recorder(base.lanes)
    engine.adapted = AdaptedModel.of(engine._model, lora, poison=True, base=base)
    if lanes is None:
        blocks = engine.adapted.step.blocks
        assert isinstance(blocks, CompiledAdapted)
        blocks.recorder = None
    return engine


def recorder_of(engine: AdapterEngine) -> Recorder:
    blocks = engine.adapted.step.blocks
    assert isinstance(blocks, CompiledAdapted)
    assert blocks.recorder is not None
    return blocks.recorder


def rows(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(3, 64, (2, length)) for length in lengths]


def passes(store: Path, engine: AdapterEngine, steps: Sequence[list[np.ndarray]]) -> list[Any]:
    """Give the loss and gradients of each step."""
    return [adapter_gradients(store, engine, batches) for batches in steps]


def are_same(mine: Sequence[tuple[float, Named]], theirs: Sequence[tuple[float, Named]]) -> bool:
    return all(
        loss == other_loss and differing(found, other) == []
        for (loss, found), (other_loss, other) in zip(mine, theirs, strict=True)
    )


STEPS = [
    rows(LONG, LONG, seed=0),
    rows(LONG, LONG, seed=1),
    rows(SHORT, SHORT, seed=2),
    rows(LONG, SHORT, LONG, seed=3),
    rows(LONG, seed=4),
]


@pytest.mark.parametrize("away", [False, True], ids=["here", "away"])
@pytest.mark.parametrize("activations", ["recompute", "attention"])
def test_recordings_change_no_bit(store: Path, activations: str, away: bool) -> None:
    expected = passes(store, engine_of(store, None, activations=activations), STEPS)
    lanes = RepeatingLanes()
    engine = engine_of(store, lanes, activations=activations, away=away)
    assert are_same(passes(store, engine, STEPS), expected)
    # Two lengths, two slots, two ways; the rest of the blocks' passes are repeated ones.
    assert 8 <= lanes.captured == recorder_of(engine).count <= RECORDINGS_MAX
    assert lanes.repeated > lanes.captured
    assert all(bool(gradient.any()) for gradient in expected[-1][1].values())


def test_evaluation_is_what_it_was(store: Path) -> None:
    plain, engine = engine_of(store, None), engine_of(store, RepeatingLanes())
    passes(store, engine, STEPS[:2])
    ids = torch.from_numpy(rows(LONG - 1)[0])
    with shardb.open(store) as opened, opened.at() as view:
        for _ in range(4):
            assert torch.equal(engine.logits(view, ids), plain.logits(view, ids))


STALE = {
    "adapters": ("_bring", lambda _self, _call: None),
    "gradients": ("_gathered", lambda _self, _total, _call: None),
}


@pytest.mark.parametrize("what", STALE)
def test_control_a_place_that_is_not_filled_anew_is_noticed(
    store: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = passes(store, engine_of(store, None), STEPS[:2])
    monkeypatch.setattr(Recorder, *STALE[what])
    engine = engine_of(store, RepeatingLanes())
    if what == "gradients":
        with pytest.raises(AssertionError, match="no gradient"):
            passes(store, engine, STEPS[:2])
        return
    assert not are_same(passes(store, engine, STEPS[:2]), expected)


@pytest.mark.parametrize("place", ["x", "other", "left"])
def test_control_what_was_there_before_is_noticed(
    store: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to one kind of places are left out."""
    expected = passes(store, engine_of(store, None), STEPS[:2])
    filled = Recorder._fill

    def without(self: Recorder, targets: Named, sources: Named) -> None:
        kept = {name for name in sources if not name.startswith(place)}
        filled(self, targets, {name: sources[name] for name in kept})

    monkeypatch.setattr(Recorder, "_fill", without)
    found = passes(store, engine_of(store, RepeatingLanes()), STEPS[:2])
    assert not are_same(found, expected)


def test_what_cannot_be_recorded_is_computed_as_it_is(store: Path) -> None:
    expected = passes(store, engine_of(store, None), STEPS[:2])
    engine = engine_of(store, FailingLanes(always=True))
    with pytest.warns(UserWarning, match="without recordings: operation not permitted") as told:
        found = passes(store, engine, STEPS[:2])
    assert are_same(found, expected)
    assert len(told) == 1
    assert "and more" not in str(told[0].message)
    assert recorder_of(engine).count == 0


def test_a_recording_that_failed_once_is_tried_again(store: Path) -> None:
    expected = passes(store, engine_of(store, None), STEPS[:2])
    lanes = FailingLanes(always=False)
    assert are_same(passes(store, engine_of(store, lanes), STEPS[:2]), expected)
    assert lanes.asked == 2 * lanes.captured > 0


@pytest.mark.parametrize("why", ["switch", "size"])
def test_nothing_is_recorded_where_it_is_not_worth_it(
    store: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "switch":
        monkeypatch.setenv(SWITCH, "0")
    else:
        monkeypatch.setattr("trainer.lora.recorded.PRODUCTS_MAX", 1000)
    lanes = RepeatingLanes()
    passes(store, engine_of(store, lanes), STEPS[:2])
    assert lanes.captured == 0


def test_work_at_the_same_addresses_is_repeated() -> None:
    lanes = RepeatingLanes()
    recorder = Recorder(lanes)
    recorder.may_record = True
    place = torch.zeros(2)
    for _ in range(5):
        recorder.repeat(("one", 1), lambda: place.add_(1))
    # The fake one works while it records.
    assert place.tolist() == [6.0, 6.0]
    assert (lanes.captured, lanes.repeated) == (1, 3)
    recorder.repeat(("one", 2), lambda: place.zero_())
    assert (place.tolist(), lanes.captured) == ([0.0, 0.0], 1)


def test_unpacked_weights_lie_where_they_lay(store: Path) -> None:
    engine = engine_of(store, None)
    block = next(stage for stage in engine.adapted.trunk if stage.is_block)
    memory = UnpackedMemory(torch.device("cpu"), torch.bfloat16)
    assert memory.places() is None
    memory.keep(block)
    places = memory.places()
    assert places is not None
    assert {name: tuple(t.shape) for name, t in places.items()} == {
        name: tuple(each.shape) for name, each in block.inner.parameters.items()
    }
    assert len({each.untyped_storage().data_ptr() for each in places.values()}) == 1
    memory.keep(block)
    again = memory.places()
    assert again is not None
    assert all(again[name] is each for name, each in places.items())
    assert memory.has_room(2 * block.inner.parameters["mlp.up_proj.weight"].shape[0])
    memory.keep(None)
    assert not memory.has_room(1)
