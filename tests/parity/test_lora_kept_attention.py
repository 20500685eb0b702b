"""Does keeping what attention gave between two passes of a compiled block change a bit?

The pieces of blocks are left as they are here, for compiling takes half a minute; a device compiles
them in `test_lora_real_sizes_cuda.py`. Both passes call the same pieces, compiled or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
from trainer.errors import InputError
from trainer.lora import compiled
from trainer.lora.engine import AdapterEngine
from trainer.lora.feeding import DeviceBase
from trainer.lora.stages import Binding

BATCHES, ROWS = 3, 2
FEW = ("q_proj", "v_proj")
FAMILIES = [("qwen2", "fp32"), ("qwen3", "bf16")]


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts attention's forward passes, and products forward with a matrix of its output."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attention = self.output = 0
        self._shape = shape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.attention += 1
        if func is torch.ops.aten.mm.default and not args[1].is_contiguous():
            self.output += tuple(args[1].shape) == self._shape
        return func(*args, **(kwargs or {}))


def left_as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compiled_closed", left_as_it_is)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda each: "-".join(each))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str, str]:
    """A store with random adapters, its family and the dtype that computes."""
    family, dtype = request.param
    _, store = imported_store(tmp_path_factory.mktemp("kept"), family)
    plant_adapters(store, adapter_engine(store, settings_of(family, targets=FEW)))
    return store, family, dtype


def engine_of(case: tuple[Path, str, str], activations: str, *, away: bool) -> AdapterEngine:
    store, family, dtype = case
    lora = settings_of(family, targets=FEW)
    engine = adapter_engine(
        store, lora, poison=True, dtype=dtype, compile_blocks=True, activations=activations
    )
    if away:
        base = DeviceBase(
            Device.from_name("cpu"), engine.options.torch_dtype, poison=True, inputs_on_host=True
        )
        object.__setattr__(engine.adapted, "base", base)
    return engine


def rows() -> Iterator[np.ndarray]:
    for seed in range(BATCHES):
        yield np.random.default_rng(seed).integers(3, 64, (ROWS, 41))


def run(case: tuple[Path, str, str], activations: str, *, away: bool) -> tuple[float, Named, Calls]:
    engine = engine_of(case, activations, away=away)
    with Calls((engine.config.query_size, engine.config.hidden_size)) as calls:
        loss, found = adapter_gradients(case[0], engine, [*rows()])
    return loss, found, calls


@pytest.mark.parametrize("away", [False, True], ids=["here", "away"])
def test_what_is_kept_changes_no_bit(case: tuple[Path, str, str], away: bool) -> None:
    loss, expected, twice = run(case, "recompute", away=away)
    kept_loss, kept, once = run(case, "attention", away=away)
    assert kept_loss == loss
    assert differing(kept, expected) == []
    assert all(bool(gradient.any()) for gradient in kept.values())
    visits = BATCHES * engine_of(case, "recompute", away=away).config.num_layers
    assert (twice.attention, once.attention) == (2 * visits, visits)
    assert twice.output - once.output == visits


@pytest.mark.parametrize("away", [False, True], ids=["here", "away"])
def test_control_what_another_micro_batch_left_is_noticed(
    case: tuple[Path, str, str], away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected, _ = run(case, "attention", away=away)
    leaving = Binding.leaving
    last: list[torch.Tensor] = []

    @contextmanager
    def of_the_last(self: Binding, left: list[torch.Tensor] | None) -> Iterator[None]:
        """Give each replay what the first replay had."""
        if self.is_replay and left:
            last[:] = last or [each.clone() for each in left]
            left = [*last]
        with leaving(self, left):
            yield

    monkeypatch.setattr(Binding, "leaving", of_the_last)
    _, found, _ = run(case, "attention", away=away)
    same = set(expected) - set(differing(found, expected))
    assert not same


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activations": "attention"}, "compiled blocks"),
        (
            {
                "activations": "attention",
                "compile_blocks": True,
                "activation_placement": "spill",
            },
            "file",
        ),
    ],
)
def test_it_is_refused_where_it_means_nothing(
    case: tuple[Path, str, str], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        adapter_engine(case[0], settings_of(case[1]), **options)
