"""Do recorded passes of compiled blocks with adapters give the bits of blocks as they are?

Both sides compile; one has recordings switched off. Steps change their rows' length, so that there
are several recordings of each way, for both slots of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
from trainer.lora.compiled import CompiledAdapted
from trainer.lora.engine import AdapterEngine
from trainer.lora.recorded import RECORDINGS_MAX, SWITCH, Recorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILY, FEW = "qwen3", ("q_proj", "v_proj")
WAYS = [
    ("none", "vram", "recompute"),
    ("none", "host", "attention"),
    ("nf4", "host", "recompute"),
    ("nf4", "host", "attention"),
]
Steps = Sequence[tuple[float, Named]]


def rows(*lengths: int, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(3, 64, (2, length)) for length in lengths]


STEPS = [
    *(rows(129, 129, 129, seed=seed) for seed in range(4)),
    *(rows(65, 65, seed=seed) for seed in range(4, 7)),
    rows(129, 65, 129, seed=7),
    rows(129, seed=8),
]


def engine_of(store: Path, quant: str, placement: str, activations: str) -> AdapterEngine:
    return adapter_engine(
        store,
        settings_of(FAMILY, targets=FEW, base_quant=quant),
        poison=True,
        device="cuda",
        dtype="bf16",
        compile_blocks=True,
        activation_placement=placement,
        activations=activations,
    )


def recorder_of(engine: AdapterEngine) -> Recorder:
    blocks = engine.adapted.step.blocks
    assert isinstance(blocks, CompiledAdapted)
    assert blocks.recorder is not None
    return blocks.recorder


def steps(store: Path, engine: AdapterEngine) -> Steps:
    return [adapter_gradients(store, engine, batches) for batches in STEPS]


def differences(mine: Steps, theirs: Steps) -> list[object]:
    found: list[object] = []
    for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        found += [(index, one[0], other[0])] if one[0] != other[0] else []
        found += [(index, name) for name in differing(one[1], other[1])]
    return found


@pytest.fixture(scope="module", params=["none", "nf4"])
def stores(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A base in a form, with random adapters."""
    quant = request.param
    if quant == "nf4":
        pytest.importorskip("bitsandbytes", reason="the extra `nf4` is not installed")
    _, store = imported_store(tmp_path_factory.mktemp("recorded"), FAMILY)
    engine = engine_of(store, quant, "vram", "recompute")
    if quant == "nf4":
        with shardb.open(store) as opened, opened.begin() as txn:
            assert engine.prepare_base(txn)
            txn.commit(step=1)
    plant_adapters(store, engine, step=2)
    engine.close()
    return quant, store


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_recorded_is_not_recorded(
    stores: tuple[str, Path], way: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way[0] != stores[0]:
        pytest.skip("of the other base")
    with monkeypatch.context() as patched:
        patched.setenv(SWITCH, "0")
        plain = engine_of(stores[1], *way)
        expected = steps(stores[1], plain)
        assert recorder_of(plain).count == 0
    engine = engine_of(stores[1], *way)
    found = steps(stores[1], engine)
    count = recorder_of(engine).count
    assert 4 <= count <= RECORDINGS_MAX, count
    assert differences(found, expected) == []
    assert all(bool(gradient.any()) for gradient in found[-1][1].values())


def test_control_adapters_of_the_visit_before_are_noticed(
    stores: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    way = (stores[0], "host", "recompute")
    expected = steps(stores[1], engine_of(stores[1], *way))
    brought: list[object] = []

    def once(self: Recorder, call: object) -> None:
        if not brought:
            brought.append(call)
            bring(self, call)  # type: ignore[arg-type]

    bring = Recorder._bring
    monkeypatch.setattr(Recorder, "_bring", once)
    assert differences(steps(stores[1], engine_of(stores[1], *way)), expected) != []
